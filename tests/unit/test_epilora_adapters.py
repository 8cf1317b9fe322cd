"""Layouts -> normal form on arrays whose values say what they are: a swap of layer, expert, projection or axis is seen.

The model of `coded_tensors`; SQUARE has D = 2F and r = E, where a wrong axis does not fail by shape.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from epilora.adapters.layout_hints import LayoutHints
from epilora.adapters.normal_form import NormalForm
from epilora.errors import AdapterFormatError
from epilora.families import Projection
from epilora.model_spec import ModelSpec
from tests.unit.coded_tensors import (
    BOTH,
    EXPERTS,
    GATED,
    GOOD,
    LAYERS,
    PREFIX,
    TARGETS,
    A,
    B,
    E,
    Q,
    R,
    dense,
    lora_a,
    lora_b,
    per_expert,
    stacked,
)
from tests.unit.epilora_adapters import AdapterArrays, resolve, write_adapter
from tests.unit.epilora_models import model_spec


@pytest.fixture
def model(tmp_path: Path) -> ModelSpec:
    return model_spec(tmp_path / "model")


@pytest.fixture
def square(tmp_path: Path) -> ModelSpec:
    return model_spec(tmp_path / "square", moe_intermediate_size=4)


def _check(form: NormalForm, path: Path, model: ModelSpec, projections: set[Projection], rank: int = R) -> None:
    arrays = AdapterArrays(path)
    assert set(form.experts) == {(layer, projection) for layer in LAYERS for projection in projections}
    for (layer, projection), by_expert in form.experts.items():
        assert list(by_expert) == list(range(E))
        for expert, pair in by_expert.items():
            np.testing.assert_array_equal(arrays.matrix(pair.a), lora_a(model, layer, expert, projection, rank))
            np.testing.assert_array_equal(arrays.matrix(pair.b), lora_b(model, layer, expert, projection, rank))
            assert pair.lora_rank == rank


def test_per_expert(model: ModelSpec, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", per_expert(model, GATED))
    form = resolve(path, model)
    assert form.expert_layout == "per_expert"
    _check(form, path, model, {Projection.GATE, Projection.UP, Projection.DOWN})
    assert {pair.scale for pair in form.pairs()} == {2.0}


def test_mixtral_names_of_both_trees(tmp_path: Path) -> None:
    model = model_spec(tmp_path / "model", model_type="mixtral", intermediate_size=6)
    old = {"w1": Projection.GATE, "w3": Projection.UP, "w2": Projection.DOWN}
    for number, (names, experts) in enumerate(
        [(old, "model.layers.{}.block_sparse_moe.experts"), (old, EXPERTS), (GATED, EXPERTS)]
    ):
        path = write_adapter(tmp_path / str(number), per_expert(model, names, experts))
        _check(resolve(path, model), path, model, {Projection.GATE, Projection.UP, Projection.DOWN})


@pytest.mark.parametrize("swapped", [False, True])
def test_stacked_orientation_by_shape(model: ModelSpec, tmp_path: Path, swapped: bool) -> None:
    """No version recorded: the shapes say it."""
    tensors = stacked(model, BOTH, swapped=swapped)
    path = write_adapter(tmp_path / "a", tensors, target_parameters=TARGETS)
    form = resolve(path, model)
    assert form.expert_layout == "target_parameters"
    _check(form, path, model, {Projection.GATE_UP, Projection.DOWN})
    without_names = write_adapter(tmp_path / "b", tensors)
    _check(resolve(without_names, model), without_names, model, {Projection.GATE_UP, Projection.DOWN})


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("projection", [Projection.GATE_UP, Projection.DOWN])
def test_a_single_parameter_sits_at_the_outer_name(
    model: ModelSpec, tmp_path: Path, projection: Projection, swapped: bool
) -> None:
    name = {Projection.GATE_UP: TARGETS[0], Projection.DOWN: TARGETS[1]}[projection]
    path = write_adapter(tmp_path / "a", stacked(model, {"": projection}, swapped=swapped), target_parameters=[name])
    _check(resolve(path, model), path, model, {projection})


@pytest.mark.parametrize("swapped", [False, True])
def test_square_sizes_with_both_parameters(square: ModelSpec, tmp_path: Path, swapped: bool) -> None:
    """gate_up's shapes fit both ways; down's do not, and one writer wrote both."""
    path = write_adapter(tmp_path / "a", stacked(square, BOTH, swapped=swapped, rank=4), target_parameters=TARGETS, r=4)
    _check(resolve(path, square), path, square, {Projection.GATE_UP, Projection.DOWN}, rank=4)


@pytest.mark.parametrize(
    ("version", "swapped"),
    [
        ("0.18.1", True),
        ("0.18.1.dev0", True),
        ("0.19.0", True),
        ("0.19.1", False),
        ("0.20.0.dev0@abc", False),
        ("0.21.2", False),
        ("1.0.0", False),
    ],
)
def test_square_sizes_by_version(square: ModelSpec, tmp_path: Path, version: str, swapped: bool) -> None:
    tensors = stacked(square, {"": Projection.GATE_UP}, swapped=swapped, rank=4)
    path = write_adapter(tmp_path / "a", tensors, target_parameters=TARGETS[:1], r=4, peft_version=version)
    _check(resolve(path, square), path, square, {Projection.GATE_UP}, rank=4)


@pytest.mark.parametrize(
    ("model_type", "swapped_in"),
    [
        ("llama4_text", ("0.19.1", "0.21.2")),
        ("llama4", ("0.19.1", "0.21.2")),
        ("gpt_oss", ("0.19.0",)),
        ("olmoe", ("0.18.1", "0.19.0")),
    ],
)
def test_which_releases_swap_depends_on_how_parameters_are_stored(
    square: ModelSpec, tmp_path: Path, model_type: str, swapped_in: tuple[str, ...]
) -> None:
    """PEFT heeds `is_transposed` of the module, which Llama 4's lacks, although it stores (E, in, out)."""
    model = dataclasses.replace(square, model_type=model_type)
    for version in ("0.18.1", "0.19.0", "0.19.1", "0.21.2"):
        swapped = version in swapped_in
        tensors = stacked(model, {"": Projection.GATE_UP}, swapped=swapped, rank=4)
        path = write_adapter(tmp_path / version, tensors, target_parameters=TARGETS[:1], r=4, peft_version=version)
        _check(resolve(path, model), path, model, {Projection.GATE_UP}, rank=4)


