"""Every layout of one adapter gives the same deltas, equal to a float64 reference; and what only some layouts have.

Two models: in T a wrong axis fails by shape; in SQUARE (D = 2F, r = E) it does not, so the values show it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from epilora.adapters.layout_hints import LayoutHints
from epilora.adapters.normal_form import NormalForm
from epilora.errors import AdapterFormatError, InvalidArgumentError
from epilora.families import GateUpLayout, Projection
from epilora.model_spec import ModelSpec
from epilora.v1 import types_pb2
from tests.unit.epilora_adapters import AdapterArrays, resolve, write_adapter
from tests.unit.epilora_layouts import LAYOUTS, Tensors, reference_deltas, tensors_of
from tests.unit.epilora_models import model_spec

EXPERTS = "base_model.model.model.layers.{}.mlp.experts"
T = {"lora_rank": 3}
SQUARE = {"lora_rank": 4, "moe_intermediate_size": 4}


def _model(path: Path, kind: dict[str, int]) -> tuple[ModelSpec, int]:
    changes = {key: value for key, value in kind.items() if key != "lora_rank"}
    return model_spec(path / "model", **changes), kind["lora_rank"]


def deltas_of(form: NormalForm, path: Path, model: ModelSpec) -> dict[tuple[int, str, int], np.ndarray]:
    """Deltas of gate, up and down by (layer, projection, expert); gate_up is taken apart by the model's layout."""
    arrays, deltas = AdapterArrays(path), {}
    layouts = {moe.layer: moe.gate_up_layout for moe in model.moe_layers}
    for (layer, projection), by_expert in form.experts.items():
        for expert, pair in by_expert.items():
            delta = arrays.delta(pair)
            if projection is not Projection.GATE_UP:
                deltas[layer, projection.value, expert] = delta
                continue
            half = delta.shape[0] // 2
            interleaved = layouts[layer] is GateUpLayout.INTERLEAVED
            gate, up = (delta[::2], delta[1::2]) if interleaved else (delta[:half], delta[half:])
            deltas[layer, "gate", expert], deltas[layer, "up", expert] = gate, up
    return deltas


