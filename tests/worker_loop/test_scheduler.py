"""Which tokens go into a step: budget, chunks, admission by key/value blocks, adapters, cancellation."""

from __future__ import annotations

import asyncio

import pytest

from compute_worker.kv_blocks import KVBlockPool
from compute_worker.requests import Finish, GenerateOutput, GenerateRequest, OutputQueue, Sequence
from compute_worker.scheduler import Chunk, Scheduler
from epilora.errors import EpiloraError, FailedPreconditionError, ResourceExhaustedError, UnavailableError


class World:
    """A scheduler with small limits, and adapters that the test switches on."""

    def __init__(self, *, num_blocks: int = 8, max_num_sequences: int = 4, max_num_batched_tokens: int = 10) -> None:
        self.slots: dict[int, int] = {}
        self.staged: set[int] = set()
        self.blocks = KVBlockPool(num_blocks=num_blocks, block_size=4)
        self.loop = asyncio.get_running_loop()
        self.scheduler = Scheduler(
            blocks=self.blocks,
            max_num_sequences=max_num_sequences,
            max_num_batched_tokens=max_num_batched_tokens,
            slot_of=self.slots.get,
            is_staged=self.staged.__contains__,
        )

    def add(self, num_prompt: int, *, max_tokens: int = 2, generation: int = 0) -> Sequence:
        request = GenerateRequest(
            request_id=f"p{num_prompt}",
            token_ids=tuple(range(num_prompt)),
            max_tokens=max_tokens,
            adapter_generation=generation,
        )
        sequence = Sequence(request=request, outputs=OutputQueue(self.loop, 4))
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[tuple[int, int, int]]:
        """(prompt length, start, length) of each chunk of a step, then done."""
        chunks = self.scheduler.plan()
        for chunk in chunks:
            _compute(chunk)
        return [(c.sequence.num_prompt, c.start, c.length) for c in chunks]


def _compute(chunk: Chunk) -> None:
    completes = chunk.completes
    chunk.sequence.num_computed = chunk.start + chunk.length
    if completes:
        chunk.sequence.token_ids.append(7)


async def _error_of(sequence: Sequence) -> EpiloraError:
    with pytest.raises(EpiloraError) as caught:
        async for _ in sequence.outputs.read():
            pass
    return caught.value


async def test_a_long_prompt_is_prefilled_in_chunks_behind_decodes() -> None:
    world = World()
    world.add(3, max_tokens=5)
    world.add(12)
    assert world.step() == [(3, 0, 3), (12, 0, 7)]
    assert world.step() == [(3, 3, 1), (12, 7, 5)]
    assert world.step() == [(3, 4, 1), (12, 12, 1)]


async def test_decodes_come_first_when_the_budget_is_short() -> None:
    world = World(max_num_batched_tokens=2)
    first = world.add(2, max_tokens=4)
    world.add(3)
    world.step()
    assert first.num_generated == 1
    assert world.step() == [(2, 2, 1), (3, 0, 1)]


async def test_a_sequence_reserves_all_its_blocks_and_others_wait() -> None:
    world = World(num_blocks=3)
    # 4 prompt + 6 tokens - 1 = 9 positions: all three blocks.
    first = world.add(4, max_tokens=6)
    world.add(1)
    assert world.step() == [(4, 0, 4)]
    assert world.blocks.num_free == 0
    assert world.scheduler.num_waiting == 1
    world.scheduler.finish(first)
    assert world.blocks.num_free == 3
    assert world.step() == [(1, 0, 1)]


async def test_places_are_limited() -> None:
    world = World(max_num_sequences=2)
    for _ in range(3):
        world.add(1)
    assert len(world.step()) == 2
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (2, 1)


async def test_a_cancelled_sequence_frees_its_blocks_whether_it_runs_or_waits() -> None:
    world = World(num_blocks=2)
    running = world.add(5)
    waiting = world.add(5)
    world.step()
    running.cancelled = waiting.cancelled = True
    assert world.step() == []
    assert (world.blocks.num_free, world.scheduler.num_running, world.scheduler.num_waiting) == (2, 0, 0)


async def test_a_request_for_a_staged_adapter_waits_for_its_slot_without_holding_others() -> None:
    world = World()
    world.staged.add(9)
    world.add(2, generation=9)
    world.add(3)
    assert world.step() == [(3, 0, 3)]
    assert world.scheduler.uses(9)
    world.slots[9] = 0
    assert world.step() == [(3, 3, 1), (2, 0, 2)]


async def test_a_request_for_an_adapter_that_is_not_here_fails() -> None:
    world = World()
    sequence = world.add(2, generation=9)
    assert world.step() == []
    error = await _error_of(sequence)
    assert isinstance(error, FailedPreconditionError)
    assert error.reason == "ADAPTER_NOT_RESIDENT"


async def test_fail_all_ends_running_and_waiting_and_frees_blocks() -> None:
    world = World(max_num_sequences=1)
    sequences = [world.add(2), world.add(2)]
    world.step()
    world.scheduler.fail_all(UnavailableError("rank 1 is gone", reason="RANK_LOST"))
    assert [(await _error_of(s)).reason for s in sequences] == ["RANK_LOST", "RANK_LOST"]
    assert world.blocks.num_free == 8


async def test_a_slow_reader_is_told_and_dropped() -> None:
    queue = OutputQueue(asyncio.get_running_loop(), 2)
    assert queue.put(GenerateOutput(token_ids=(1,)))
    assert queue.put(GenerateOutput(token_ids=(2,)))
    assert not queue.put(GenerateOutput(token_ids=(3,)))
    sequence = Sequence(request=GenerateRequest(request_id="r", token_ids=(1,)), outputs=queue)
    assert queue.put(sequence.slow_reader_error())
    reader = queue.read()
    assert [(await anext(reader)).token_ids for _ in range(2)] == [(1,), (2,)]
    with pytest.raises(ResourceExhaustedError, match="read the stream faster"):
        await anext(reader)


async def test_the_queue_ends_after_the_last_output() -> None:
    queue = OutputQueue(asyncio.get_running_loop(), 2)
    queue.put(GenerateOutput(token_ids=(1,), finish=Finish.LENGTH))
    assert [output.token_ids async for output in queue.read()] == [(1,)]


def test_blocks_are_handed_out_once() -> None:
    pool = KVBlockPool(num_blocks=3, block_size=4)
    first, second = pool.allocate(8), pool.allocate(1)
    assert first is not None
    assert second is not None
    assert sorted((*first, *second)) == [0, 1, 2]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == ()
    pool.release(first)
    assert pool.num_free == 2