@pytest.mark.parametrize("version", [None, "", "0.18.2.dev0", "0.19.0.dev0", "0.19.0rc1", "0.19.1.dev0", "main"])
def test_square_sizes_without_a_version_are_refused(square: ModelSpec, tmp_path: Path, version: str | None) -> None:
    tensors = stacked(square, {"": Projection.GATE_UP}, swapped=False, rank=4)
    path = write_adapter(tmp_path / "a", tensors, target_parameters=TARGETS[:1], r=4, peft_version=version)
    with pytest.raises(AdapterFormatError, match=r"save the adapter again with PEFT 0\.19\.1") as caught:
        resolve(path, square)
    assert caught.value.reason == "AMBIGUOUS_ORIENTATION"


def test_deeper_wrappers_of_a_second_adapter(model: ModelSpec, tmp_path: Path) -> None:
    wrappers = {".base_layer.base_layer.base_layer": Projection.GATE_UP, ".base_layer.base_layer": Projection.DOWN}
    path = write_adapter(tmp_path / "a", stacked(model, wrappers, swapped=False), target_parameters=TARGETS)
    _check(resolve(path, model), path, model, {Projection.GATE_UP, Projection.DOWN})


def test_names_without_prefix_and_with_an_adapter_name(model: ModelSpec, tmp_path: Path) -> None:
    tensors = {
        name.removeprefix(PREFIX).replace(".weight", ".default.weight"): array
        for name, array in per_expert(model, GATED).items()
    }
    path = write_adapter(tmp_path / "a", tensors)
    _check(resolve(path, model), path, model, {Projection.GATE, Projection.UP, Projection.DOWN})


def test_scales(model: ModelSpec, tmp_path: Path) -> None:
    """Patterns match by suffix or as expressions, first one first; ranks are the tensors'."""
    path = write_adapter(
        tmp_path / "a",
        per_expert(model, GATED),
        use_rslora=True,
        alpha_pattern={r".*\.experts\.2\.down_proj": 1, "down_proj": 5, "layers.1.mlp.experts.3.up_proj": 7, "x": 1},
        rank_pattern={"gate_proj": 9},
    )
    form = resolve(path, model)
    root = math.sqrt(R)
    assert form.experts[0, Projection.DOWN][2].scale == pytest.approx(1 / root)
    assert form.experts[0, Projection.DOWN][1].scale == pytest.approx(5 / root)
    assert form.experts[1, Projection.UP][3].scale == pytest.approx(7 / root)
    assert form.experts[0, Projection.UP][3].scale == pytest.approx(6 / root)
    assert form.experts[0, Projection.GATE][0].scale == pytest.approx(6 / root)
    assert len(form.rank_differences) == len(LAYERS) * E
    assert form.rank_differences[0] == "model.layers.0.mlp.experts.0.gate_proj: config 9, tensors 3"
    assert "alpha_pattern has entries that match no module of the file: x" in form.warnings


