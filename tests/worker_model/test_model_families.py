"""Every family against transformers' own model: base logits, adapters on all their modules, chunks and decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from worker_model_families import CONFIGS, MULTIMODAL, family_config, parameters, write_multimodal
from worker_model_ranks import run_ranks
from worker_model_support import (
    FIXTURES,
    Chunk,
    Prompt,
    Rank,
    prompt_tokens,
    random_adapter,
    reference_logits,
    reference_model,
    write_model,
)

from compute_worker.model_description import describe_model, load_spec_of_model
from epilora.errors import InvalidArgumentError
from epilora.families import SIZED_FAMILIES
from epilora.model_spec import GateUpLayout, ModelSpec


@pytest.fixture(scope="module", params=parameters(CONFIGS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    write_model(family_config(request.param, CONFIGS[request.param]), path)
    _randomize_stored_tables(path)
    return path


def _randomize_stored_tables(path: Path) -> None:
    """Biases of routers and the like are zero in a new model: nothing would show that they are read."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and (tensor == 0).all():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
        elif name.endswith("layer_scalar"):
            tensor.fill_(0.7)
    save_file(tensors, file, metadata={"format": "pt"})


def _ranks_of(spec: ModelSpec) -> list[dict[str, int]]:
    if spec.moe_layers[0].gate_up_layout is GateUpLayout.NOT_GATED:
        return [{"up": 3, "down": 2}, {"down": 3}]
    return [{"gate_up": 3, "down": 2}, {"gate": 1, "up": 2}]


def test_logits_equal_transformers_with_and_without_adapters(model: Path, tmp_path: Path) -> None:
    rank = Rank(model, work=tmp_path)
    # `epilora inspect` has the first only, and says what the service will.
    assert rank.spec.dense_modules == rank.runner.dense_modules
    spec = rank.spec
    adapters = [random_adapter(spec, seed + 1, rank_of=ranks) for seed, ranks in enumerate(_ranks_of(spec))]
    for slot, adapter in enumerate(adapters):
        rank.add_adapter(adapter, slot=slot, work=tmp_path)
    prompts = [Prompt(tokens=prompt_tokens(seed, 9 + 5 * slot), slot=slot) for seed, slot in enumerate((0, -1, 1, 0))]
    for prompt, logits in zip(prompts, rank.prefill(prompts), strict=True):
        adapter = adapters[prompt.slot] if prompt.slot >= 0 else None
        expected = reference_logits(model, adapter, spec, prompt.tokens)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_chunks_and_decoding_equal_one_prefill(model: Path, tmp_path: Path) -> None:
    rank = Rank(model, work=tmp_path)
    prompt = Prompt(tokens=prompt_tokens(4, 19))
    with torch.no_grad():
        expected = reference_model(model)(input_ids=torch.tensor([prompt.tokens])).logits[0]
    blocks, logits = rank.blocks(19), []
    for start, stop in ((0, 5), (5, 6), (6, 13), *((at, at + 1) for at in range(13, 19))):
        logits += rank.step([Chunk(prompt=prompt, start=start, stop=stop, blocks=blocks)])
    torch.testing.assert_close(torch.cat(logits), expected, atol=1e-4, rtol=1e-4)


def test_grouped_backend_equals_transformers(model: Path, tmp_path: Path) -> None:
    rank = Rank(model, work=tmp_path, expert_backend="grouped")
    spec = rank.spec
    adapter = random_adapter(spec, 1, rank_of=_ranks_of(spec)[0])
    rank.add_adapter(adapter, slot=0, work=tmp_path)
    prompt = Prompt(tokens=prompt_tokens(5, 11), slot=0)
    (logits,) = rank.prefill([prompt])
    torch.testing.assert_close(logits, reference_logits(model, adapter, spec, prompt.tokens), atol=1e-4, rtol=1e-4)


def _on_two_ranks(ep_rank: int, work: Path) -> dict[str, Any]:
    results = {}
    for name in CONFIGS:
        rank = Rank(work / name, work=work, num_ranks=2, placement="round_robin")
        spec = rank.spec
        rank.add_adapter(random_adapter(spec, 1, rank_of=_ranks_of(spec)[0]), slot=0, work=work)
        prompts = [Prompt(tokens=prompt_tokens(7, 12), slot=slot) for slot in (0, -1)] if ep_rank == 1 else []
        # Rank 0 has no tokens: it joins with zero rows.
        chunks = [Chunk(prompt=p, start=0, stop=12, blocks=rank.blocks(12)) for p in prompts]
        results[name] = rank.step(chunks, [0, 24]), spec
    return results


def test_two_ranks_equal_transformers(tmp_path: Path) -> None:
    for name, options in CONFIGS.items():
        write_model(family_config(name, options), tmp_path / name)
    results = run_ranks(2, _on_two_ranks, tmp_path)
    for name in CONFIGS:
        all_logits, spec = results[1][name]
        adapter = random_adapter(spec, 1, rank_of=_ranks_of(spec)[0])
        for logits, pairs in zip(all_logits, (adapter, None), strict=True):
            expected = reference_logits(tmp_path / name, pairs, spec, prompt_tokens(7, 12))
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4, msg=name)


def test_a_family_without_experts_is_refused_by_name(tmp_path: Path) -> None:
    write_model(family_config("llama", {}), tmp_path / "model")
    with pytest.raises(InvalidArgumentError, match="LlamaForCausalLM has no experts behind") as caught:
        load_spec_of_model(tmp_path / "model")
    assert caught.value.reason == "UNKNOWN_MODEL_FAMILY"


@pytest.mark.parametrize("name", ["qwen3moe-T", "qwen2moe-T", "mixtral-T"])
def test_the_module_tree_says_what_the_table_says(name: str) -> None:
    path = FIXTURES / "models" / name
    spec = ModelSpec.from_directory(path)
    assert spec.model_type in SIZED_FAMILIES
    described = ModelSpec.from_description(path, describe_model(path))
    assert sorted(described.dense_modules, key=lambda module: module.module) == sorted(
        spec.dense_modules, key=lambda module: module.module
    )
    assert (described.moe_layers, described.digest) == (spec.moe_layers, spec.digest)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_the_text_part_of_a_multimodal_checkpoint_is_served(tmp_path: Path, name: str) -> None:
    whole = write_multimodal(name, tmp_path / "model")
    rank = Rank(tmp_path / "model", work=tmp_path)
    prompts = [Prompt(tokens=prompt_tokens(seed, 9 + seed)) for seed in range(2)]
    for prompt, logits in zip(prompts, rank.prefill(prompts), strict=True):
        with torch.no_grad():
            expected = whole(input_ids=torch.tensor([prompt.tokens])).logits[0]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        (
            "minimax",
            {"num_local_experts": 5, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
            "keep another state than keys and values",
        ),
        ("zaya", {"num_experts": 5, "num_experts_per_tok": 1}, "a trial token fails in its code with TypeError"),
    ],
    ids=["a state behind another interface", "a state inside attention"],
)
def test_layers_whose_state_cannot_be_carried_are_refused(
    tmp_path: Path, name: str, options: dict[str, Any], why: str
) -> None:
    write_model(family_config(name, {"head_dim": 8, "moe_intermediate_size": 20, **options}), tmp_path / "model")
    with pytest.raises(InvalidArgumentError, match=why) as caught:
        Rank(tmp_path / "model", work=tmp_path)
    assert caught.value.reason == "UNSUPPORTED_MODEL"
