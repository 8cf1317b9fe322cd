"""Step loops of three real ranks: whatever carries their messages, and however slowly, answers are the same.

Over gloo each step is agreed on while the one before it computes. The exchanges here take a set time, and so do the
steps: who waits for an exchange, and how long, does not depend on the machine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from worker_model_ranks import Results, run_ranks
from worker_model_support import prompt_tokens, random_adapter, small_config, write_model, write_slice

from compute_worker import worker as worker_module
from compute_worker.consensus import NO_LAYER, Consensus, Proposal
from compute_worker.ep_group import EPGroup
from compute_worker.expert_queue import ExpertCall
from compute_worker.requests import GenerateRequest, OutputQueue, Sequence
from compute_worker.step_loop import StepLoop
from compute_worker.worker import Worker
from epilora.errors import FailedPreconditionError
from epilora.settings import WorkerSettings

NUM_RANKS = 3
NUM_TOKENS = 8
LAYER = 1
DEADLINE = 100.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mode:
    """How the ranks agree on steps.

    Attributes:
        consensus: setting.
        exchange_seconds: an exchange takes at least so long from its beginning.
        step_seconds: a step takes at least so long.
        overlaps: whether exchanges begin early; None: as the consensus says.
        beside: the steps count as computed by a device beside the step thread.
    """

    consensus: str = "gloo"
    exchange_seconds: float = 0.0
    step_seconds: float = 0.0
    overlaps: bool | None = None
    beside: bool = False


MODES = {
    "board": Mode(consensus="shared_memory"),
    "gloo": Mode(),
    "gloo, beside a device": Mode(beside=True),
    "slow exchanges": Mode(exchange_seconds=0.03, step_seconds=0.04),
    "slower exchanges": Mode(exchange_seconds=0.04, step_seconds=0.015),
    "slow exchanges one by one": Mode(exchange_seconds=0.03, step_seconds=0.04, overlaps=False),
}


class SlowConsensus(Consensus):
    """Notes what each exchange still took when it was waited for: (the step has work, seconds of the set time left)."""

    def __init__(self, inner: Consensus, mode: Mode) -> None:
        self._inner = inner
        self._seconds = mode.exchange_seconds
        self._due = 0.0
        self.overlaps = inner.overlaps if mode.overlaps is None else mode.overlaps
        self.waits: list[tuple[bool, float]] = []

    def begin(self, mine: Proposal) -> None:
        self._due = time.monotonic() + self._seconds
        self._inner.begin(mine)

    def finish(self) -> list[Proposal]:
        left = max(0.0, self._due - time.monotonic())
        time.sleep(left)
        proposals = self._inner.finish()
        self.waits.append((any(p.num_tokens or p.expert_layer != NO_LAYER for p in proposals), left))
        return proposals

    def rest_seconds(self, idle_seconds: float) -> float:
        return self._inner.rest_seconds(idle_seconds)

    def rest(self, wake: threading.Event, seconds: float) -> None:
        self._inner.rest(wake, seconds)

    def ring(self) -> None:
        self._inner.ring()

    def abandon(self) -> None:
        self._inner.abandon()


def _request(seed: int, length: int, generation: int = 0, **options: object) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"{seed}",
        token_ids=tuple(prompt_tokens(seed, length)),
        adapter_generation=generation,
        max_tokens=NUM_TOKENS,
        **options,  # type: ignore[arg-type]
    )


REQUESTS = {
    0: [_request(1, 4), _request(2, 30, 1), _request(3, 2, 2)],
    1: [_request(4, 7, 1), _request(5, 1), _request(6, 19, 2), _request(7, 3), _request(8, 3, 1)],
}
"""By rank; the last one has none. Rank 1 has room for three at once."""
CANCELLED = 6


async def _read(loop: StepLoop, sequence: Sequence, limit: int) -> list[int]:
    """The tokens; cancelled after `limit` of them."""
    tokens: list[int] = []
    async for output in sequence.outputs.read():
        tokens += output.token_ids
        if len(tokens) >= limit:
            break
    loop.cancel(sequence)
    return tokens


def _calls(ep_rank: int) -> list[ExpertCall]:
    """Two calls that go together with an adapter, one that is cancelled, one of the other layer; rank 0 has none."""
    generator = torch.Generator().manual_seed(ep_rank)
    return [
        ExpertCall(
            layer=layer,
            x_TD=torch.randn((2, 32), generator=generator),
            topk=None,
            adapter_generations=(generation, 0),
            routed_only=False,
            result=Future(),
        )
        for layer, generation in ((LAYER, 1), (LAYER, 2), (LAYER, 0), (0, 1), (0, 1))
        if ep_rank
    ]


async def _serve(loop: StepLoop, ep_rank: int, stops: dict[int, int]) -> Results:
    """All requests of this rank, and on rank 0 the adapters' coming and going."""
    aio = asyncio.get_running_loop()
    requests = [
        dataclasses.replace(request, stop_token_ids=frozenset({stops[number]}) if number in stops else frozenset())
        for number, request in enumerate(REQUESTS.get(ep_rank, []))
    ]
    sequences = [Sequence(request=request, outputs=OutputQueue(aio, 100)) for request in requests]
    calls = _calls(ep_rank)
    for sequence in sequences:
        loop.add_sequence(sequence)
    for call in calls:
        loop.add_expert_call(call)
    if calls:
        calls[2].result.cancel()
    activated = [loop.activate(generation) for generation in (1, 2)] if ep_rank == 0 else []
    loop.start()
    for future in activated:
        await asyncio.wrap_future(future)
    # While requests on two ranks use them, some of which wait for room still.
    retired = [loop.retire(generation) for generation in (1, 2)] if ep_rank == 0 else []
    limits = [3 if request.request_id == f"{CANCELLED}" else NUM_TOKENS + 1 for request in requests]
    tokens = await asyncio.gather(*(_read(loop, s, limit) for s, limit in zip(sequences, limits, strict=True)))
    parts = [await asyncio.wrap_future(call.result) for call in calls if not call.result.cancelled()]
    for future in retired:
        await asyncio.wrap_future(future)
    late = ""
    if ep_rank == 0:
        sequence = Sequence(request=_request(9, 2, 1), outputs=OutputQueue(aio, 100))
        loop.add_sequence(sequence)
        with pytest.raises(FailedPreconditionError) as refused:
            await _read(loop, sequence, 1)
        late = refused.value.reason
    loop.stop()
    await asyncio.to_thread(loop._thread.join, DEADLINE)
    assert not loop._thread.is_alive()
    return {"tokens": tokens, "parts": parts, "late": late}


