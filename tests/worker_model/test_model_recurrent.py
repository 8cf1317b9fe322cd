"""Layers with a recurrent state in one batch with others: every sequence goes on from its own state, exactly."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.cache_utils import Cache, DynamicCache
from worker_model_families import CONFIGS, RECURRENT, family_config, parameters
from worker_model_support import (
    Adapter,
    Chunk,
    Prompt,
    Rank,
    prompt_tokens,
    random_adapter,
    reference_logits,
    reference_model,
    write_model,
)

from compute_worker import model_runner
from compute_worker.generate_step import GenerateStep
from compute_worker.kv_blocks import KVBlockPool
from compute_worker.recurrent import fixed_parts
from compute_worker.recurrent_probe import RecurrentProbe
from compute_worker.requests import GenerateRequest, OutputQueue, Sequence
from compute_worker.scheduler import Scheduler
from compute_worker.state_cache import StateCache, StateShape
from epilora.errors import InvalidArgumentError
from tests.oracle import Oracle

NUM_TOKENS = 4


@pytest.fixture(scope="module", params=parameters(RECURRENT))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(family_config(request.param, CONFIGS[request.param]), tmp_path_factory.mktemp(request.param))


async def test_continuous_batching_gives_transformers_own_tokens(model: Path, tmp_path: Path) -> None:
    """Prompts in small chunks, more of them than places, one cancelled on the way: places are used again."""
    runner = Rank(model, work=tmp_path, max_num_sequences=2).runner
    oracle = Oracle(model)
    scheduler = Scheduler(
        blocks=KVBlockPool(num_blocks=runner.num_kv_blocks, block_size=runner.kv_block_size),
        max_num_sequences=runner.max_num_sequences,
        max_num_batched_tokens=5,
        slot_of=lambda _: None,
        is_staged=lambda _: False,
    )
    step = GenerateStep(runner=runner, scheduler=scheduler, slot_of=lambda _: -1)
    prompts = [prompt_tokens(seed, 3 + 4 * seed) for seed in range(4)]
    sequences = [_add(scheduler, prompt) for prompt in (*prompts, prompts[0])]
    cancelled, num_steps, running = sequences[1], 0, set()
    while chunks := scheduler.plan():
        running |= {chunk.sequence.place for chunk in chunks}
        step.run(chunks, [sum(chunk.length for chunk in chunks)])
        num_steps += 1
        cancelled.cancelled = cancelled.cancelled or cancelled.num_computed > 2
    assert running == {0, 1}
    assert 0 < cancelled.num_computed < cancelled.num_positions, "cancelled in the middle"
    for prompt, sequence in zip((*prompts, prompts[0]), sequences, strict=True):
        if sequence is not cancelled:
            tokens = [token async for output in sequence.outputs.read() for token in output.token_ids]
            assert tokens == oracle.greedy(prompt, NUM_TOKENS)


def _add(scheduler: Scheduler, prompt: list[int]) -> Sequence:
    request = GenerateRequest(request_id="r", token_ids=tuple(prompt), max_tokens=NUM_TOKENS)
    sequence = Sequence(request=request, outputs=OutputQueue(asyncio.get_running_loop(), 100))
    scheduler.add(sequence)
    return sequence


def test_what_a_place_held_before_reaches_nobody(model: Path, tmp_path: Path) -> None:
    rank = Rank(model, work=tmp_path, max_num_sequences=3)
    states = rank.runner._recurrent.cache
    prompts = [Prompt(tokens=prompt_tokens(seed, 7)) for seed in range(2)]
    clean = rank.prefill(prompts)
    for tensor in (*states.conv.values(), *states.recurrent.values()):
        tensor.fill_(float("nan"))
    rank.forget_blocks()
    for logits, expected in zip(rank.prefill(prompts), clean, strict=True):
        assert torch.equal(logits, expected)
    others = [tensor[2] for tensor in (*states.conv.values(), *states.recurrent.values())]
    assert all(bool(tensor.isnan().all()) for tensor in others), "places of nobody are not touched"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_base_rows_keep_their_bits(model: Path, tmp_path: Path, dtype: str) -> None:
    """Whether adapters share the batch or not: in prompts, in their later chunks, and in decode steps."""
    rank = Rank(model, work=tmp_path, dtype=dtype)
    rank.add_adapter(_adapter(rank), slot=0, work=tmp_path)
    alone, shared = (_stepwise(rank, slots) for slots in ((-1, -1, -1), (-1, 0, 0)))
    assert all(torch.equal(*pair) for pair in zip(alone[0], shared[0], strict=True))
    assert not any(torch.equal(*pair) for pair in zip(alone[1], shared[1], strict=True))


def _adapter(rank: Rank) -> Adapter:
    """Pairs on all experts and on all linear maps whose pairs take effect."""
    ranks = {"down": 3} if rank.spec.model_type == "nemotron_h" else {"gate_up": 3, "down": 2}
    return random_adapter(rank.spec, 1, rank_of=ranks)


def _stepwise(rank: Rank, slots: tuple[int, ...]) -> list[list[torch.Tensor]]:
    """Logits of each prompt's steps."""
    rank.forget_blocks()
    prompts = [Prompt(tokens=prompt_tokens(seed, 12), slot=slot) for seed, slot in enumerate(slots)]
    blocks = [rank.blocks(12) for _ in prompts]
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    for start, stop in ((0, 5), (5, 9), (9, 10), (10, 11)):
        chunks = [Chunk(prompt=p, start=start, stop=stop, blocks=b) for p, b in zip(prompts, blocks, strict=True)]
        for into, rows in zip(logits, rank.step(chunks), strict=True):
            into.append(rows)
    return logits


