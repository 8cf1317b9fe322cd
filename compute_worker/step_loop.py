"""The step loop: one thread that, in lockstep with the other ranks, computes everything this rank is asked for.

Each turn: take in what arrived, plan, agree with the other ranks (`Consensus`), flip adapters (`ControlLog`),
then one generate step and one expert step, if any rank has such work. A rank without work joins
the collectives with no tokens. The loop waits for the other ranks only, never for a client.

Where agreeing takes long (`Consensus.overlaps`), a turn with work plans the next one before its own tokens are known,
so that the ranks agree on that while they compute. What arrives during a step then waits for the second one after it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass

import structlog
import torch

from compute_worker.consensus import NO_LAYER, Consensus, Proposal
from compute_worker.control_log import Applied, ControlLog
from compute_worker.expert_queue import ExpertCall, ExpertQueue, join
from compute_worker.generate_step import GenerateStep
from compute_worker.model_runner import ModelRunner
from compute_worker.requests import Sequence
from compute_worker.scheduler import Chunk, Scheduler
from compute_worker.step_statistics import StepStatistics
from epilora.errors import EpiloraError, UnavailableError

log = structlog.get_logger(__name__)

_WAITING_SECONDS = 0.002
"""Between two turns without work while something waits here, for an adapter that is about to be active."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """What this rank does in a step, as its proposal says."""

    chunks: list[Chunk]
    calls: list[ExpertCall]


class StepLoop:
    """Owns the step thread.

    Args:
        ep_rank: this rank; 0 leads.
        runner: computes the steps.
        scheduler: sequences of this rank.
        experts: ExpertService calls of this rank.
        control: adapter changes.
        consensus: agreement with the other ranks.
        expert_steps_per_generate_step: expert steps done at most for each generate step while both have work.
        on_failure: called in the step thread when the loop cannot go on; the process has to end.
    """

    def __init__(
        self,
        *,
        ep_rank: int,
        runner: ModelRunner,
        scheduler: Scheduler,
        experts: ExpertQueue,
        control: ControlLog,
        consensus: Consensus,
        expert_steps_per_generate_step: int,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._leads = ep_rank == 0
        self._ep_rank = ep_rank
        self._runner = runner
        self._scheduler = scheduler
        self._experts = experts
        self._control = control
        self._consensus = consensus
        self._expert_ratio = expert_steps_per_generate_step
        self._on_failure = on_failure
        self._generate = GenerateStep(
            runner=runner, scheduler=scheduler, slot_of=control.slot_in_use, defers=runner.computes_beside
        )
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._arriving: deque[Sequence] = deque()
        """Sequences that the inbox is about to add, in its order or nearly so."""
        self._wake = threading.Event()
        self._stopping = False
        self._step = 0
        self._next: _Plan | None = None
        self._worked = False
        self._last_turn = time.monotonic()
        self._last_work = self._last_turn
        self.statistics = StepStatistics()
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Asks the loop to end; it does once every rank was asked."""
        self._post(lambda: setattr(self, "_stopping", True))

    @property
    def step(self) -> int:
        """Number of the last step."""
        return self._step

    @property
    def seconds_since_turn(self) -> float:
        """Age of the last completed turn, for the watchdog."""
        return time.monotonic() - self._last_turn

    @property
    def num_running(self) -> int:
        """Requests being generated."""
        return self._scheduler.num_running

    @property
    def num_queued(self) -> int:
        """Requests that wait to be generated. ExpertService calls do not count: their streams have limits."""
        return self._scheduler.num_waiting + len(self._arriving)

    def add_sequence(self, sequence: Sequence) -> None:
        """Hands a request over. Any thread."""
        self._arriving.append(sequence)
        self._post(lambda: self._scheduler.add(self._arriving.popleft()))

    def cancel(self, sequence: Sequence) -> None:
        """Ends a request whose answer nobody wants any more. Any thread."""
        sequence.cancelled = True
        self._wake.set()
        self._consensus.ring()

    def add_expert_call(self, call: ExpertCall) -> None:
        """Hands an ExpertService call over. Any thread."""
        self._post(lambda: self._experts.add(call))

    def activate(self, generation: int) -> Future[Applied]:
        """Leader: gives a staged generation a slot on every rank. Any thread."""
        future: Future[Applied] = Future()
        self._post(lambda: self._control.submit_activate(generation, future))
        return future

    def retire(self, generation: int) -> Future[Applied]:
        """Leader: takes a generation away on every rank. Any thread."""
        future: Future[Applied] = Future()
        self._post(lambda: self._control.submit_retire(generation, future))
        return future

    def place(self, number: int) -> Future[Applied]:
        """Leader: takes a prepared move to another placement up on every rank. Any thread."""
        future: Future[Applied] = Future()
        self._post(lambda: self._control.submit_place(number, future))
        return future

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.put(action)
        self._wake.set()
        self._consensus.ring()

    def _run(self) -> None:
        try:
            self._runner.enter_thread()
            with torch.inference_mode():
                while self._turn():
                    pass
            self._fail_all(UnavailableError("the worker is stopping", reason="STOPPING", retry_after_seconds=1.0))
        except BaseException as error:
            log.error("the step loop ended", step=self._step, exc_info=error)
            self._consensus.abandon()
            reason = error.message if isinstance(error, EpiloraError) else f"{type(error).__name__}: {error}"
            self._fail_all(
                UnavailableError(
                    f"rank {self._ep_rank} lost its group at step {self._step} ({reason}); it restarts, try again",
                    reason="RANK_LOST",
                    retry_after_seconds=2.0,
                )
            )
            self._on_failure(error)

    def _fail_all(self, error: EpiloraError) -> None:
        self._take_in()
        self._generate.send()
        self._scheduler.fail_all(error)
        self._experts.fail_all(error)
        self._control.fail_all(error)

    def _turn(self) -> bool:
        self._step += 1
        planned, self._next = self._next, None
        plan = planned or self._propose(self._step)
        start = time.perf_counter()
        proposals = self._consensus.finish()
        waited = time.perf_counter() - start
        outstanding = self._control.advance(
            step=self._step,
            announced=proposals[0].announced,
            acknowledged=[p.acknowledged for p in proposals],
            refused=[p.refused for p in proposals],
        )
        works = any(p.num_tokens or p.expert_layer != NO_LAYER for p in proposals)
        stops = all(p.stopping for p in proposals)
        if works and self._worked:
            self.statistics.record_wait(waited)
        self._worked = works
        # The same on all ranks.
        plans_next = works and not stops and self._consensus.overlaps
        self._generate_step(plan.chunks, [p.num_tokens for p in proposals], plans_next=plans_next)
        if plans_next and self._next is None:
            self._plan_next([])
        self._expert_step(plan.calls, proposals)
        self._runner.placed.expert_load.refresh(worked=works)
        self._last_turn = time.monotonic()
        if stops:
            return False
        if works:
            self._last_work = self._last_turn
        elif not outstanding and planned is None:
            # After a plan made ahead something may have arrived that it does not have yet.
            self._rest()
        return True

    def _propose(self, step: int, after: SequenceOf[Chunk] = ()) -> _Plan:
        """Plans a step, as if the chunks of the one ahead of it had run, and tells the other ranks.

        Nothing is taken in between a proposal and the end of its exchange: what it says of the control log stays true.
        The step that runs in between can only end the use of an adapter.
        """
        self._take_in()
        # With a ratio of n, n - 1 of n steps are for ExpertService calls alone, while there are any. Steps are
        # counted together, so ranks with such calls leave out their generate tokens in the same steps.
        generates = step % self._expert_ratio == 0 or not self._experts.num_waiting
        chunks = self._scheduler.plan(after) if generates else []
        calls = self._experts.plan()
        self._consensus.begin(
            Proposal(
                step=step,
                num_tokens=sum(chunk.length for chunk in chunks),
                expert_layer=calls[0].layer if calls else NO_LAYER,
                num_expert_tokens=sum(call.num_tokens for call in calls),
                acknowledged=self._control.acknowledged(),
                refused=self._control.refused(),
                announced=self._control.next_announcement() if self._leads else None,
                stopping=self._stopping,
            )
        )
        return _Plan(chunks=chunks, calls=calls)

    def _plan_next(self, chunks: list[Chunk]) -> list[Chunk]:
        """Plans the next step while that of these chunks has yet to run; its chunks."""
        self._next = self._propose(self._step + 1, after=chunks)
        return self._next.chunks

    def _rest(self) -> None:
        seconds = self._consensus.rest_seconds(self._last_turn - self._last_work)
        if self.num_running or self.num_queued or len(self._experts):
            seconds = min(seconds, _WAITING_SECONDS)
        self._consensus.rest(self._wake, seconds)

    def _take_in(self) -> None:
        self._wake.clear()
        while True:
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                return

    def _generate_step(self, chunks: list[Chunk], num_tokens_per_rank: list[int], *, plans_next: bool) -> None:
        if not any(num_tokens_per_rank):
            self._generate.send()
            return
        start = time.perf_counter()
        self._generate.run(chunks, num_tokens_per_rank, (lambda: self._plan_next(chunks)) if plans_next else list)
        mine = num_tokens_per_rank[self._ep_rank]
        self.statistics.record("generate", num_tokens=mine, seconds=time.perf_counter() - start)

    def _expert_step(self, calls: list[ExpertCall], proposals: list[Proposal]) -> None:
        layers = sorted({p.expert_layer for p in proposals if p.expert_layer != NO_LAYER})
        for layer in layers:
            start = time.perf_counter()
            num_tokens = [p.num_expert_tokens if p.expert_layer == layer else 0 for p in proposals]
            mine = calls if calls and calls[0].layer == layer else []
            self._forward_experts(layer, mine, num_tokens)
            self.statistics.record("expert", num_tokens=num_tokens[self._ep_rank], seconds=time.perf_counter() - start)

    def _forward_experts(self, layer: int, calls: list[ExpertCall], num_tokens: list[int]) -> None:
        if not calls:
            self._runner.forward_experts(layer, None, None, [], False, num_tokens)
            return
        x_TD, topk, generations = join(calls)
        slots = [self._control.slot_in_use(generation) for generation in generations]
        y_TD = self._runner.forward_experts(layer, x_TD, topk, slots, calls[0].routed_only, num_tokens)
        assert y_TD is not None
        y_TD = y_TD.to("cpu")
        parts = torch.split(y_TD, [call.num_tokens for call in calls])
        for call, part in zip(calls, parts, strict=True):
            # A cancelled call has no reader any more.
            if call.result.set_running_or_notify_cancel():
                call.result.set_result(part)
        self._experts.finish(calls)
