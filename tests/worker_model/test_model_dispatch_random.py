"""Random token counts, placements, adapters and forms of dispatch, for minutes, against one rank.

EPILORA_SOAK_SECONDS sets another duration.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from worker_model_dispatch import (
    BACKENDS,
    LAYER,
    NUM_ADAPTER_SLOTS,
    NUM_EXPERTS,
    PEER_BYTES,
    make_adapter,
    make_dispatcher_of,
    make_layer,
    tokens_of,
)
from worker_model_peers import shared_memory
from worker_model_ranks import Results, run_ranks

from compute_worker.dispatch.base import Dispatcher
from compute_worker.dispatch.local import LocalDispatcher
from compute_worker.dispatch.sequence_parallel import SequenceParallelDispatcher
from compute_worker.ep_group import EPGroup
from compute_worker.expert_load import ExpertLoad
from compute_worker.expert_shard import WHOLE, ExpertShard
from compute_worker.step_context import CurrentStep, StepContext
from epilora.placement import ExpertPlacement
from epilora.settings import WorkerSettings

NUM_RANKS = 4
SECONDS = float(os.environ.get("EPILORA_SOAK_SECONDS", "300"))
CASES_BETWEEN_LOOKS = 25
MAX_TOKENS = {"one_sided": 10}
"""Of a rank; an interpreter takes 3 ms for each and each rank."""
MANY_TOKENS = 40
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One random case, the same on every rank."""

    backend: str
    split_bytes: int
    sp: int
    tp: int
    placement: ExpertPlacement
    counts: list[int]
    adapter_slots: list[list[int]]

    @classmethod
    def draw(cls, rng: random.Random) -> Drawn:
        backend, sp, tp = rng.choice(BACKENDS), rng.choice((1, 1, 2)), rng.choice((1, 1, 2, 4))
        num_placed = NUM_RANKS // tp
        table: list[list[int]] = [[] for _ in range(num_placed)]
        for expert in rng.sample(range(NUM_EXPERTS), NUM_EXPERTS):
            for rank in rng.sample(range(num_placed), rng.choice((1, 1, 1, num_placed))):
                table[rank].append(expert)
        held = [rng.choice((0, 1, rng.randrange(MAX_TOKENS.get(backend, MANY_TOKENS)))) for _ in range(NUM_RANKS // sp)]
        slots = [[rng.randrange(-1, NUM_ADAPTER_SLOTS) for _ in range(count)] for count in held]
        return cls(
            backend=backend,
            split_bytes=rng.choice((0, 1 << 30)),
            sp=sp,
            tp=tp,
            placement=ExpertPlacement(
                strategy="explicit", num_ranks=num_placed, tables={LAYER: tuple(map(tuple, table))}
            ),
            counts=[held[rank // sp] for rank in range(NUM_RANKS)],
            adapter_slots=[slots[rank // sp] for rank in range(NUM_RANKS)],
        )

    def __str__(self) -> str:
        table = [self.placement.local_experts(LAYER, rank) for rank in range(self.placement.num_ranks)]
        return f"{self.backend} sp {self.sp} tp {self.tp} split {self.split_bytes} {table} {self.counts}"


class Bench:
    """One rank's process groups, and the layer of a group of one."""

    def __init__(self, group: EPGroup, work: Path) -> None:
        self._group = group
        self._memory = shared_memory(group, work, PEER_BYTES) if "one_sided" in BACKENDS else None
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        self._pair = pairs[group.ep_rank // 2]

    def output(self, case: Drawn) -> torch.Tensor:
        group = replace(self._group, expert_tp=case.tp)
        dispatcher = make_dispatcher_of(case.backend, group, self._memory, case.split_bytes)
        if case.sp > 1:
            dispatcher = SequenceParallelDispatcher(dispatcher, group=self._pair, num_parts=2, part=group.ep_rank % 2)
        shard = ExpertShard(index=group.expert_tp_rank, count=case.tp)
        return self._run(case, case.placement, group.placement_rank, dispatcher, shard, case.counts)

    def expected(self, case: Drawn) -> torch.Tensor:
        one = ExpertPlacement.of_experts("linear", {LAYER: NUM_EXPERTS}, 1)
        return self._run(case, one, 0, LocalDispatcher(), WHOLE, [case.counts[self._group.ep_rank]])

    def _run(  # noqa: PLR0917
        self,
        case: Drawn,
        placement: ExpertPlacement,
        placement_rank: int,
        dispatcher: Dispatcher,
        shard: ExpertShard,
        counts: list[int],
    ) -> torch.Tensor:
        current, local = CurrentStep(), placement.local_experts(LAYER, placement_rank)
        load = ExpertLoad({LAYER: len(local)}, NUM_ADAPTER_SLOTS, CPU)
        layer = make_layer(placement, placement_rank, dispatcher, current, load, shard)
        adapters = {slot: make_adapter(slot + 1, local, shard) for slot in range(NUM_ADAPTER_SLOTS)}
        for slot, adapter in adapters.items():
            layer.experts.set_adapter(slot, adapter.layers[LAYER])
        ep_rank = self._group.ep_rank
        current.context = StepContext(
            adapter_slots=case.adapter_slots[ep_rank], num_tokens_per_rank=counts, active=adapters, device=CPU
        )
        return layer.forward(*tokens_of(ep_rank // case.sp, case.counts[ep_rank]))


def rank_main(ep_rank: int, work: Path) -> Results:
    settings = WorkerSettings(model=work, num_ranks=NUM_RANKS, device="cpu")
    bench = Bench(EPGroup.from_environment(settings), work)
    rng, end, num_cases = random.Random(12), time.monotonic() + SECONDS, Counter[str]()
    goes_on = torch.ones(1)
    while goes_on.item():
        for _ in range(CASES_BETWEEN_LOOKS):
            case = Drawn.draw(rng)
            got, expected = bench.output(case), bench.expected(case)
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5, msg=lambda m, c=case: f"{c}: {m}")
            num_cases[case.backend] += 1
        # Rank 0's clock decides.
        goes_on.fill_(time.monotonic() < end)
        dist.broadcast(goes_on, src=0)
    return {"num_cases": num_cases}


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 300)
def test_random_cases_equal_one_rank(tmp_path: Path) -> None:
    results = run_ranks(NUM_RANKS, rank_main, tmp_path, deadline_seconds=SECONDS + 240)
    num_cases = results[0]["num_cases"]
    print(*(f"{backend}: {count} cases" for backend, count in sorted(num_cases.items())), sep=", ")
    assert all(result["num_cases"] == num_cases for result in results), results
    assert set(num_cases) == set(BACKENDS)
