"""Generate steps on a real tiny model: chunked prompts, several sequences, logits in small messages."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from compute_worker import generate_step
from compute_worker.generate_step import GenerateStep
from compute_worker.kv_blocks import KVBlockPool
from compute_worker.model_runner import ModelRunner
from compute_worker.requests import Finish, GenerateOutput, Sequence
from compute_worker.scheduler import Scheduler
from epilora.errors import FailedPreconditionError, ResourceExhaustedError
from tests.oracle import Oracle
from tests.worker_loop.tiny_rank import NUM_TOKENS, PROMPTS, new_sequence


def _add(scheduler: Scheduler, prompt: list[int], *, limit: int = 100, stop: int = -1) -> Sequence:
    sequence = new_sequence(prompt, stop=stop, limit=limit, return_logits=True, return_prompt_logits=True)
    scheduler.add(sequence)
    return sequence


def _scheduler(runner: ModelRunner, budget: int) -> Scheduler:
    return Scheduler(
        blocks=KVBlockPool(num_blocks=runner.num_kv_blocks, block_size=runner.kv_block_size),
        max_num_sequences=8,
        max_num_batched_tokens=budget,
        slot_of=lambda _: None,
        is_staged=lambda _: False,
    )


def _run(runner: ModelRunner, scheduler: Scheduler) -> int:
    """Steps until nothing is left; how many."""
    step = GenerateStep(runner=runner, scheduler=scheduler, slot_of=lambda _: -1)
    count = 0
    while chunks := scheduler.plan():
        step.run(chunks, [sum(chunk.length for chunk in chunks)])
        count += 1
    return count


async def _read(sequence: Sequence) -> list[GenerateOutput]:
    return [output async for output in sequence.outputs.read()]


@pytest.mark.parametrize("budget", [100, 4], ids=["whole prompts", "chunks of a few tokens"])
async def test_tokens_and_logits_are_transformers_own(
    runner: ModelRunner, oracle: Oracle, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two rows of logits a message, so that a prompt's come in several.
    monkeypatch.setattr(generate_step, "_LOGITS_MESSAGE_BYTES", 2 * runner.vocab_size * 4)
    scheduler = _scheduler(runner, budget)
    sequences = [_add(scheduler, prompt) for prompt in PROMPTS]
    num_steps = _run(runner, scheduler)
    assert (num_steps == NUM_TOKENS) == (budget == 100)
    for prompt, sequence in zip(PROMPTS, sequences, strict=True):
        outputs = await _read(sequence)
        tokens = [token for output in outputs for token in output.token_ids]
        assert tokens == oracle.greedy(prompt, NUM_TOKENS)
        pieces = [output.prompt_logits_NV for output in outputs if output.prompt_logits_NV is not None]
        assert max(len(piece) for piece in pieces) <= 2
        rows = [output.logits_NV for output in outputs if output.logits_NV is not None]
        got = np.concatenate([*pieces, *rows[1:]])
        expected = oracle.logits(prompt + tokens[:-1])
        torch.testing.assert_close(torch.from_numpy(got), expected, atol=1e-5, rtol=1e-5)
        assert [output.finish for output in outputs if output.token_ids] == [Finish.NOT_YET] * 4 + [Finish.LENGTH]
    assert scheduler.num_running == 0


async def test_a_stop_token_ends_and_is_sent(runner: ModelRunner, oracle: Oracle) -> None:
    prompt = PROMPTS[0]
    expected = oracle.greedy(prompt, NUM_TOKENS)
    stop = expected[1]
    scheduler = _scheduler(runner, 100)
    sequence = _add(scheduler, prompt, stop=stop)
    _run(runner, scheduler)
    outputs = await _read(sequence)
    tokens = [token for output in outputs for token in output.token_ids]
    assert tokens == expected[: expected.index(stop) + 1]
    assert outputs[-1].finish is Finish.STOP


async def test_a_slow_reader_frees_its_place_and_others_go_on(runner: ModelRunner, oracle: Oracle) -> None:
    scheduler = _scheduler(runner, 100)
    slow, other = _add(scheduler, PROMPTS[1], limit=2), _add(scheduler, PROMPTS[2])
    _run(runner, scheduler)
    tokens = [token for output in await _read(other) for token in output.token_ids]
    assert tokens == oracle.greedy(PROMPTS[2], NUM_TOKENS)
    assert slow.cancelled
    assert scheduler.num_running == 0


async def test_logits_that_are_no_numbers_end_their_request_alone(
    runner: ModelRunner, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = runner.forward

    def poisoned(*args: object) -> torch.Tensor | None:
        logits_NV = forward(*args)  # type: ignore[arg-type]
        assert logits_NV is not None
        return torch.cat([torch.full_like(logits_NV[:1], float("nan")), logits_NV[1:]])

    scheduler = _scheduler(runner, 100)
    bad = _add(scheduler, [21])
    good = _add(scheduler, PROMPTS[2])
    step = GenerateStep(runner=runner, scheduler=scheduler, slot_of=lambda _: -1)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "forward", poisoned)
        step.run(scheduler.plan(), [1 + len(PROMPTS[2])])
    with pytest.raises(FailedPreconditionError, match="not finite"):
        await _read(bad)
    _run(runner, scheduler)
    tokens = [token for output in await _read(good) for token in output.token_ids]
    assert tokens == oracle.greedy(PROMPTS[2], NUM_TOKENS)


async def test_a_step_that_defers_sends_with_the_next_one_or_when_told(runner: ModelRunner, oracle: Oracle) -> None:
    scheduler = _scheduler(runner, 100)
    sequence, slow = _add(scheduler, PROMPTS[1]), _add(scheduler, PROMPTS[2], limit=1)
    step = GenerateStep(runner=runner, scheduler=scheduler, slot_of=lambda _: -1, defers=True)
    counts = []
    while chunks := scheduler.plan():
        step.run(chunks, [sum(chunk.length for chunk in chunks)])
        await asyncio.sleep(0)
        counts.append(sequence.outputs._queue.qsize())
    # Prompt logits and a token from the first step, a token from each other one but the last.
    assert counts == [0, 2, 3, 4, 5]
    assert slow.cancelled
    step.send()
    outputs = await _read(sequence)
    assert [token for output in outputs for token in output.token_ids] == oracle.greedy(PROMPTS[1], NUM_TOKENS)
    assert outputs[-1].finish is Finish.LENGTH
    with pytest.raises(ResourceExhaustedError):
        await _read(slow)
