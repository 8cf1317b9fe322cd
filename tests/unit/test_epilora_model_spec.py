"""The model spec against hand-written configs, and against transformers' own module trees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from epilora.errors import InvalidArgumentError, NotFoundError
from epilora.families import FAMILIES, SIZED_FAMILIES
from epilora.model_spec import GateUpLayout, ModelSpec
from tests.unit.epilora_models import TINY, model_spec, write_model


def test_sizes_and_moe_layers(tmp_path: Path) -> None:
    spec = model_spec(tmp_path)
    assert (spec.model_type, spec.num_layers, spec.hidden_size, spec.vocab_size) == ("qwen3_moe", 2, 8, 64)
    assert (spec.num_experts_per_token, spec.max_position_embeddings, spec.eos_token_ids) == (2, 64, (3,))
    assert not spec.has_tokenizer
    layer = spec.moe_layers[1]
    assert (layer.layer, layer.module) == (1, "model.layers.1.mlp.experts")
    assert (layer.num_experts, layer.hidden_size, layer.intermediate_size) == (4, 8, 6)
    assert layer.gate_up_layout is GateUpLayout.CONCATENATED


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_both_spellings_of_the_expert_count(tmp_path: Path, model_type: str, key: str) -> None:
    spec = model_spec(tmp_path, **{"model_type": model_type, "num_experts": None, key: 5})
    assert {layer.num_experts for layer in spec.moe_layers} == {5}


@pytest.mark.parametrize(
    ("changes", "moe_layers"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"decoder_sparse_step": 2}, [1, 3, 5]),
        ({"mlp_only_layers": [0, 3]}, [1, 2, 4, 5]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [3, 5]),
        ({"mlp_only_layers": None, "decoder_sparse_step": None}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_which_layers_have_experts(tmp_path: Path, changes: dict[str, Any], moe_layers: list[int]) -> None:
    spec = model_spec(tmp_path, num_hidden_layers=6, **changes)
    assert [layer.layer for layer in spec.moe_layers] == moe_layers
    dense = {module.module for module in spec.dense_modules}
    for layer in range(6):
        assert (f"model.layers.{layer}.mlp.gate" in dense) == (layer in moe_layers)
        assert (f"model.layers.{layer}.mlp.down_proj" in dense) == (layer not in moe_layers)


def test_end_of_sequence_tokens_come_from_the_generation_config(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert ModelSpec.from_directory(tmp_path).eos_token_ids == (7, 9)


def test_tokenizer_is_seen(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert ModelSpec.from_directory(tmp_path).has_tokenizer


def test_digest_covers_config_and_weight_headers(tmp_path: Path) -> None:
    plain = model_spec(tmp_path / "a").digest
    assert model_spec(tmp_path / "b", transformers_version="5.17.0").digest == plain
    assert model_spec(tmp_path / "c", rope_theta=1.0).digest != plain
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    file = len(header).to_bytes(8, "little") + header + b"\0\0\0\0"
    write_model(tmp_path / "d")
    (tmp_path / "d" / "model.safetensors").write_bytes(file)
    with_weights = ModelSpec.from_directory(tmp_path / "d").digest
    assert with_weights != plain
    (tmp_path / "d" / "model.safetensors").write_bytes(file.replace(b'"w"', b'"v"'))
    assert ModelSpec.from_directory(tmp_path / "d").digest != with_weights
    (tmp_path / "d" / "model.safetensors").write_bytes(b"\xff" * 16)
    with pytest.raises(InvalidArgumentError, match="not a safetensors file"):
        ModelSpec.from_directory(tmp_path / "d")


@pytest.mark.parametrize(
    ("changes", "reason", "text"),
    [
        ({"model_type": "llama"}, "UNKNOWN_MODEL_FAMILY", "'llama' needs the module tree of the model; known from"),
        ({"model_type": None}, "BAD_MODEL_CONFIG", "model_type is None"),
        ({"num_experts": None}, "BAD_MODEL_CONFIG", "no number of experts"),
        ({"num_local_experts": 8}, "BAD_MODEL_CONFIG", "two different numbers of experts"),
        ({"hidden_size": "8"}, "BAD_MODEL_CONFIG", "hidden_size is '8', expected a positive integer"),
        ({"moe_intermediate_size": 0}, "BAD_MODEL_CONFIG", "moe_intermediate_size is 0"),
        ({"mlp_only_layers": [0, 1]}, "NO_MOE_LAYERS", "none of the 2 layers"),
        ({"eos_token_id": "x"}, "BAD_MODEL_CONFIG", "eos_token_id is 'x'"),
    ],
)
def test_bad_configs(tmp_path: Path, changes: dict[str, Any], reason: str, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text) as caught:
        model_spec(tmp_path, **changes)
    assert caught.value.reason == reason


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="does not exist"):
        ModelSpec.from_directory(tmp_path / "none")
    with pytest.raises(NotFoundError, match=r"no config\.json"):
        ModelSpec.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidArgumentError, match="not valid JSON"):
        ModelSpec.from_directory(tmp_path)


# Options that a family needs beyond TINY, and a variant with dense layers where the family can have them.
_VARIANTS: dict[str, list[dict[str, Any]]] = {
    "qwen3_moe": [{}, {"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}, {"head_dim": 6}],
    "qwen2_moe": [
        {"shared_expert_intermediate_size": 10, "head_dim": None},
        {"shared_expert_intermediate_size": 10, "mlp_only_layers": [0], "head_dim": None},
    ],
    "mixtral": [{}, {"head_dim": None}],
    "olmoe": [{"head_dim": None}, {"head_dim": None, "num_key_value_heads": 2}],
}


def test_every_family_has_a_variant_to_check() -> None:
    assert set(_VARIANTS) == SIZED_FAMILIES


@pytest.mark.parametrize(
    ("model_type", "changes"), [(family, changes) for family, variants in _VARIANTS.items() for changes in variants]
)
def test_spec_equals_the_module_tree_of_transformers(tmp_path: Path, model_type: str, changes: dict[str, Any]) -> None:
    """Every linear map and embedding, every router and every stacked expert parameter, by path and shape."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    options = {**TINY, **changes, "model_type": model_type}
    if model_type in ("mixtral", "olmoe"):
        options.pop("moe_intermediate_size")
        options["intermediate_size"] = 6
    if model_type == "mixtral":
        options["num_local_experts"] = options.pop("num_experts")
    config = transformers.AutoConfig.for_model(**{key: value for key, value in options.items() if value is not None})
    config.save_pretrained(tmp_path)
    spec = ModelSpec.from_directory(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)

    expected = {}
    moe_modules = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            expected[path] = (module.in_features, module.out_features)
        elif isinstance(module, torch.nn.Embedding):
            expected[path] = (module.num_embeddings, module.embedding_dim)
        elif path.endswith("mlp.gate"):
            expected[path] = (module.weight.shape[1], module.weight.shape[0])
        elif path.endswith("mlp.experts"):
            moe_modules[path] = {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert {m.module: (m.in_features, m.out_features) for m in spec.dense_modules} == expected
    assert list(moe_modules) == [layer.module for layer in spec.moe_layers]
    for layer in spec.moe_layers:
        experts, hidden, inner = layer.num_experts, layer.hidden_size, layer.intermediate_size
        stored = {"gate_up_proj": (experts, 2 * inner, hidden), "down_proj": (experts, hidden, inner)}
        assert moe_modules[layer.module] == stored
        assert list(FAMILIES[model_type].stacked_parameters) == list(stored)
