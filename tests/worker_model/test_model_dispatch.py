"""Every way of sending rows, on 1 to 4 ranks: what one rank gives, the same bits each time, no row too many."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from worker_model_ranks import Results, run_ranks
from worker_model_support import small_config

from compute_worker.adapter_buffers import AdapterTensors
from compute_worker.dispatch.all_to_all import AllToAllDispatcher, needed_by_rank
from compute_worker.dispatch.allgather_reducescatter import SPLIT_BYTES, AllGatherDispatcher
from compute_worker.dispatch.base import Dispatcher
from compute_worker.dispatch.local import LocalDispatcher
from compute_worker.dispatch.sequence_parallel import SequenceParallelDispatcher, part_of
from compute_worker.ep_group import EPGroup
from compute_worker.expert_layer import ExpertLayer, PhysicalExperts
from compute_worker.expert_load import ExpertLoad
from compute_worker.expert_shard import WHOLE, ExpertShard
from compute_worker.experts_base import ExpertWeights, LoraPair
from compute_worker.experts_loop import LoopBackend
from compute_worker.experts_torch import TorchLayerExperts
from compute_worker.step_context import CurrentStep, StepContext
from epilora.model_spec import GateUpLayout, ModelSpec
from epilora.placement import ExpertPlacement
from epilora.settings import WorkerSettings

RANKS = (1, 2, 3, 4)
BACKENDS = ("allgather_reducescatter", "all_to_all")
PLACEMENTS = ("linear", "round_robin", "explicit")
LORA = ("all", "one", "no")
COUNTS = {"even": (16, 16, 16, 16), "ragged": (9, 2, 5, 1), "zero": (0, 7, 0, 3)}
NUM_EXPERTS, TOP_K, HIDDEN, WIDTH, LORA_RANK, LAYER = 7, 3, 32, 24, 2, 1
COPIED = (0, 5)
NUM_ADAPTER_SLOTS = 2


class Case(NamedTuple):
    """One cell of the table.

    Attributes:
        sp: ranks that hold the same tokens, of which each dispatches its part.
        tp: ranks that share each expert's width.
    """

    backend: str
    placement: str
    lora: str
    counts: str
    sp: int = 1
    tp: int = 1

    def num_tokens(self, num_ranks: int) -> list[int]:
        """Tokens that each rank holds."""
        return [COUNTS[self.counts][rank // self.sp] for rank in range(num_ranks)]

    def fits(self, num_ranks: int) -> bool:
        return num_ranks % self.sp == 0 and num_ranks % self.tp == 0


CASES = [Case(*parts) for parts in itertools.product(BACKENDS, PLACEMENTS, LORA, COUNTS)]
# With parallel ranks each pair of placement, adapters and counts once.
CASES += [
    Case(backend, PLACEMENTS[i], LORA[j], [*COUNTS][(i + j) % 3], *parallel)
    for backend in BACKENDS
    for parallel in ((2, 1), (1, 2), (2, 2))
    for i in range(3)
    for j in range(3)
]


def make_placement(name: str, model: ModelSpec, num_ranks: int) -> ExpertPlacement:
    """explicit: experts in an odd order, and two of them on every rank, so that they have as many copies as ranks."""
    if name != "explicit":
        return ExpertPlacement.make(name, model, num_ranks)
    order = [3 * expert % NUM_EXPERTS for expert in range(NUM_EXPERTS)]
    ranks = [order[rank::num_ranks] for rank in range(num_ranks)]
    table = tuple(tuple(experts + [e for e in COPIED if e not in experts]) for experts in ranks)
    return ExpertPlacement(strategy="explicit", num_ranks=num_ranks, tables={LAYER: table})


def random_tensor(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.3


def make_layer(  # noqa: PLR0917
    placement: ExpertPlacement,
    ep_rank: int,
    dispatcher: Dispatcher,
    current: CurrentStep,
    load: ExpertLoad,
    shard: ExpertShard = WHOLE,
) -> ExpertLayer:
    """ep_rank: rank of the placement."""
    local = list(placement.local_experts(LAYER, ep_rank))
    gate_up_eHD = random_tensor(1, NUM_EXPERTS, 2 * WIDTH, HIDDEN)[local]
    width = shard.width(WIDTH)
    weights = ExpertWeights(
        gate_up_eHD=shard.first(gate_up_eHD, 1, GateUpLayout.CONCATENATED),
        down_eDF=shard.second(random_tensor(2, NUM_EXPERTS, HIDDEN, WIDTH)[local], 2).contiguous(),
        gate=lambda h_RH: F.silu(h_RH[:, :width]) * h_RH[:, width:],
        layout=GateUpLayout.CONCATENATED,
    )
    return ExpertLayer(
        layer=LAYER,
        experts=TorchLayerExperts(weights, LoopBackend()),
        physical=PhysicalExperts.make(placement, LAYER, torch.device("cpu"), ep_rank=ep_rank),
        dispatcher=dispatcher,
        current=current,
        counter=load.counter(LAYER),
    )


def make_adapter(seed: int, local: tuple[int, ...], shard: ExpertShard = WHOLE) -> AdapterTensors:
    """Pairs of all local experts for both projections."""
    pairs = {}
    ranks = (LORA_RANK,) * len(local)
    for projection, out_features, in_features in (("gate_up", 2 * WIDTH, HIDDEN), ("down", HIDDEN, WIDTH)):
        a = random_tensor(10 * seed + out_features, NUM_EXPERTS, LORA_RANK, in_features)[list(local)]
        b = random_tensor(11 * seed + out_features, NUM_EXPERTS, out_features, LORA_RANK)[list(local)]
        a, b = shard.pair(projection, GateUpLayout.CONCATENATED, a.flatten(0, 1), b.flatten(), ranks)
        pairs[projection] = LoraPair(
            a=a,
            b=b,
            lora_rank=ranks,
            scale_e=torch.full((len(local),), 0.5 * seed),
            out_features=out_features if projection == "down" else shard.width(out_features),
        )
    return AdapterTensors(layers={LAYER: pairs}, dense={}, buffers=())


def tokens_of(ep_rank: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, experts, weights) of one rank; a choice is missing here and there, token 4 has none at all."""
    generator = torch.Generator().manual_seed(100 + ep_rank)
    x_TD = torch.randn((num_tokens, HIDDEN), generator=generator)
    weight_TK, expert_TK = torch.rand((num_tokens, NUM_EXPERTS), generator=generator).topk(TOP_K, dim=1)
    expert_TK[1::5, 2] = -1
    expert_TK[4::5] = -1
    return x_TD, expert_TK, weight_TK


