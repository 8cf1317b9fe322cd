"""One rank against transformers' own model, and against what PEFT recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from worker_model_support import (
    FIXTURES,
    Chunk,
    Prompt,
    Rank,
    fixture_adapter,
    prompt_tokens,
    random_adapter,
    reference_logits,
    reference_model,
    small_config,
    write_model,
)

from epilora.model_spec import ModelSpec

FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe")
FIXTURE_ADAPTERS = sorted(
    path
    for writer in ("peft-0.17.1-transformers-4.57.3", "peft-0.21.2")
    for path in (FIXTURES / "adapters" / writer).iterdir()
    if path.name.split("-")[0] in ("qwen3moe", "qwen2moe", "mixtral")
)


@pytest.fixture(scope="module", params=FAMILIES)
def family_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(small_config(request.param), tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("backend", ["loop", "grouped"])
def test_logits_equal_transformers(family_model: Path, tmp_path: Path, backend: str) -> None:
    rank = Rank(family_model, work=tmp_path, expert_backend=backend)
    prompts = [Prompt(tokens=prompt_tokens(seed, length)) for seed, length in ((1, 9), (2, 1), (3, 17))]
    model = reference_model(family_model)
    for prompt, logits in zip(prompts, rank.prefill(prompts), strict=True):
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([prompt.tokens])).logits[0]
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["loop", "grouped"])
def test_mixed_batch_equals_merged_weights(family_model: Path, tmp_path: Path, backend: str) -> None:
    spec = ModelSpec.from_directory(family_model)
    adapters = [
        random_adapter(spec, 1, rank_of={"gate_up": 3, "down": 2}),
        random_adapter(spec, 2, rank_of={"gate": 1, "up": 2, "down": 3}, vary_ranks=True, dense=False),
        random_adapter(spec, 3, rank_of={}),
    ]
    rank = Rank(family_model, work=tmp_path, adapters=adapters, expert_backend=backend)
    prompts = [Prompt(tokens=prompt_tokens(10 + slot, 5 + slot), slot=slot) for slot in (1, -1, 0, 2, 0)]
    for prompt, logits in zip(prompts, rank.prefill(prompts), strict=True):
        adapter = adapters[prompt.slot] if prompt.slot >= 0 else None
        expected = reference_logits(family_model, adapter, spec, prompt.tokens)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("path", FIXTURE_ADAPTERS, ids=lambda path: f"{path.parent.name[:11]}-{path.name}")
def test_fixture_adapters_give_recorded_logits(path: Path, tmp_path: Path) -> None:
    model = FIXTURES / "models" / f"{path.name.split('-')[0]}-T"
    spec = ModelSpec.from_directory(model)
    other = random_adapter(spec, 1, rank_of={"gate_up": 2})
    rank = Rank(model, work=tmp_path, adapters=[fixture_adapter(path, spec), other])
    recorded = load_file(path / "expected.safetensors")
    base = load_file(model / "expected.safetensors")
    tokens = recorded["input_ids"][0].tolist()
    prompts = [
        Prompt(tokens=prompt_tokens(1, 7), slot=1),
        Prompt(tokens=tokens, slot=0),
        Prompt(tokens=base["input_ids"][0].tolist()),
    ]
    _, with_adapter, without = rank.prefill(prompts)
    torch.testing.assert_close(with_adapter, recorded["logits"][0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(without, base["logits"][0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 6])
def test_chunks_and_decode_equal_one_prefill(tmp_path: Path, window: int | None) -> None:
    sliding = {"sliding_window": window} if window else {}
    model = write_model(small_config("mixtral", **sliding), tmp_path / "model")
    rank = Rank(model, work=tmp_path)
    long, short, other = (Prompt(tokens=prompt_tokens(seed, n)) for seed, n in ((1, 23), (2, 9), (3, 5)))
    expected_long, expected_short = rank.prefill([long, short])
    blocks = {id(prompt): rank.blocks(len(prompt.tokens)) for prompt in (long, short, other)}

    def chunk(prompt: Prompt, start: int, stop: int) -> Chunk:
        return Chunk(prompt=prompt, start=start, stop=stop, blocks=blocks[id(prompt)])

    got_long, got_short = [], []
    for step in range(9):
        stop_long = min(23, 3 * step + 3)
        chunks = [chunk(short, step, step + 1)]
        if 3 * step < stop_long:
            chunks.append(chunk(long, 3 * step, stop_long))
        if step == 2:
            chunks.append(chunk(other, 0, 5))
        logits = rank.step(chunks)
        got_short.append(logits[0])
        if 3 * step < stop_long:
            got_long.append(logits[1])
    torch.testing.assert_close(torch.cat(got_long), expected_long, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat(got_short), expected_short, atol=1e-5, rtol=1e-5)
    for prompt, expected in ((long, expected_long), (short, expected_short)):
        reference = reference_logits(model, None, rank.spec, prompt.tokens)
        torch.testing.assert_close(expected, reference, atol=1e-5, rtol=1e-5)