def _slowly(function: Callable[..., object], seconds: float) -> Callable[..., object]:
    def slow(*args: object) -> object:
        time.sleep(seconds)
        return function(*args)

    return slow


def _run_mode(worker: Worker, mode: Mode, adapters: list[Path], stops: dict[int, int]) -> Results:
    runner, settings = worker.runner, worker.settings
    for generation, path in enumerate(adapters, start=1):
        placement_id = runner.placed.placement.placement_id
        runner.pool.stage(name="a", generation=generation, path=path, placement_id=placement_id)
    worker.settings = settings.model_copy(update={"consensus": mode.consensus})
    slow: list[SlowConsensus] = []
    make, failures = worker_module.make_consensus, []
    forward, forward_experts = runner.forward, runner.forward_experts

    def make_slow(*args: object) -> Consensus:
        slow.append(SlowConsensus(make(*args), mode))  # type: ignore[arg-type]
        return slow[0]

    try:
        worker_module.make_consensus = make_slow
        runner.forward, runner.forward_experts = (  # type: ignore[method-assign]
            _slowly(f, mode.step_seconds) for f in (forward, forward_experts)
        )
        runner.computes_beside = mode.beside
        # Also: all ranks have staged the adapters.
        loop = worker._make_loop(failures.append)
        dist.barrier(worker._group.control_group)
        results = asyncio.run(_serve(loop, worker.ep_rank, stops))
    finally:
        worker.settings, worker_module.make_consensus = settings, make
        runner.forward, runner.forward_experts = forward, forward_experts  # type: ignore[method-assign]
    assert not failures
    assert not runner.pool.residents()
    assert (loop.num_running, loop.num_queued) == (0, 0)
    counted = loop.statistics.to_proto(num_expert_layers={}, num_steps_by_form={})
    return {
        **results,
        "overlaps": slow[0].overlaps,
        "waits": slow[0].waits,
        "num_waits": counted.num_consensus_waits,
        "wait_seconds": counted.consensus_wait_seconds,
        "num_steps": dict(counted.num_steps),
    }