def test_a_batch_of_all_kinds_of_chunks(model: Path, tmp_path: Path) -> None:
    """Decodes, a later chunk and a beginning in one step, in any order."""
    rank = Rank(model, work=tmp_path)
    adapter = _adapter(rank)
    rank.add_adapter(adapter, slot=0, work=tmp_path)
    prompts = [Prompt(tokens=prompt_tokens(seed, 11), slot=slot) for seed, slot in enumerate((-1, 0, 0, -1))]
    blocks = [rank.blocks(11) for _ in prompts]

    def chunk(number: int, start: int, stop: int) -> Chunk:
        return Chunk(prompt=prompts[number], start=start, stop=stop, blocks=blocks[number])

    first = rank.step([chunk(0, 0, 6), chunk(2, 0, 1), chunk(3, 0, 4)])
    second = rank.step([chunk(3, 4, 5), chunk(0, 6, 11), chunk(1, 0, 11), chunk(2, 1, 2)])
    third = rank.step([chunk(2, 2, 11), chunk(3, 5, 11)])
    got = {
        0: [first[0], second[1]],
        1: [second[2]],
        2: [first[1], second[3], third[0]],
        3: [first[2], second[0], third[1]],
    }
    for number, parts in got.items():
        prompt = prompts[number]
        expected = reference_logits(model, adapter if prompt.slot == 0 else None, rank.spec, prompt.tokens)
        torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=1e-4)


def test_rows_that_begin_and_rows_of_nobody_in_a_decode_step(model: Path, tmp_path: Path) -> None:
    """Steps of fixed shapes: sequences that begin with one token and padding rows share one part with the others."""
    rank = Rank(model, work=tmp_path)
    recurrent = rank.runner._recurrent
    tokens = [prompt_tokens(seed, 6) for seed in range(2)]
    blocks = [rank.blocks(6), rank.blocks(6), rank.blocks(6)]
    rank.step([Chunk(prompt=Prompt(tokens=tokens[0]), start=0, stop=5, blocks=blocks[0])])
    for tensor in (*recurrent.cache.conv.values(), *recurrent.cache.recurrent.values()):
        tensor[1:].fill_(float("nan"))
    places = torch.tensor([0, 1, recurrent.cache.spare_place])
    parts = fixed_parts(places, torch.tensor([6, 1, 0]), adapters=())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "prepare_parts", lambda *_: parts)
        spans = [(tokens[0], 5, blocks[0]), (tokens[1], 0, blocks[1]), ([0], 0, blocks[2])]
        chunks = [Chunk(prompt=Prompt(tokens=t), start=at, stop=at + 1, blocks=b) for t, at, b in spans]
        logits = rank.step(chunks)
    for (prompt, at, _), row in zip(spans, logits, strict=True):
        expected = reference_logits(model, None, rank.spec, prompt[: at + 1])[-1:]
        torch.testing.assert_close(row, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("reads_from", "unread", "in_chunks"),
    [(1, False, True), (2, True, True), (None, True, False)],
    ids=["always", "in chunks only", "never"],
)
def test_the_trial_finds_out_whether_a_state_is_read(reads_from: int | None, unread: bool, in_chunks: bool) -> None:
    def run(x: torch.Tensor, cache: Cache) -> torch.Tensor:
        before = cache.layers[3].recurrent_states[0] if cache.has_previous_state(3) else None
        reads = before is not None and reads_from is not None and x.shape[1] >= reads_from
        carried = before.sum() if reads else 0.0
        cache.update_conv_state(x.transpose(1, 2), 3, conv_kernel_size=4)
        cache.update_recurrent_state(x.float().sum(1), 3)
        # The convolution's state is read in any case.
        return x + cache.layers[3].conv_states[0].sum() + carried

    probe = RecurrentProbe()
    probe.forward(3, run, torch.ones(1, 1, 6))
    assert probe.unread == ({3} if unread else set())
    assert probe.shapes == {
        3: StateShape(
            conv=(6, 4),
            conv_dtype=torch.float32,
            recurrent=(6,),
            recurrent_dtype=torch.float32,
            in_chunks=in_chunks,
        )
    }


