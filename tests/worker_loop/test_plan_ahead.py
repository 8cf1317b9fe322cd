"""Steps planned before the one ahead of them has run: what is promised is computed, and all else is as it was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch

from compute_worker.expert_queue import ExpertCall, ExpertQueue
from compute_worker.generate_step import GenerateStep
from compute_worker.kv_blocks import KVBlockPool
from compute_worker.model_runner import ModelRunner
from compute_worker.requests import Finish, GenerateOutput, Sequence
from compute_worker.scheduler import Chunk, Scheduler
from epilora.errors import EpiloraError, UnavailableError
from tests.oracle import Oracle
from tests.worker_loop.tiny_rank import NUM_TOKENS, PROMPTS, new_sequence

NUM_BLOCKS = 32


class World:
    """A rank that plans each step before it runs the one ahead of it."""

    def __init__(self, runner: ModelRunner, *, budget: int = 100, max_num_sequences: int = 8, defers: bool = False):
        self.active = {1: 0}
        self.blocks = KVBlockPool(num_blocks=NUM_BLOCKS, block_size=runner.kv_block_size)
        self.scheduler = Scheduler(
            blocks=self.blocks,
            max_num_sequences=max_num_sequences,
            max_num_batched_tokens=budget,
            slot_of=self.active.get,
            is_staged=lambda _: False,
        )
        self._step = GenerateStep(runner=runner, scheduler=self.scheduler, slot_of=lambda _: -1, defers=defers)
        self.next: list[Chunk] = []
        self.log: list[list[tuple[int, int, int]]] = []

    def add(self, prompt: list[int], *, max_tokens: int = NUM_TOKENS, stop: int = -1, generation: int = 0) -> Sequence:
        sequence = new_sequence(prompt, stop=stop, max_tokens=max_tokens, adapter_generation=generation)
        self.scheduler.add(sequence)
        return sequence

    def turn(self, between: Callable[[], None] = lambda: None) -> bool:
        """One step; `between` is called once the next one is planned. False if there was nothing to do."""
        chunks = self.next or self.scheduler.plan()
        self.next = []

        def plan_next() -> list[Chunk]:
            self.next = self.scheduler.plan(chunks)
            between()
            return self.next

        self.log.append([(c.sequence.num_prompt, c.start, c.length) for c in chunks])
        if chunks:
            self._step.run(chunks, [sum(chunk.length for chunk in chunks)], plan_next)
        return bool(chunks)

    def run(self) -> None:
        while self.turn():
            pass
        self._step.send()
        assert self.blocks.num_free == NUM_BLOCKS
        assert self.scheduler.num_running == 0


async def _read(sequence: Sequence) -> list[int]:
    return [token async for output in sequence.outputs.read() for token in output.token_ids]


def _delivered(sequence: Sequence) -> list[GenerateOutput | EpiloraError]:
    """What has come to the reader by now."""
    queue = sequence.outputs._queue
    return [queue.get_nowait() for _ in range(queue.qsize())]


@pytest.mark.parametrize("defers", [False, True], ids=["planned before", "planned beside"])
@pytest.mark.parametrize("budget", [100, 4], ids=["whole prompts", "chunks of a few tokens"])
async def test_tokens_are_the_same_and_steps_as_many(
    runner: ModelRunner, oracle: Oracle, budget: int, defers: bool
) -> None:
    world, plain = World(runner, budget=budget, defers=defers), World(runner, budget=budget)
    sequences = [world.add(prompt) for prompt in PROMPTS]
    for prompt in PROMPTS:
        plain.add(prompt)
    world.run()
    steps = []
    while chunks := plain.scheduler.plan():
        steps.append([(c.sequence.num_prompt, c.start, c.length) for c in chunks])
        plain._step.run(chunks, [sum(chunk.length for chunk in chunks)])
    assert world.log == [*steps, []]
    for prompt, sequence in zip(PROMPTS, sequences, strict=True):
        assert await _read(sequence) == oracle.greedy(prompt, NUM_TOKENS)


async def test_who_ends_by_max_tokens_has_no_chunk_more(runner: ModelRunner) -> None:
    world = World(runner)
    world.add(PROMPTS[1], max_tokens=1)
    world.add(PROMPTS[2], max_tokens=2)
    world.run()
    assert world.log == [[(2, 0, 2), (4, 0, 4)], [(4, 4, 1)], []]


async def test_after_a_stop_token_the_promised_chunk_runs_and_its_output_is_dropped(
    runner: ModelRunner, oracle: Oracle
) -> None:
    expected = oracle.greedy(PROMPTS[0], NUM_TOKENS)
    stop = expected[1]
    assert stop != expected[0]
    world = World(runner)
    sequence, other = world.add(PROMPTS[0], stop=stop, generation=1), world.add(PROMPTS[1])
    world.turn()
    world.turn()
    await asyncio.sleep(0)
    outputs = _delivered(sequence)
    assert [token for output in outputs for token in output.token_ids] == expected[:2]  # type: ignore[union-attr]
    assert outputs[-1].finish is Finish.STOP, "the answer leaves at once"  # type: ignore[union-attr]
    assert sequence.ended
    assert sequence.block_table, "the next step writes there"
    assert world.scheduler.uses(1), "and computes with its adapter"
    # As its reader does.
    sequence.cancelled = True
    world.turn()
    assert world.log[-1] == [(9, 10, 1), (2, 3, 1)]
    assert not world.scheduler.uses(1)
    assert sequence.block_table == ()
    world.run()
    assert world.log[3] == [(2, 4, 1)]
    assert _delivered(sequence) == []
    assert await _read(other) == oracle.greedy(PROMPTS[1], NUM_TOKENS)


async def test_the_last_promised_position_has_a_block(runner: ModelRunner, oracle: Oracle) -> None:
    """A stop one token before max_tokens: the promised chunk writes to the last position there is."""
    expected = oracle.greedy(PROMPTS[2], NUM_TOKENS)
    world = World(runner)
    number = next(n for n in range(3, 0, -1) if expected[n] not in expected[:n])
    sequence = world.add(PROMPTS[2], stop=expected[number], max_tokens=number + 2)
    world.run()
    assert world.log[-2] == [(4, sequence.num_positions - 1, 1)]
    assert await _read(sequence) == expected[: number + 1]


async def test_one_cancelled_in_between_keeps_its_promise(runner: ModelRunner, oracle: Oracle) -> None:
    world = World(runner, budget=4)
    decoding, prefilling, other = world.add([7], generation=1), world.add(PROMPTS[0]), world.add(PROMPTS[1])

    def cancel() -> None:
        decoding.cancelled = prefilling.cancelled = True

    world.turn(cancel)
    assert world.log == [[(1, 0, 1), (9, 0, 3)]]
    world.turn()
    assert world.log[-1] == [(1, 1, 1), (9, 3, 3)], "promised before they were cancelled"
    assert world.scheduler.uses(1)
    world.turn()
    assert world.log[-1] == [(2, 0, 2)], "not continued"
    assert not world.scheduler.uses(1)
    world.run()
    assert await _read(other) == oracle.greedy(PROMPTS[1], NUM_TOKENS)


async def test_one_cancelled_before_the_plan_is_not_continued(runner: ModelRunner) -> None:
    world = World(runner)
    sequence = world.add(PROMPTS[1])
    world.turn()
    sequence.cancelled = True
    world.turn()
    assert world.log[-1] == [(2, 2, 1)], "promised before"
    assert not world.turn()
    world.run()


async def test_logits_that_are_no_numbers_end_their_request_alone(
    runner: ModelRunner, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(runner)
    bad, good = world.add([21]), world.add(PROMPTS[2])
    forward = runner.forward

    def poisoned(*args: object) -> torch.Tensor | None:
        logits_NV = forward(*args)  # type: ignore[arg-type]
        assert logits_NV is not None
        return torch.cat([torch.full_like(logits_NV[:1], float("nan")), logits_NV[1:]])

    with monkeypatch.context() as patch:
        patch.setattr(runner, "forward", poisoned)
        world.turn()
    assert bad.token_ids == [21], "no token to go on with"
    with pytest.raises(EpiloraError, match="at position 1 are not finite"):
        await _read(bad)
    world.turn()
    assert world.log[-1] == [(1, 1, 1), (4, 4, 1)]
    assert bad.block_table == ()
    world.run()
    assert await _read(good) == oracle.greedy(PROMPTS[2], NUM_TOKENS)


async def test_a_place_is_taken_again_once_the_promised_chunk_has_run(runner: ModelRunner, oracle: Oracle) -> None:
    expected = oracle.greedy(PROMPTS[0], NUM_TOKENS)
    world = World(runner, max_num_sequences=1)
    world.add(PROMPTS[0], stop=expected[0])
    waiting = world.add(PROMPTS[1])
    world.run()
    # The plan behind the promised chunk is made before that has run.
    assert world.log[:2] == [[(9, 0, 9)], [(9, 9, 1)]]
    assert await _read(waiting) == oracle.greedy(PROMPTS[1], NUM_TOKENS)


async def test_what_arrives_during_a_step_is_in_the_second_plan_after_it(runner: ModelRunner) -> None:
    world = World(runner)
    world.add(PROMPTS[1])
    world.turn(lambda: world.add(PROMPTS[2]) and None)
    world.turn()
    world.turn()
    assert world.log == [[(2, 0, 2)], [(2, 2, 1)], [(2, 3, 1), (4, 0, 4)]]
    world.run()


async def test_fail_all_says_nothing_to_who_has_an_answer(runner: ModelRunner, oracle: Oracle) -> None:
    world = World(runner)
    done = world.add(PROMPTS[1], stop=oracle.greedy(PROMPTS[1], 1)[0])
    other = world.add(PROMPTS[2])
    world.turn()
    world.scheduler.fail_all(UnavailableError("rank 1 is gone", reason="RANK_LOST"))
    await asyncio.sleep(0)
    assert [output.finish for output in _delivered(done)] == [Finish.STOP]  # type: ignore[union-attr]
    assert isinstance(_delivered(other)[-1], UnavailableError)
    assert world.blocks.num_free == NUM_BLOCKS


def _call(layer: int, generation: int = 0) -> ExpertCall:
    return ExpertCall(
        layer=layer,
        x_TD=torch.zeros((2, 4)),
        topk=None,
        adapter_generations=(generation,) * 2,
        routed_only=False,
        result=Future(),
    )


def test_planned_expert_calls_are_planned_once_and_keep_their_adapters() -> None:
    queue = ExpertQueue(max_num_tokens=4, slot_of={1: 0, 2: 1}.get, is_staged=lambda _: False)
    first, second, third = _call(0, 1), _call(0), _call(0, 2)
    for call in (first, second, third):
        queue.add(call)
    assert queue.plan() == [first, second]
    first.result.cancel()
    assert queue.plan() == [third]
    assert (len(queue), queue.num_waiting) == (3, 0)
    assert [queue.uses(generation) for generation in (1, 2)] == [True, True], "a promise outlives its caller"
    queue.finish([first, second])
    assert [queue.uses(generation) for generation in (1, 2)] == [False, True]
    queue.fail_all(UnavailableError("rank 1 is gone", reason="RANK_LOST"))
    assert isinstance(third.result.exception(0), UnavailableError)
    assert len(queue) == 0
