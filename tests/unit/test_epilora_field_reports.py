"""More adapters as people met them in the field: names, configs and files that went wrong elsewhere.

docs/field-cases.md lists all of them, and which test shows what happens here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from epilora.adapters.inspection import inspect_adapter
from epilora.adapters.open_adapter import open_adapter
from epilora.adapters.report import make_report
from epilora.families import GateUpLayout, Projection
from epilora.model_spec import ModelSpec
from tests.unit.epilora_adapters import AdapterArrays, resolve, write_adapter
from tests.unit.epilora_layouts import Tensors, reference_deltas, tensors_of
from tests.unit.epilora_models import model_spec
from tests.unit.test_epilora_field_cases import PREFIX, _described, _linear
from tests.unit.test_epilora_layouts import deltas_of


@pytest.fixture
def model(tmp_path: Path) -> ModelSpec:
    """Two layers, E 4, D 8, F 6."""
    return model_spec(tmp_path / "model")


def _check_deltas(path: Path, model: ModelSpec, lora_rank: int = 3) -> None:
    deltas = deltas_of(resolve(path, model), path, model)
    expected = reference_deltas(model, lora_rank)
    assert deltas.keys() == expected.keys()
    for place, delta in expected.items():
        np.testing.assert_allclose(deltas[place], delta, rtol=1e-12, err_msg=str(place))


def _renamed(tensors: Tensors, old: str, new: str) -> Tensors:
    return {name.replace(old, new): array for name, array in tensors.items()}


@pytest.mark.parametrize(
    "path", ["model.language_model.layers", "language_model.model.layers", "language_model.layers"]
)
def test_per_expert_names_inside_a_multimodal_model(model: ModelSpec, tmp_path: Path, path: str) -> None:
    tensors, changes = tensors_of(model, "F1", 3)
    _check_deltas(write_adapter(tmp_path / "a", _renamed(tensors, "model.layers", path), **changes), model)


def test_one_adapter_by_two_releases_of_peft(tmp_path: Path) -> None:
    """The shapes that 0.18.1 and 0.20.0 wrote for E 2, D 8, F 3, r 2."""
    model = model_spec(tmp_path / "model", num_experts=2, num_experts_per_tok=1, moe_intermediate_size=3)
    inner, outer = (f"{PREFIX}model.layers.0.mlp.experts{wrapper}" for wrapper in (".base_layer", ""))
    shapes = {
        "F2b": {inner: [(4, 6), (8, 4)], outer: [(4, 8), (3, 4)]},
        "F2a": {inner: [(4, 8), (6, 4)], outer: [(4, 3), (8, 4)]},
    }
    for layout, expected in shapes.items():
        tensors, changes = tensors_of(model, layout, 2)
        for module, (a, b) in expected.items():
            assert tensors[f"{module}.lora_A.weight"].shape == a
            assert tensors[f"{module}.lora_B.weight"].shape == b
        path = write_adapter(tmp_path / layout, tensors, **{**changes, "peft_version": None})
        _check_deltas(path, model, 2)


def test_an_attention_only_adapter_says_that_it_has_no_experts(model: ModelSpec, tmp_path: Path) -> None:
    """The most common adapter of all; and what is left when a trainer found no experts."""
    path = write_adapter(
        tmp_path / "a",
        _linear("model.layers.0.self_attn.q_proj", 8, 8),
        target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"],
    )
    with open_adapter(path) as opened:
        form = opened.resolve(model)
        report = make_report(opened.header, opened.config(), form)
        found = inspect_adapter(opened, model=model)
    assert (form.experts, form.expert_layout, report.expert_layout) == ({}, "none", "none")
    assert list(report.expert_coverage) == []
    assert list(report.dense_modules) == ["model.layers.0.self_attn.q_proj"]
    assert (found.layout, dict(found.experts_by_layer), found.refusal) == ("none", {}, None)


@pytest.mark.parametrize("layout", ["F1", "F6"])
def test_minimax_under_the_names_of_trainer_and_server(tmp_path: Path, layout: str) -> None:
    minimax = _described(tmp_path / "model", "minimax_m2", GateUpLayout.CONCATENATED)
    tensors, changes = tensors_of(minimax, layout, 3)
    for number, block in enumerate(("mlp", "block_sparse_moe")):
        _check_deltas(
            write_adapter(tmp_path / f"{number}", _renamed(tensors, ".mlp.", f".{block}."), **changes), minimax
        )


@pytest.mark.parametrize(("use_rslora", "scale"), [(False, 2.0), (True, 4.0)])
def test_rslora_holds_for_attention_and_experts_alike(
    model: ModelSpec, tmp_path: Path, use_rslora: bool, scale: float
) -> None:
    for layout in ("F1", "F2a", "F3", "F5"):
        tensors, changes = tensors_of(model, layout, 4)
        tensors |= _linear("model.layers.0.self_attn.q_proj", 8, 8, rank=4)
        changes |= {"lora_alpha": 8, "use_rslora": use_rslora}
        form = resolve(write_adapter(tmp_path / layout, tensors, **changes), model)
        assert {pair.scale for pair in form.pairs()} == {scale}


@pytest.mark.parametrize("first", ["a", "z"])
def test_no_scale_comes_from_whatever_key_is_first(model: ModelSpec, tmp_path: Path, first: str) -> None:
    """Router and experts of different ranks, no lora_alpha: each has PEFT's default over its own rank."""
    router, expert = "model.layers.0.mlp.gate", "model.layers.1.mlp.experts.0.up_proj"
    tensors = _linear(router, 8, 4, rank=2) | _linear(expert, 8, 6, rank=3)
    # An adapter's name moves the router's keys before or behind the others.
    tensors = {
        name.replace(".weight", f".{first}.weight") if "gate" in name else name: array
        for name, array in tensors.items()
    }
    form = resolve(write_adapter(tmp_path / "a", tensors, lora_alpha=None), model)
    assert form.dense[router].scale == 8 / 2
    assert form.experts[1, Projection.UP][0].scale == pytest.approx(8 / 3)
    assert any("no lora_alpha" in warning for warning in form.warnings)