@pytest.mark.parametrize("kind", [T, SQUARE], ids=["T", "square"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_reference_deltas(tmp_path: Path, layout: str, kind: dict[str, int]) -> None:
    model, lora_rank = _model(tmp_path, kind)
    tensors, changes = tensors_of(model, layout, lora_rank)
    path = write_adapter(tmp_path / "a", tensors, **changes)
    form = resolve(path, model)
    assert form.expert_layout == LAYOUTS[layout][0]
    assert form.ignored == form.rank_differences == form.warnings == ()
    deltas, expected = deltas_of(form, path, model), reference_deltas(model, lora_rank)
    assert deltas.keys() == expected.keys()
    for place, delta in deltas.items():
        np.testing.assert_allclose(delta, expected[place], rtol=1e-12, err_msg=str(place))


def _changed(tensors: Tensors, old: str, new: str) -> Tensors:
    return {name.replace(old, new): array for name, array in tensors.items()}


def _each(change: Callable[[str, np.ndarray], np.ndarray]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: change(name, array) for name, array in tensors.items()}


BROKEN: dict[str, tuple[str, Callable[[Tensors], Tensors], str, str]] = {
    "too few experts": ("F3", _each(lambda _, array: array[:2]), "WRONG_EXPERT_COUNT", "holds 2 experts"),
    "two dimensions": ("F3", _each(lambda n, a: a[0] if "A.weight" in n else a), "SHAPE_MISMATCH", "or 1, r"),
    "ranks differ": ("F3", _each(lambda n, a: a[:, :2] if "A.weight" in n else a), "RANK_MISMATCH", "lora_rank 2"),
    "in first": ("F3", _each(lambda _, array: array.transpose(0, 2, 1)), "SHAPE_MISMATCH", r"\[4 or 1, r, 6\]"),
    "grouped, one expert": ("F5", _each(lambda _, array: array[:1]), "WRONG_EXPERT_COUNT", "holds 1 experts"),
    "grouped, out first": ("F5", _each(lambda _, array: array.transpose(0, 2, 1)), "SHAPE_MISMATCH", r"\[4, 6, r\]"),
    "half a pair": (
        "F4",
        lambda tensors: {name: array for name, array in tensors.items() if "w1.lora_B" not in name},
        "MISSING_PAIR_HALF",
        "w1.lora_A",
    ),
    "gate twice": (
        "F4",
        lambda tensors: _changed(tensors, "w3", "gate_proj"),
        "DUPLICATE_TENSOR",
        "same module",
    ),
    "expert out of range": (
        "F7",
        lambda tensors: _changed(tensors, "up_projs.3", "up_projs.4"),
        "EXPERT_OUT_OF_RANGE",
        "experts 0 to 3",
    ),
    "unknown list": (
        "F7",
        lambda tensors: _changed(tensors, "gate_up_projs", "gate_up_proj"),
        "UNKNOWN_TENSORS",
        "gate_up_proj",
    ),
    "unknown prefix": (
        "F9 multimodal",
        lambda tensors: _changed(tensors, "language_model", "other"),
        "UNKNOWN_TENSORS",
        "model.other",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_layouts(tmp_path: Path, kind: str) -> None:
    layout, change, reason, text = BROKEN[kind]
    model, lora_rank = _model(tmp_path, T)
    tensors, changes = tensors_of(model, layout, lora_rank)
    path = write_adapter(tmp_path / "a", change(tensors), **changes)
    with pytest.raises(AdapterFormatError, match=text) as caught:
        resolve(path, model)
    assert caught.value.reason == reason


def test_two_layouts_in_one_file_are_refused(tmp_path: Path) -> None:
    model, lora_rank = _model(tmp_path, T)
    first, second = (tensors_of(model, layout, lora_rank)[0] for layout in ("F1", "F3"))
    layer_1 = {name: array for name, array in second.items() if "layers.1." in name}
    mixed = {name: array for name, array in first.items() if "layers.0." in name} | layer_1
    with pytest.raises(AdapterFormatError, match=r"per_expert .* and packed") as caught:
        resolve(write_adapter(tmp_path / "a", mixed), model)
    assert caught.value.reason == "MIXED_LAYOUTS"


def test_both_prefixes_of_one_module_are_refused(tmp_path: Path) -> None:
    model, lora_rank = _model(tmp_path, T)
    tensors, _ = tensors_of(model, "F3", lora_rank)
    with pytest.raises(AdapterFormatError, match="same module of the model") as caught:
        resolve(
            write_adapter(tmp_path / "a", tensors | _changed(tensors, "model.layers", "model.language_model.layers")),
            model,
        )
    assert caught.value.reason == "DUPLICATE_TENSOR"


def test_gate_up_and_gate_of_one_expert_are_refused(tmp_path: Path) -> None:
    model, lora_rank = _model(tmp_path, T)
    tensors, _ = tensors_of(model, "F3", lora_rank)
    gate = {
        name.replace("gate_up_proj", "gate_proj"): array[:, :6] if "lora_B" in name else array
        for name, array in tensors.items()
        if "gate_up" in name
    }
    with pytest.raises(AdapterFormatError, match="gate and up together") as caught:
        resolve(write_adapter(tmp_path / "a", {**tensors, **gate}), model)
    assert caught.value.reason == "DUPLICATE_TENSOR"


def test_one_side_only_may_be_shared_by_the_experts(tmp_path: Path) -> None:
    """gate with a shared A, down packed as usual: one file, since a shared side is a way to pack."""
    model, lora_rank = _model(tmp_path, T)
    shared, packed = (tensors_of(model, layout, lora_rank)[0] for layout in ("F4", "F3"))
    tensors = {name: array for name, array in shared.items() if ".w2." not in name}
    tensors |= {name: array for name, array in packed.items() if ".down_proj." in name}
    path = write_adapter(tmp_path / "a", tensors, r=lora_rank, lora_alpha=6)
    form = resolve(path, model)
    assert form.expert_layout == "shared_outer"
    expected = reference_deltas(model, lora_rank)
    for place, delta in deltas_of(form, path, model).items():
        np.testing.assert_allclose(delta, expected[place], rtol=1e-12)


def test_scales_by_pattern_in_the_3d_layouts(tmp_path: Path) -> None:
    model, lora_rank = _model(tmp_path, T)
    changes = {"alpha_pattern": {"experts.gate_up_proj": 12, r".*layers\.1\..*down_proj": 3}}
    for layout in ("F3", "F5"):
        tensors, _ = tensors_of(model, layout, lora_rank)
        form = resolve(write_adapter(tmp_path / layout, tensors, **changes), model)
        scales = {place: by_expert[0].scale for place, by_expert in form.experts.items()}
        assert scales == {
            (0, Projection.GATE_UP): 4.0,
            (0, Projection.DOWN): 2.0,
            (1, Projection.GATE_UP): 4.0,
            (1, Projection.DOWN): 1.0,
        }


def _ambiguous(path: Path) -> tuple[ModelSpec, Tensors, dict[str, Any]]:
    """Square, gate_up alone, no version: the shapes leave orientation and parameter open."""
    model = model_spec(path / "model", moe_intermediate_size=8, hidden_size=8)
    generator = np.random.default_rng(0)
    tensors = {
        f"{EXPERTS.format(layer)}.lora_{side}.weight": generator.standard_normal(shape).astype(np.float32)
        for layer in (0, 1)
        for side, shape in (("A", (12, 8)), ("B", (8, 12)))
    }
    return model, tensors, {"target_parameters": ["mlp.experts.down_proj"]}


def test_a_hint_settles_the_orientation(tmp_path: Path) -> None:
    model, tensors, changes = _ambiguous(tmp_path)
    path = write_adapter(tmp_path / "a", tensors, **changes)
    with pytest.raises(AdapterFormatError, match=r"layout_hints\.orientation") as caught:
        resolve(path, model)
    assert caught.value.reason == "AMBIGUOUS_ORIENTATION"
    a, b = (tensors[f"{EXPERTS.format(0)}.lora_{side}.weight"] for side in "AB")
    block_a, block_b = a[3:6].astype(np.float64), b[:, 1::4].astype(np.float64)
    for swapped, expected in ((False, block_b @ block_a), (True, (block_b @ block_a).T)):
        form = resolve(path, model, hints=LayoutHints(swapped=swapped))
        delta = AdapterArrays(path).delta(form.experts[0, Projection.DOWN][1])
        np.testing.assert_allclose(delta, 2.0 * expected)


def test_a_hint_that_contradicts_the_shapes_is_refused(tmp_path: Path) -> None:
    model, lora_rank = _model(tmp_path, T)
    tensors, changes = tensors_of(model, "F2b", lora_rank)
    path = write_adapter(tmp_path / "a", tensors, **changes)
    with pytest.raises(AdapterFormatError, match="show that they are swapped") as caught:
        resolve(path, model, hints=LayoutHints(swapped=False))
    assert caught.value.reason == "BAD_LAYOUT_HINTS"


def test_a_hint_names_the_parameter(tmp_path: Path) -> None:
    """A square expert whose two parameters have one shape: nothing but a name tells them apart."""
    model = model_spec(tmp_path / "model", hidden_size=8, moe_intermediate_size=4)
    tensors = {
        f"{EXPERTS.format(0)}.lora_A.weight": np.ones((12, 8), np.float32),
        f"{EXPERTS.format(0)}.lora_B.weight": np.ones((8, 12), np.float32),
    }
    path = write_adapter(tmp_path / "a", tensors, peft_version="0.20.0")
    form = resolve(path, model, hints=LayoutHints(stacked_parameters=("gate_up_proj",)))
    assert list(form.experts) == [(0, Projection.GATE_UP)]
    with pytest.raises(AdapterFormatError, match="expected names among") as caught:
        resolve(path, model, hints=LayoutHints(stacked_parameters=("up",)))
    assert caught.value.reason == "BAD_LAYOUT_HINTS"


def test_a_hint_takes_the_expert_rank_from_the_shape(tmp_path: Path) -> None:
    model, lora_rank = _model(tmp_path, T)
    tensors, changes = tensors_of(model, "F2a", lora_rank)
    path = write_adapter(tmp_path / "a", tensors, **{**changes, "r": 6})
    with pytest.raises(AdapterFormatError, match=r"layout_hints\.expert_rank_from_shape") as caught:
        resolve(path, model)
    assert caught.value.reason == "WRONG_EXPERT_COUNT"
    form = resolve(path, model, hints=LayoutHints(expert_rank_from_shape=True))
    assert {pair.lora_rank for pair in form.pairs()} == {3}
    assert {pair.scale for pair in form.pairs()} == {2.0}


def test_hints_on_the_wire() -> None:
    for hints in (LayoutHints(), LayoutHints(swapped=True, expert_rank_from_shape=True, stacked_parameters=("x",))):
        assert LayoutHints.from_proto(hints.to_proto()) == hints
    with pytest.raises(InvalidArgumentError, match="orientation is 7"):
        LayoutHints.from_proto(types_pb2.LayoutHints(orientation=7))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="1 to 64 characters"):
        LayoutHints.from_proto(types_pb2.LayoutHints(stacked_parameters=[""]))


def test_embedding_and_lm_head_pairs(tmp_path: Path) -> None:
    model, _ = _model(tmp_path, T)
    prefix, ones = "base_model.model.", np.ones
    embedding = {
        f"{prefix}model.embed_tokens.lora_embedding_A": ones((3, 64), np.float32),
        f"{prefix}model.embed_tokens.lora_embedding_B": ones((8, 3), np.float32),
    }
    head = {
        f"{prefix}lm_head.lora_A.weight": ones((3, 8), np.float32),
        f"{prefix}lm_head.lora_B.weight": ones((64, 3), np.float32),
    }
    form = resolve(write_adapter(tmp_path / "a", {**embedding, **head}), model)
    assert list(form.dense) == ["model.embed_tokens", "lm_head"]
    tied = write_adapter(tmp_path / "b", embedding, ensure_weight_tying=True)
    with pytest.raises(AdapterFormatError, match="ensure_weight_tying"):
        resolve(tied, model)
    wrong_kind = _changed(head, ".lora_A.weight", ".lora_embedding_A")
    wrong_kind = _changed(wrong_kind, ".lora_B.weight", ".lora_embedding_B")
    with pytest.raises(AdapterFormatError, match="lm_head") as caught:
        resolve(write_adapter(tmp_path / "c", wrong_kind), model)
    assert caught.value.reason == "UNKNOWN_TENSORS"