def _ranks(ep_rank: int, work: Path) -> Results:
    settings = WorkerSettings(
        model=work / "model",
        num_ranks=NUM_RANKS,
        device="cpu",
        kv_cache_bytes=1 << 20,
        kv_block_size=4,
        max_num_sequences=3,
        max_num_batched_tokens=8,
        expert_steps_per_generate_step=2,
        collective_timeout_seconds=DEADLINE,
    )
    worker = Worker(settings=settings, group=EPGroup.from_environment(settings), on_failure=lambda _: None)
    adapters = [
        write_slice(
            work / f"adapter-{seed}-rank-{ep_rank}",
            random_adapter(worker.model, seed, rank_of={"gate_up": 2, "down": 2}),
            worker.runner.placed.load_spec,
        )
        for seed in (1, 2)
    ]
    # A token in the middle of each answer but one, which goes on to max_tokens.
    plain = _run_mode(worker, MODES["board"], adapters, {})
    stops = {number: tokens[len(tokens) // 2] for number, tokens in enumerate(plain["tokens"]) if number != 1}
    modes = {name: _run_mode(worker, mode, adapters, stops) for name, mode in MODES.items()}
    return {"plain": plain, "stops": stops, "modes": modes}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    work = tmp_path_factory.mktemp("step-loop")
    write_model(small_config("qwen3_moe"), work / "model")
    return run_ranks(NUM_RANKS, _ranks, work)


@pytest.mark.parametrize("name", [name for name in MODES if name != "board"])
def test_answers_are_those_of_the_board(results: list[Results], name: str) -> None:
    """Mixed batches with adapters that are retired meanwhile, stops, one cancelled, ExpertService calls."""
    for ep_rank, result in enumerate(results):
        board, got = result["modes"]["board"], result["modes"][name]
        assert got["tokens"] == board["tokens"], ep_rank
        for part, expected in zip(got["parts"], board["parts"], strict=True):
            torch.testing.assert_close(part, expected, atol=1e-5, rtol=1e-5)
        assert got["late"] == ("ADAPTER_NOT_RESIDENT" if ep_rank == 0 else "")


def test_the_answers_have_stops_and_whole_ones_and_a_cancelled_one(results: list[Results]) -> None:
    """Otherwise the comparison would show less than it says."""
    for ep_rank, requests in REQUESTS.items():
        plain, got = results[ep_rank]["plain"]["tokens"], results[ep_rank]["modes"]["gloo"]["tokens"]
        for number, request in enumerate(requests):
            expected = plain[number]
            if number in results[ep_rank]["stops"]:
                expected = expected[: expected.index(results[ep_rank]["stops"][number]) + 1]
            assert got[number] == expected, (ep_rank, number)
            assert len(plain[number]) == (3 if request.request_id == f"{CANCELLED}" else NUM_TOKENS)
        assert {len(tokens) for tokens in got} > {NUM_TOKENS}


def test_only_gloo_begins_early(results: list[Results]) -> None:
    for result in results:
        overlaps = {name: mode["overlaps"] for name, mode in result["modes"].items()}
        assert overlaps == {name: name not in {"board", "slow exchanges one by one"} for name in MODES}


def _between_steps(result: Results) -> list[float]:
    """What was left to wait for, where one step with work follows another."""
    waits = result["waits"]
    return [left for (before, _), (works, left) in itertools.pairwise(waits) if before and works]


def test_a_step_and_the_exchange_for_the_next_take_as_long_as_the_longer_one(results: list[Results]) -> None:
    for result in results:
        modes = result["modes"]
        between = {name: _between_steps(modes[name]) for name in modes}
        # Steps take longer than exchanges: nobody waits for one.
        assert set(between["slow exchanges"]) == {0.0}
        # Exchanges take longer: what is left of them is waited for.
        longer = MODES["slower exchanges"]
        assert max(between["slower exchanges"]) <= longer.exchange_seconds - longer.step_seconds
        # One by one, they are waited for, unless a busy machine kept the thread from it so long.
        one_by_one = modes["slow exchanges one by one"]
        assert statistics.median(between["slow exchanges one by one"]) > 0
        assert one_by_one["wait_seconds"] >= sum(between["slow exchanges one by one"])
        for name, mode in modes.items():
            assert mode["num_waits"] == len(between[name]), name
            assert len(between[name]) >= NUM_TOKENS - 1


def test_every_rank_took_the_same_steps(results: list[Results]) -> None:
    for name in MODES:
        steps = [result["modes"][name]["num_steps"] for result in results]
        assert steps[0] == steps[1] == steps[2]
        assert steps[0]["expert"] >= 2