def test_router_experts_and_shared_expert_gate_in_the_names_of_mixtral(tmp_path: Path) -> None:
    """A match of "gate" by its end alone would find three modules."""
    qwen = model_spec(tmp_path / "model", model_type="qwen2_moe", shared_expert_intermediate_size=10)
    mlp = "model.layers.0.mlp"
    tensors = _linear(f"{mlp}.gate", 8, 4) | _linear(f"{mlp}.shared_expert_gate", 8, 1)
    tensors |= _linear(f"{mlp}.experts.1.w1", 8, 6)
    form = resolve(write_adapter(tmp_path / "a", tensors), qwen)
    assert set(form.dense) == {f"{mlp}.gate", f"{mlp}.shared_expert_gate"}
    assert list(form.experts) == [(0, Projection.GATE)]


def test_a_pattern_for_one_expert_and_one_layer(model: ModelSpec, tmp_path: Path) -> None:
    tensors, changes = tensors_of(model, "F1", 3)
    name = "model.layers.1.mlp.experts.2.down_proj"
    a, b = (f"{PREFIX}{name}.lora_{side}.weight" for side in "AB")
    tensors[a], tensors[b] = np.concatenate([tensors[a]] * 2), np.concatenate([tensors[b]] * 2, axis=1)
    changes |= {
        "rank_pattern": {r".*\.experts\.2\.down_proj": 6},
        "alpha_pattern": {r"layers\.1\.mlp\.experts\.2\.down_proj": 3},
    }
    path = write_adapter(tmp_path / "a", tensors, **changes)
    form = resolve(path, model)
    pair = form.experts[1, Projection.DOWN][2]
    assert (pair.lora_rank, pair.scale) == (6, 0.5)
    # Twice the same pair at a quarter of the scale.
    np.testing.assert_allclose(
        AdapterArrays(path).delta(pair), reference_deltas(model, 3)[1, "down", 2] / 2, rtol=1e-12
    )
    assert {p.scale for p in form.experts[0, Projection.DOWN].values()} == {2.0}
    # The expression is for the experts 2 of both layers; that of layer 0 has kept its rank.
    assert form.rank_differences == ("model.layers.0.mlp.experts.2.down_proj: config 6, tensors 3",)


@pytest.mark.parametrize("field", ["base_layer", "modules_to_save"])
def test_copies_of_the_base_models_weights_are_named(model: ModelSpec, tmp_path: Path, field: str) -> None:
    """PEFT saves them beside a pair for the embedding; a tool that reads them as deltas adds whole weights."""
    tensors: dict[str, Any] = _linear("lm_head", 8, 64)
    tensors[f"{PREFIX}lm_head.{field}.weight"] = np.ones((64, 8), np.float32)
    with open_adapter(write_adapter(tmp_path / "a", tensors)) as opened:
        refusal = inspect_adapter(opened, model=model).refusal
    assert refusal is not None
    assert refusal.reason == "UNKNOWN_TENSORS"
    assert f"lm_head.{field}.weight" in refusal.message
