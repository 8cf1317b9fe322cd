"""Adapters as people met them in the field: each test is one reported way in which a loader went wrong without a word.

docs/field-cases.md lists all of them, with the tests of other files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from epilora.adapters.layout_hints import LayoutHints
from epilora.adapters.normal_form import NormalForm
from epilora.errors import AdapterFormatError
from epilora.families import GateUpLayout, Projection
from epilora.model_spec import DenseModuleSpec, ModelDescription, ModelSpec, MoELayerSpec
from tests.unit.epilora_adapters import AdapterArrays, resolve, write_adapter
from tests.unit.epilora_layouts import Tensors, reference_deltas, tensors_of
from tests.unit.epilora_models import model_spec, write_model
from tests.unit.test_epilora_layouts import deltas_of

PREFIX = "base_model.model."
EXPERTS = "model.layers.{}.mlp.experts"


@pytest.fixture
def model(tmp_path: Path) -> ModelSpec:
    return model_spec(tmp_path / "model")


def _described(path: Path, model_type: str, layout: GateUpLayout, module: str = EXPERTS) -> ModelSpec:
    """A model of a family that config.json alone does not describe: two layers, E 4, D 8, F 6."""
    layers = tuple(
        MoELayerSpec(
            layer=layer,
            module=module.format(layer),
            num_experts=4,
            hidden_size=8,
            intermediate_size=6,
            gate_up_layout=layout,
        )
        for layer in (0, 1)
    )
    dense = DenseModuleSpec(module="model.layers.0.self_attn.q_proj", in_features=8, out_features=8)
    description = ModelDescription(
        num_layers=2,
        moe_layers=layers,
        num_experts_per_token=2,
        hidden_size=8,
        vocab_size=64,
        max_position_embeddings=64,
        dense_modules=(dense,),
        recurrent_layers=(),
        dense_elements=0,
    )
    return ModelSpec.from_description(write_model(path, model_type=model_type), description)


def _refused(path: Path, tensors: Tensors, model: ModelSpec, reason: str, text: str, **changes: Any) -> None:
    with pytest.raises(AdapterFormatError, match=text) as caught:
        resolve(write_adapter(path, tensors, **changes), model)
    assert caught.value.reason == reason


def _linear(module: str, in_features: int, out_features: int, rank: int = 3) -> Tensors:
    return {
        f"{PREFIX}{module}.lora_A.weight": np.ones((rank, in_features), np.float32),
        f"{PREFIX}{module}.lora_B.weight": np.ones((out_features, rank), np.float32),
    }


def test_a_prefix_that_the_model_lacks_is_no_base_output(model: ModelSpec, tmp_path: Path) -> None:
    tensors, changes = tensors_of(model, "F1", 3)
    foreign = {f"foo.{name.removeprefix(PREFIX)}": array for name, array in tensors.items()}
    _refused(tmp_path / "all", foreign, model, "UNKNOWN_TENSORS", "foo.model.layers.0", **changes)
    half = {name: array for name, array in tensors.items() if "layers.0" in name}
    half |= {name: array for name, array in foreign.items() if "layers.1" in name}
    _refused(tmp_path / "half", half, model, "UNKNOWN_TENSORS", "24 of 48 tensors fit nothing", **changes)


def test_up_goes_to_odd_rows_where_gate_and_up_are_interleaved(tmp_path: Path) -> None:
    gpt_oss = _described(tmp_path / "model", "gpt_oss", GateUpLayout.INTERLEAVED)
    tensors, changes = tensors_of(gpt_oss, "F7", 3)
    path = write_adapter(tmp_path / "a", tensors, **changes)
    form = resolve(path, gpt_oss)
    pair = form.experts[1, Projection.GATE_UP][2]
    whole, expected = AdapterArrays(path).delta(pair), reference_deltas(gpt_oss, 3)
    np.testing.assert_allclose(whole[0::2], expected[1, "gate", 2])
    np.testing.assert_allclose(whole[1::2], expected[1, "up", 2])


def test_e_times_r_rows_are_experts_and_no_shared_pair_of_a_large_rank(model: ModelSpec, tmp_path: Path) -> None:
    tensors, changes = tensors_of(model, "F2a", 3)
    form = resolve(write_adapter(tmp_path / "a", tensors, **changes), model)
    assert {pair.lora_rank for pair in form.pairs()} == {3}
    assert len(form.pairs()) == 2 * 2 * 4
    _refused(tmp_path / "b", tensors, model, "WRONG_EXPERT_COUNT", "are 1 experts", **{**changes, "r": 12})


def test_half_of_the_experts_numbered_from_zero_is_refused(model: ModelSpec, tmp_path: Path) -> None:
    """A trainer's rank saved its own experts only: which ones they are, the file does not say."""
    tensors, changes = tensors_of(model, "F2a", 3)
    half = {
        name: array[: array.shape[0] // 2] if "lora_A" in name else array[:, : array.shape[1] // 2]
        for name, array in tensors.items()
    }
    _refused(tmp_path / "a", half, model, "WRONG_EXPERT_COUNT", "are 2 experts", **changes)
    packed = {name: array[:2] for name, array in tensors_of(model, "F3", 3)[0].items()}
    _refused(tmp_path / "b", packed, model, "WRONG_EXPERT_COUNT", "holds 2 experts")


def test_experts_without_mlp_in_their_path(tmp_path: Path) -> None:
    gemma = _described(tmp_path / "model", "gemma4_text", GateUpLayout.CONCATENATED, "model.layers.{}.experts")
    tensors, changes = tensors_of(gemma, "F2a", 3)
    renamed = {name.replace(".experts", ".moe.experts"): array for name, array in tensors.items()}
    for number, (named, parameters) in enumerate(
        ((tensors, changes["target_parameters"]), (renamed, ["moe.experts.gate_up_proj", "moe.experts.down_proj"]))
    ):
        options = {**changes, "target_parameters": parameters}
        path = write_adapter(tmp_path / str(number), named, **options)
        form = resolve(path, gemma)
        deltas = deltas_of(form, path, gemma)
        for place, delta in reference_deltas(gemma, 3).items():
            np.testing.assert_allclose(deltas[place], delta, rtol=1e-12)


def test_without_a_gate_the_inner_pair_is_up(tmp_path: Path) -> None:
    nemotron = _described(tmp_path / "model", "nemotron_h", GateUpLayout.NOT_GATED, "model.layers.{}.mixer.experts")
    tensors, changes = tensors_of(nemotron, "F2a", 3)
    form = resolve(write_adapter(tmp_path / "a", tensors, **changes), nemotron)
    assert {projection for _, projection in form.experts} == {Projection.UP, Projection.DOWN}
    old = {name.replace("model.layers", "backbone.layers"): array for name, array in tensors.items()}
    assert resolve(write_adapter(tmp_path / "b", old, **changes), nemotron).experts.keys() == form.experts.keys()


def test_an_empty_placeholder_stands_for_the_gate_that_is_not_there(tmp_path: Path) -> None:
    nemotron = _described(tmp_path / "model", "nemotron_h", GateUpLayout.NOT_GATED, "model.layers.{}.mixer.experts")
    tensors, changes = tensors_of(nemotron, "F4", 3)
    form = resolve(write_adapter(tmp_path / "a", tensors, **changes), nemotron)
    assert len(form.absent) == 4
    assert any("4 empty tensors" in warning for warning in form.warnings)
    one_side = {
        name: np.ones((1, 3, 8), np.float32) if "0.mixer.experts.w3.lora_A" in name else array
        for name, array in tensors.items()
    }
    _refused(tmp_path / "b", one_side, nemotron, "EMPTY_TENSOR", r"w3\.lora_B", **changes)
    gated = model_spec(tmp_path / "gated")
    others, changes = tensors_of(gated, "F4", 3)
    emptied = {name: np.zeros(0, np.float32) if "w3" in name else array for name, array in others.items()}
    _refused(tmp_path / "c", emptied, gated, "EMPTY_TENSOR", "w3", **changes)


def test_an_adapter_of_transformers_4_converted_to_5(model: ModelSpec, tmp_path: Path) -> None:
    """Gate and up become one block-diagonal pair of twice the rank, with twice the alpha in patterns."""
    tensors, changes = tensors_of(model, "F2a", 3)
    for layer in (0, 1):
        module = f"{PREFIX}{EXPERTS.format(layer)}.base_layer"
        a = tensors[f"{module}.lora_A.weight"].reshape(4, 3, 8)
        b = tensors[f"{module}.lora_B.weight"].reshape(12, 3, 4)
        diagonal = np.zeros((12, 6, 4), np.float32)
        diagonal[:6, :3], diagonal[6:, 3:] = b[:6], b[6:]
        tensors[f"{module}.lora_A.weight"] = np.concatenate([a, a], axis=1).reshape(24, 8)
        tensors[f"{module}.lora_B.weight"] = diagonal.reshape(12, 24)
    patterns = {"rank_pattern": {r".*\.gate_up_proj": 6}, "alpha_pattern": {r".*\.gate_up_proj": 12}}
    path = write_adapter(tmp_path / "a", tensors, **changes, **patterns)
    deltas = deltas_of(resolve(path, model), path, model)
    for place, delta in reference_deltas(model, 3).items():
        np.testing.assert_allclose(deltas[place], delta, rtol=1e-12)


@pytest.mark.parametrize("kept", ["gate_proj", "up_proj", "down_proj"])
def test_one_projection_alone_is_applied(model: ModelSpec, tmp_path: Path, kept: str) -> None:
    tensors, changes = tensors_of(model, "F1", 3)
    path = write_adapter(tmp_path / "a", {n: array for n, array in tensors.items() if kept in n}, **changes)
    form = resolve(path, model)
    assert {f"{projection}_proj" for _, projection in form.experts} == {kept}
    deltas = deltas_of(form, path, model)
    np.testing.assert_allclose(deltas[1, kept[:-5], 3], reference_deltas(model, 3)[1, kept[:-5], 3], rtol=1e-12)


@pytest.mark.parametrize("name", ["default", "policy"])
def test_one_adapters_name_in_the_keys(model: ModelSpec, tmp_path: Path, name: str) -> None:
    tensors, changes = tensors_of(model, "F1", 3)
    named = {key.replace(".weight", f".{name}.weight"): array for key, array in tensors.items()}
    assert len(resolve(write_adapter(tmp_path / "a", named, **changes), model).pairs()) == 24
    mixed = {key.replace(f".{name}.", ".other.") if "layers.1" in key else key: a for key, a in named.items()}
    _refused(tmp_path / "b", mixed, model, "MIXED_ADAPTER_NAMES", "2 adapters", **changes)


def test_an_adapter_of_torchtune_is_named(model: ModelSpec, tmp_path: Path) -> None:
    tensors = {"layers.0.attn.q_proj.lora_a.weight": np.ones((3, 8), np.float32)}
    _refused(tmp_path / "a", tensors, model, "NO_LORA_TENSORS", "torchtune")


@pytest.mark.parametrize("targets", [["feed_forward.gate_proj"], ["q_proj"], ".*q_proj", "all-linear", [], None])
def test_tensors_decide_whatever_target_modules_says(model: ModelSpec, tmp_path: Path, targets: object) -> None:
    form = resolve(
        write_adapter(tmp_path / "a", _linear("model.layers.0.self_attn.q_proj", 8, 8), target_modules=targets), model
    )
    assert list(form.dense) == ["model.layers.0.self_attn.q_proj"]
    assert form.expert_layout == "none"


def test_split_linear_attention_and_a_head_under_the_wrong_parent_are_refused(model: ModelSpec, tmp_path: Path) -> None:
    tensors, changes = tensors_of(model, "F1", 3)
    split = _linear("model.layers.0.linear_attn.in_proj_q", 8, 8)
    _refused(tmp_path / "a", tensors | split, model, "UNKNOWN_TENSORS", "in_proj_q", **changes)
    head = _linear("model.lm_head", 8, 64)
    _refused(tmp_path / "b", tensors | head, model, "UNKNOWN_TENSORS", r"model\.lm_head", **changes)


@pytest.mark.parametrize("rank", [1, 5, 50])
def test_ranks_that_are_no_multiple_of_eight(model: ModelSpec, tmp_path: Path, rank: int) -> None:
    for layout in ("F1", "F2a", "F3"):
        tensors, changes = tensors_of(model, layout, rank)
        form: NormalForm = resolve(write_adapter(tmp_path / layout, tensors, **changes), model)
        assert {pair.lora_rank for pair in form.pairs()} == {rank}
        assert {pair.scale for pair in form.pairs()} == {6.0 / rank}


def test_experts_of_another_rank_than_the_config_says(model: ModelSpec, tmp_path: Path) -> None:
    """Some trainers divide the rank of experts: the tensors win, and the report says so."""
    tensors, changes = tensors_of(model, "F1", 3)
    form = resolve(write_adapter(tmp_path / "a", tensors, **{**changes, "r": 6}), model)
    assert {pair.scale for pair in form.pairs()} == {2.0}
    assert len(form.rank_differences) == 24
    stacked, changes = tensors_of(model, "F2a", 3)
    path = write_adapter(tmp_path / "b", stacked, **{**changes, "r": 6})
    form = resolve(path, model, hints=LayoutHints(expert_rank_from_shape=True))
    assert {pair.scale for pair in form.pairs()} == {2.0}


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        ("mlp.gate.weight", (4, 8), "mlp.gate.weight"),
        ("mlp.router.bias", (4,), "mlp.router.bias"),
        ("self_attn.q_proj.lora_magnitude_vector", (8,), "DoRA"),
    ],
)
def test_a_whole_router_or_a_magnitude_is_refused_by_name(
    model: ModelSpec, tmp_path: Path, name: str, shape: tuple[int, ...], text: str
) -> None:
    tensors = _linear("model.layers.0.self_attn.q_proj", 8, 8)
    tensors[f"{PREFIX}model.layers.0.{name}"] = np.ones(shape, np.float32)
    reason = "UNSUPPORTED_ADAPTER" if text == "DoRA" else "UNKNOWN_TENSORS"
    _refused(tmp_path / "a", tensors, model, reason, text)


def test_rows_of_new_tokens_are_refused_by_name(model: ModelSpec, tmp_path: Path) -> None:
    tensors = _linear("model.layers.0.self_attn.q_proj", 8, 8)
    tensors[f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"] = np.ones((2, 8), np.float32)
    _refused(tmp_path / "a", tensors, model, "UNKNOWN_TENSORS", "trainable_tokens_delta")