def test_scales_of_stacked_parameters(model: ModelSpec, tmp_path: Path) -> None:
    tensors = {}
    for projection, wrapper, rank in ((Projection.GATE_UP, ".base_layer", 3), (Projection.DOWN, "", 2)):
        tensors |= stacked(model, {wrapper: projection}, swapped=False, rank=rank)
    path = write_adapter(
        tmp_path / "a",
        tensors,
        target_parameters=TARGETS,
        rank_pattern={"experts.down_proj": 2},
        alpha_pattern={r"model\.layers\.1\.mlp\.experts\.gate_up_proj": 9},
    )
    form = resolve(path, model)
    assert {pair.scale for pair in form.experts[0, Projection.DOWN].values()} == {3.0}
    assert {pair.scale for pair in form.experts[0, Projection.GATE_UP].values()} == {2.0}
    assert {pair.scale for pair in form.experts[1, Projection.GATE_UP].values()} == {3.0}


def test_some_experts_and_one_projection(model: ModelSpec, tmp_path: Path) -> None:
    tensors = {
        name: array
        for name, array in per_expert(model, {"up_proj": Projection.UP}).items()
        if "layers.1" in name and ("experts.0." in name or "experts.3." in name)
    }
    form = resolve(write_adapter(tmp_path / "a", tensors), model)
    assert {key: list(by_expert) for key, by_expert in form.experts.items()} == {(1, Projection.UP): [0, 3]}


def test_router_shared_expert_and_gate_are_not_mixed_up(tmp_path: Path) -> None:
    model = model_spec(tmp_path / "model", model_type="qwen2_moe", shared_expert_intermediate_size=10)
    mlp = "model.layers.0.mlp"
    tensors = {
        **dense(f"{mlp}.gate", 8, 4),
        **dense(f"{mlp}.shared_expert_gate", 8, 1),
        **dense(f"{mlp}.shared_expert.gate_proj", 8, 10),
        **dense(f"{mlp}.experts.1.gate_proj", 8, 6),
    }
    form = resolve(write_adapter(tmp_path / "a", tensors), model)
    assert set(form.dense) == {f"{mlp}.gate", f"{mlp}.shared_expert_gate", f"{mlp}.shared_expert.gate_proj"}
    assert list(form.experts) == [(0, Projection.GATE)]


def test_a_router_as_target_parameter_takes_patterns_of_its_weight(model: ModelSpec, tmp_path: Path) -> None:
    tensors = dense("model.layers.0.mlp.gate", 8, 4)
    changes = {"alpha_pattern": {"gate.weight": 12}, "target_modules": []}
    named = write_adapter(tmp_path / "a", tensors, target_parameters=["mlp.gate.weight"], **changes)
    assert next(iter(resolve(named, model).dense.values())).scale == 4.0
    plain = write_adapter(tmp_path / "b", tensors, **changes)
    assert next(iter(resolve(plain, model).dense.values())).scale == 2.0


def test_different_dtypes_of_a_and_b(model: ModelSpec, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", {A: GOOD[A], B: GOOD[B].astype(np.float16)})
    pair = resolve(path, model).dense[Q]
    assert (pair.a.tensor.dtype, pair.b.tensor.dtype) == ("F32", "F16")
    np.testing.assert_array_equal(AdapterArrays(path).delta(pair), np.full((8, 8), 6.0))


def test_unused_target_parameters_are_warned_of(model: ModelSpec, tmp_path: Path) -> None:
    form = resolve(write_adapter(tmp_path / "a", GOOD, target_parameters=TARGETS), model)
    assert any("has no pair for stacked experts" in warning for warning in form.warnings)


def test_hints_without_stacked_experts_are_warned_of(model: ModelSpec, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", GOOD)
    assert not resolve(path, model).warnings
    form = resolve(path, model, hints=LayoutHints(swapped=True))
    assert any("layout_hints had no effect" in warning for warning in form.warnings)