def slots_of(lora: str, ep_rank: int, num_ranks: int, num_tokens: int) -> list[int]:
    if lora == "no" or (lora == "one" and ep_rank != num_ranks - 1):
        return [-1] * num_tokens
    return [(-1, 0, 1)[t % 3] for t in range(num_tokens)]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Whose tokens run, the tokens of every rank of the dispatch, and the experts that are local."""

    ep_rank: int
    num_ranks: int
    counts: list[int]
    local: tuple[int, ...]
    shard: ExpertShard = WHOLE


def run_layer(layer: ExpertLayer, current: CurrentStep, case: Case, place: Place) -> torch.Tensor:
    """The layer's output for the tokens that a case gives to a rank."""
    num_tokens = case.num_tokens(place.num_ranks)[place.ep_rank]
    holder = place.ep_rank // case.sp
    adapters = {slot: make_adapter(slot + 1, place.local, place.shard) for slot in (0, 1)}
    for slot, adapter in adapters.items():
        layer.experts.set_adapter(slot, adapter.layers[LAYER])
    current.context = StepContext(
        adapter_slots=slots_of(case.lora, holder, place.num_ranks // case.sp, num_tokens),
        num_tokens_per_rank=place.counts,
        active=adapters,
        device=torch.device("cpu"),
    )
    return layer.forward(*tokens_of(holder, num_tokens))


def rank_main(ep_rank: int, work: Path) -> Results:
    """The whole table, on groups of the first 1, 2, 3 and all 4 processes."""
    everyone = EPGroup.from_environment(WorkerSettings(model=work, num_ranks=max(RANKS), device="cpu"))
    model = ModelSpec.from_directory(work / "model")
    results: Results = {}
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for num_ranks in RANKS:
        data_group = dist.new_group(range(num_ranks))
        if ep_rank < num_ranks:
            group = replace(everyone, num_ranks=num_ranks, data_group=data_group)
            results[str(num_ranks)] = {
                case: _run_case(case, model, replace(group, expert_tp=case.tp), pairs)
                for case in CASES
                if case.fits(num_ranks)
            }
    return results


def _run_case(case: Case, model: ModelSpec, group: EPGroup, pairs: list[dist.ProcessGroup]) -> Results:
    # Both forms of rows: hidden states packed, and beside them.
    split_bytes = 0 if case.placement == "round_robin" else SPLIT_BYTES
    inner: AllToAllDispatcher | AllGatherDispatcher = AllGatherDispatcher(group, split_bytes=split_bytes)
    if case.backend == "all_to_all":
        inner = AllToAllDispatcher(group)
    dispatcher: Dispatcher = inner
    if case.sp > 1:
        assert case.sp == 2, case
        dispatcher = SequenceParallelDispatcher(
            inner, group=pairs[group.ep_rank // 2], num_parts=2, part=group.ep_rank % 2
        )
    placement, current = make_placement(case.placement, model, group.num_ranks // case.tp), CurrentStep()
    shard = ExpertShard(index=group.expert_tp_rank, count=case.tp)
    local = placement.local_experts(LAYER, group.placement_rank)
    load = ExpertLoad({LAYER: len(local)}, NUM_ADAPTER_SLOTS, torch.device("cpu"))
    layer = make_layer(placement, group.placement_rank, dispatcher, current, load, shard)
    place = Place(
        ep_rank=group.ep_rank,
        num_ranks=group.num_ranks,
        counts=case.num_tokens(group.num_ranks),
        local=local,
        shard=shard,
    )
    y_TD = run_layer(layer, current, case, place)
    load.refresh(worked=True)
    results = {"y": y_TD, "num_rows": load.rows[LAYER], "sent": list(getattr(inner, "num_pairs_sent", ()))}
    results["rows by adapter"] = [load.rows_of(slot)[LAYER] for slot in range(-1, NUM_ADAPTER_SLOTS)]
    results["again"] = run_layer(layer, current, case, place)
    results["plain"] = run_layer(layer, current, case._replace(lora="no"), place)
    return results


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelSpec, list[Results]]:
    work = tmp_path_factory.mktemp("dispatch")
    small_config("qwen2_moe").save_pretrained(work / "model")
    return ModelSpec.from_directory(work / "model"), run_ranks(max(RANKS), rank_main, work)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_cell_equals_one_rank(table: tuple[ModelSpec, list[Results]], backend: str, num_ranks: int) -> None:
    model, results = table
    current = CurrentStep()
    load = ExpertLoad({LAYER: NUM_EXPERTS}, NUM_ADAPTER_SLOTS, torch.device("cpu"))
    one = make_layer(make_placement("linear", model, 1), 0, LocalDispatcher(), current, load)
    for case in (case for case in CASES if case.backend == backend and case.fits(num_ranks)):
        for ep_rank, num_tokens in enumerate(case.num_tokens(num_ranks)):
            place = Place(ep_rank=ep_rank, num_ranks=num_ranks, counts=[num_tokens], local=tuple(range(NUM_EXPERTS)))
            expected = run_layer(one, current, case, place)
            got = results[ep_rank][str(num_ranks)][case]["y"]
            torch.testing.assert_close(
                got, expected, atol=1e-5, rtol=1e-5, msg=lambda m, c=case, r=ep_rank: f"{c}, rank {r}: {m}"
            )


@pytest.mark.parametrize("num_ranks", RANKS)
def test_bits_are_the_same_in_each_run_and_beside_adapters(
    table: tuple[ModelSpec, list[Results]], num_ranks: int
) -> None:
    _, results = table
    for case in (case for case in CASES if case.fits(num_ranks)):
        for ep_rank in range(num_ranks):
            mine = results[ep_rank][str(num_ranks)][case]
            assert torch.equal(mine["y"], mine["again"]), (case, ep_rank)
            slots = slots_of(case.lora, ep_rank // case.sp, num_ranks // case.sp, mine["y"].shape[0])
            base = [t for t, slot in enumerate(slots) if slot < 0]
            assert torch.equal(mine["y"][base], mine["plain"][base]), (case, ep_rank)
            # Ranks that hold the same tokens have the same results.
            other = results[ep_rank // case.sp * case.sp][str(num_ranks)][case]
            assert torch.equal(mine["y"], other["y"]), (case, ep_rank)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_all_to_all_sends_each_token_once_to_each_rank_of_its_experts(
    table: tuple[ModelSpec, list[Results]], num_ranks: int
) -> None:
    model, results = table
    for case in (case for case in CASES if case.backend == "all_to_all" and case.fits(num_ranks)):
        placement = make_placement(case.placement, model, num_ranks // case.tp)
        copies, num_copies = placement.copies(LAYER), placement.num_copies(LAYER)
        owner = [r for r in range(placement.num_ranks) for _ in placement.local_experts(LAYER, r)]
        for ep_rank, num_tokens in enumerate(case.num_tokens(num_ranks)):
            chosen = tokens_of(ep_rank // case.sp, num_tokens)[1].tolist()
            mine, shift = part_of(num_tokens, ep_rank % case.sp, case.sp), ep_rank // case.tp
            pairs = {
                (t, owner[copies[expert, (shift + t) % num_copies[expert]]])
                for t in range(mine.start, mine.stop)
                for expert in chosen[t]
                if expert >= 0
            }
            expected = Counter(rank for _, rank in pairs)
            sent = results[ep_rank][str(num_ranks)][case]["sent"]
            assert sent == [expected[rank // case.tp] for rank in range(num_ranks)], (case, ep_rank)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_reach_every_copy(table: tuple[ModelSpec, list[Results]], backend: str, num_ranks: int) -> None:
    model, results = table
    placement = make_placement("explicit", model, num_ranks)
    case = Case(backend, "explicit", "all", "even")
    num_tokens = case.num_tokens(num_ranks)
    total: Counter[int] = Counter()
    for ep_rank in range(num_ranks):
        num_rows = results[ep_rank][str(num_ranks)][case]["num_rows"]
        assert min(num_rows) > 0, (ep_rank, num_rows)
        for expert, count in zip(placement.local_experts(LAYER, ep_rank), num_rows, strict=True):
            total[expert] += count
    chosen = torch.cat([tokens_of(rank, count)[1] for rank, count in enumerate(num_tokens)])
    assert total == Counter(expert for expert in chosen.flatten().tolist() if expert >= 0)
    slots = torch.tensor([slot for rank, count in enumerate(num_tokens) for slot in slots_of("all", rank, 1, count)])
    for adapter_slot in range(-1, NUM_ADAPTER_SLOTS):
        by_adapter: Counter[int] = Counter()
        for ep_rank in range(num_ranks):
            counted = results[ep_rank][str(num_ranks)][case]["rows by adapter"][adapter_slot + 1]
            for expert, count in zip(placement.local_experts(LAYER, ep_rank), counted, strict=True):
                by_adapter[expert] += count
        mine = chosen[slots == adapter_slot].flatten().tolist()
        assert by_adapter == Counter(expert for expert in mine if expert >= 0)


def test_needed_ranks() -> None:
    """The docstring's example, and a rank without experts, to which nothing goes."""
    expert_TK = torch.tensor([[0, 1], [5, -1], [-1, -1]])
    needed = needed_by_rank(expert_TK, torch.tensor([2, 4, 6]))
    assert needed.tolist() == [[True, False, False], [False, False, True], [False, False, False]]
    needed = needed_by_rank(torch.tensor([[1, 2]]), torch.tensor([2, 2, 4]))
    assert needed.tolist() == [[True, False, True]]