def test_nemotrons_smallest_time_step_is_heeded_where_transformers_does(tmp_path: Path) -> None:
    config = family_config("nemotron_h", {**CONFIGS["nemotron_h"], "time_step_min": 0.5})
    model = write_model(config, tmp_path / "model")
    tokens = prompt_tokens(1, 9)
    reference, cache, expected = reference_model(model), DynamicCache(config=config), []
    for start, stop in ((0, 6), (6, 7), (7, 8), (8, 9)):
        with torch.no_grad():
            ids = torch.tensor([tokens[start:stop]])
            expected.append(reference(input_ids=ids, past_key_values=cache, use_cache=True).logits[0])
    rank = Rank(model, work=tmp_path)
    blocks = rank.blocks(9)
    got = [
        rank.step([Chunk(prompt=Prompt(tokens=tokens), start=start, stop=stop, blocks=blocks)])[0]
        for start, stop in ((0, 6), (6, 7), (7, 8), (8, 9))
    ]
    torch.testing.assert_close(torch.cat(got), torch.cat(expected), atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        whole = reference(input_ids=torch.tensor([tokens])).logits[0]
    assert (whole - torch.cat(expected)).abs().max() > 1e-2, "the limit makes no difference: the test proves nothing"


def test_states_are_counted_and_limited(model: Path, tmp_path: Path) -> None:
    runner = Rank(model, work=tmp_path, max_num_sequences=5).runner
    place_bytes = StateCache.place_bytes(runner._recurrent.cache.shapes)
    assert runner.max_num_sequences == 5
    assert runner.memory().state_cache_bytes == (5 + 1) * place_bytes > 0
    limited = Rank(model, work=tmp_path, max_num_sequences=5, state_cache_bytes=3 * place_bytes + 1).runner
    assert limited.max_num_sequences == 2
    assert limited.memory().state_cache_bytes == (2 + 1) * place_bytes
    with pytest.raises(InvalidArgumentError, match=f"as much to spare, take {2 * place_bytes}") as caught:
        Rank(model, work=tmp_path, state_cache_bytes=2 * place_bytes - 1)
    assert caught.value.reason == "STATE_CACHE_TOO_SMALL"


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_any_schedule_gives_the_logits_of_whole_prompts(model: Path, tmp_path: Path, seed: int) -> None:
    """Sequences begin, go on in chunks of any length and end in any order, with adapters or without."""
    random = np.random.default_rng(seed)
    rank = Rank(model, work=tmp_path)
    adapter = _adapter(rank)
    rank.add_adapter(adapter, slot=0, work=tmp_path)
    prompts = [
        Prompt(tokens=prompt_tokens(100 * seed + n, int(random.integers(1, 24))), slot=n % 2 - 1) for n in range(6)
    ]
    blocks = [rank.blocks(24) for _ in prompts]
    done, got = [0] * len(prompts), [list[torch.Tensor]() for _ in prompts]
    while any(at < len(prompt.tokens) for at, prompt in zip(done, prompts, strict=True)):
        chunks, numbers = [], []
        for number in random.permutation(len(prompts)).tolist()[: random.integers(1, 5)]:
            left = len(prompts[number].tokens) - done[number]
            if left == 0:
                continue
            length = int(random.choice([1, min(2, left), random.integers(1, left + 1)]))
            stop = done[number] + length
            chunks.append(Chunk(prompt=prompts[number], start=done[number], stop=stop, blocks=blocks[number]))
            numbers.append(number)
            done[number] = stop
        for number, logits in zip(numbers, rank.step(chunks) if chunks else [], strict=True):
            got[number].append(logits)
    for prompt, parts in zip(prompts, got, strict=True):
        expected = reference_logits(model, adapter if prompt.slot == 0 else None, rank.spec, prompt.tokens)
        # transformers' own decode steps are up to 2e-4 off its own whole prompts.
        torch.testing.assert_close(torch.cat(parts), expected, atol=5e-4, rtol=5e-4)
