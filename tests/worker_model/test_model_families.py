"""Every family against transformers' own model: base logits, adapters on all their modules, chunks and decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText
from worker_model_families import CONFIGS, RECURRENT, family_config
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


@pytest.fixture(scope="module", params=CONFIGS)
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
    spec = load_spec_of_model(model)
    adapters = [random_adapter(spec, seed + 1, rank_of=ranks) for seed, ranks in enumerate(_ranks_of(spec))]
    rank = Rank(model, work=tmp_path, adapters=adapters)
    assert rank.runner.dense_modules == spec.dense_modules, "a linear map whose pairs would have no effect"
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
    spec = load_spec_of_model(model)
    adapter = random_adapter(spec, 1, rank_of=_ranks_of(spec)[0])
    rank = Rank(model, work=tmp_path, adapters=[adapter], expert_backend="grouped")
    prompt = Prompt(tokens=prompt_tokens(5, 11), slot=0)
    (logits,) = rank.prefill([prompt])
    torch.testing.assert_close(logits, reference_logits(model, adapter, spec, prompt.tokens), atol=1e-4, rtol=1e-4)


def _on_two_ranks(ep_rank: int, work: Path) -> dict[str, Any]:
    results = {}
    for name in CONFIGS:
        path = work / name
        spec = load_spec_of_model(path)
        adapter = random_adapter(spec, 1, rank_of=_ranks_of(spec)[0])
        rank = Rank(path, work=work, num_ranks=2, placement="round_robin", adapters=[adapter])
        prompts = [Prompt(tokens=prompt_tokens(7, 12), slot=slot) for slot in (0, -1)] if ep_rank == 1 else []
        # Rank 0 has no tokens: it joins with zero rows.
        chunks = [Chunk(prompt=p, start=0, stop=12, blocks=rank.blocks(12)) for p in prompts]
        results[name] = rank.step(chunks, [0, 24])
    return results


def test_two_ranks_equal_transformers(tmp_path: Path) -> None:
    for name, options in CONFIGS.items():
        write_model(family_config(name, options), tmp_path / name)
    results = run_ranks(2, _on_two_ranks, tmp_path)
    for name in CONFIGS:
        spec = load_spec_of_model(tmp_path / name)
        adapter = random_adapter(spec, 1, rank_of=_ranks_of(spec)[0])
        for logits, pairs in zip(results[1][name], (adapter, None), strict=True):
            expected = reference_logits(tmp_path / name, pairs, spec, prompt_tokens(7, 12))
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("name", RECURRENT)
def test_families_with_a_recurrent_state_are_refused_by_name(tmp_path: Path, name: str) -> None:
    write_model(family_config(name, RECURRENT[name]), tmp_path / "model")
    with pytest.raises(InvalidArgumentError, match="keep another state than keys and values") as caught:
        Rank(tmp_path / "model", work=tmp_path)
    assert caught.value.reason == "UNSUPPORTED_MODEL"


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


_TEXT = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}


def test_the_text_part_of_a_multimodal_checkpoint_is_served(tmp_path: Path) -> None:
    text = {**_TEXT, "num_local_experts": 5, "intermediate_size": 24, "intermediate_size_mlp": 40}
    vision = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    text |= {"num_key_value_heads": 2, "num_experts_per_tok": 1, "max_position_embeddings": 128}
    torch.manual_seed(1)
    whole = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model("llama4", text_config=text, vision_config=vision)
    ).eval()
    whole.save_pretrained(tmp_path / "model")
    tokens = prompt_tokens(1, 9)
    (logits,) = Rank(tmp_path / "model", work=tmp_path).prefill([Prompt(tokens=tokens)])
    with torch.no_grad():
        expected = whole(input_ids=torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_multimodal_family_without_a_text_model_of_its_own_is_refused(tmp_path: Path) -> None:
    text = {**_TEXT, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    AutoConfig.for_model("qwen3_vl_moe", text_config=text).save_pretrained(tmp_path)
    with pytest.raises(InvalidArgumentError, match="cannot build a causal language model") as caught:
        load_spec_of_model(tmp_path)
    assert caught.value.reason == "UNKNOWN_MODEL_FAMILY"
