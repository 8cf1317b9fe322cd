"""Layouts -> normal form on arrays whose values say what they are: a swap of layer, expert, projection or axis is seen.

Model: 2 layers, E = 4, D = 8, F = 6, r = 3, so that a wrong axis fails by shape; SQUARE has D = 2F and r = E, where it
does not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from epilora.adapters.normal_form import NormalForm
from epilora.errors import AdapterFormatError
from epilora.families import Projection
from epilora.model_spec import ModelSpec
from tests.unit.epilora_adapters import AdapterArrays, resolve, write_adapter
from tests.unit.epilora_models import model_spec

PREFIX = "base_model.model."
EXPERTS = "model.layers.{}.mlp.experts"
LAYERS, E, R = (0, 1), 4, 3
Tensors = dict[str, np.ndarray]


def _code(layer: int, expert: int, projection: Projection, side: int, shape: tuple[int, int]) -> np.ndarray:
    """Integers that encode all of (layer, expert, projection, side, row, column); exact in float32."""
    number = ((layer * 8 + expert) * 4 + list(Projection).index(projection)) * 2 + side
    rows, columns = np.indices(shape)
    return (number * 1024 + rows * 32 + columns).astype(np.float32)


def _sizes(model: ModelSpec, projection: Projection) -> tuple[int, int]:
    moe = model.moe_layers[0]
    return {
        Projection.GATE_UP: (moe.hidden_size, 2 * moe.intermediate_size),
        Projection.GATE: (moe.hidden_size, moe.intermediate_size),
        Projection.UP: (moe.hidden_size, moe.intermediate_size),
        Projection.DOWN: (moe.intermediate_size, moe.hidden_size),
    }[projection]


def _a(model: ModelSpec, layer: int, expert: int, projection: Projection, rank: int = R) -> np.ndarray:
    return _code(layer, expert, projection, 0, (rank, _sizes(model, projection)[0]))


def _b(model: ModelSpec, layer: int, expert: int, projection: Projection, rank: int = R) -> np.ndarray:
    return _code(layer, expert, projection, 1, (_sizes(model, projection)[1], rank))


def _per_expert(model: ModelSpec, names: dict[str, Projection], experts: str = EXPERTS) -> Tensors:
    tensors = {}
    for layer in LAYERS:
        for expert in range(E):
            for name, projection in names.items():
                module = f"{PREFIX}{experts.format(layer)}.{expert}.{name}"
                tensors[f"{module}.lora_A.weight"] = _a(model, layer, expert, projection)
                tensors[f"{module}.lora_B.weight"] = _b(model, layer, expert, projection)
    return tensors


def _stack(model: ModelSpec, layer: int, projection: Projection, swapped: bool, rank: int) -> tuple[np.ndarray, ...]:
    """A [E*r, in] and B [out, r*E]; swapped: A holds the transposed B blocks, and B the transposed A blocks."""
    a = [_a(model, layer, expert, projection, rank) for expert in range(E)]
    b = [_b(model, layer, expert, projection, rank) for expert in range(E)]
    if swapped:
        a, b = [block.T for block in b], [block.T for block in a]
    return np.concatenate(a), np.stack(b, axis=2).reshape(b[0].shape[0], -1)


def _stacked(model: ModelSpec, wrappers: dict[str, Projection], *, swapped: bool, rank: int = R) -> Tensors:
    tensors = {}
    for layer in LAYERS:
        for wrapper, projection in wrappers.items():
            module = f"{PREFIX}{EXPERTS.format(layer)}{wrapper}"
            a, b = _stack(model, layer, projection, swapped, rank)
            tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = a, b
    return tensors


BOTH = {".base_layer": Projection.GATE_UP, "": Projection.DOWN}
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
GATED = {"gate_proj": Projection.GATE, "up_proj": Projection.UP, "down_proj": Projection.DOWN}


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
            np.testing.assert_array_equal(arrays.matrix(pair.a), _a(model, layer, expert, projection, rank))
            np.testing.assert_array_equal(arrays.matrix(pair.b), _b(model, layer, expert, projection, rank))
            assert pair.lora_rank == rank


def test_per_expert(model: ModelSpec, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", _per_expert(model, GATED))
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
        path = write_adapter(tmp_path / str(number), _per_expert(model, names, experts))
        _check(resolve(path, model), path, model, {Projection.GATE, Projection.UP, Projection.DOWN})


@pytest.mark.parametrize("swapped", [False, True])
def test_stacked_orientation_by_shape(model: ModelSpec, tmp_path: Path, swapped: bool) -> None:
    """No version recorded: the shapes say it."""
    tensors = _stacked(model, BOTH, swapped=swapped)
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
    path = write_adapter(tmp_path / "a", _stacked(model, {"": projection}, swapped=swapped), target_parameters=[name])
    _check(resolve(path, model), path, model, {projection})


@pytest.mark.parametrize("swapped", [False, True])
def test_square_sizes_with_both_parameters(square: ModelSpec, tmp_path: Path, swapped: bool) -> None:
    """gate_up's shapes fit both ways; down's do not, and one writer wrote both."""
    path = write_adapter(
        tmp_path / "a", _stacked(square, BOTH, swapped=swapped, rank=4), target_parameters=TARGETS, r=4
    )
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
    tensors = _stacked(square, {"": Projection.GATE_UP}, swapped=swapped, rank=4)
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
        tensors = _stacked(model, {"": Projection.GATE_UP}, swapped=swapped, rank=4)
        path = write_adapter(tmp_path / version, tensors, target_parameters=TARGETS[:1], r=4, peft_version=version)
        _check(resolve(path, model), path, model, {Projection.GATE_UP}, rank=4)


@pytest.mark.parametrize("version", [None, "", "0.18.2.dev0", "0.19.0.dev0", "0.19.0rc1", "0.19.1.dev0", "main"])
def test_square_sizes_without_a_version_are_refused(square: ModelSpec, tmp_path: Path, version: str | None) -> None:
    tensors = _stacked(square, {"": Projection.GATE_UP}, swapped=False, rank=4)
    path = write_adapter(tmp_path / "a", tensors, target_parameters=TARGETS[:1], r=4, peft_version=version)
    with pytest.raises(AdapterFormatError, match=r"save the adapter again with PEFT 0\.19\.1") as caught:
        resolve(path, square)
    assert caught.value.reason == "AMBIGUOUS_ORIENTATION"


def test_deeper_wrappers_of_a_second_adapter(model: ModelSpec, tmp_path: Path) -> None:
    wrappers = {".base_layer.base_layer.base_layer": Projection.GATE_UP, ".base_layer.base_layer": Projection.DOWN}
    path = write_adapter(tmp_path / "a", _stacked(model, wrappers, swapped=False), target_parameters=TARGETS)
    _check(resolve(path, model), path, model, {Projection.GATE_UP, Projection.DOWN})


def test_names_without_prefix_and_with_an_adapter_name(model: ModelSpec, tmp_path: Path) -> None:
    tensors = {
        name.removeprefix(PREFIX).replace(".weight", ".default.weight"): array
        for name, array in _per_expert(model, GATED).items()
    }
    path = write_adapter(tmp_path / "a", tensors)
    _check(resolve(path, model), path, model, {Projection.GATE, Projection.UP, Projection.DOWN})


def test_scales(model: ModelSpec, tmp_path: Path) -> None:
    """Patterns match by suffix or as expressions, first one first; ranks are the tensors'."""
    path = write_adapter(
        tmp_path / "a",
        _per_expert(model, GATED),
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
        tensors |= _stacked(model, {wrapper: projection}, swapped=False, rank=rank)
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
        for name, array in _per_expert(model, {"up_proj": Projection.UP}).items()
        if "layers.1" in name and ("experts.0." in name or "experts.3." in name)
    }
    form = resolve(write_adapter(tmp_path / "a", tensors), model)
    assert {key: list(by_expert) for key, by_expert in form.experts.items()} == {(1, Projection.UP): [0, 3]}


def _dense(module: str, in_features: int, out_features: int, rank: int = R) -> Tensors:
    return {
        f"{PREFIX}{module}.lora_A.weight": np.ones((rank, in_features), np.float32),
        f"{PREFIX}{module}.lora_B.weight": np.ones((out_features, rank), np.float32),
    }


def test_router_shared_expert_and_gate_are_not_mixed_up(tmp_path: Path) -> None:
    model = model_spec(tmp_path / "model", model_type="qwen2_moe", shared_expert_intermediate_size=10)
    mlp = "model.layers.0.mlp"
    tensors = {
        **_dense(f"{mlp}.gate", 8, 4),
        **_dense(f"{mlp}.shared_expert_gate", 8, 1),
        **_dense(f"{mlp}.shared_expert.gate_proj", 8, 10),
        **_dense(f"{mlp}.experts.1.gate_proj", 8, 6),
    }
    form = resolve(write_adapter(tmp_path / "a", tensors), model)
    assert set(form.dense) == {f"{mlp}.gate", f"{mlp}.shared_expert_gate", f"{mlp}.shared_expert.gate_proj"}
    assert list(form.experts) == [(0, Projection.GATE)]


def test_a_router_as_target_parameter_takes_patterns_of_its_weight(model: ModelSpec, tmp_path: Path) -> None:
    tensors = _dense("model.layers.0.mlp.gate", 8, 4)
    changes = {"alpha_pattern": {"gate.weight": 12}, "target_modules": []}
    named = write_adapter(tmp_path / "a", tensors, target_parameters=["mlp.gate.weight"], **changes)
    assert next(iter(resolve(named, model).dense.values())).scale == 4.0
    plain = write_adapter(tmp_path / "b", tensors, **changes)
    assert next(iter(resolve(plain, model).dense.values())).scale == 2.0


Q = "model.layers.0.self_attn.q_proj"
GOOD = _dense(Q, 8, 8)
A, B = GOOD


def _experts(**changes: Any) -> Callable[[ModelSpec], Tensors]:
    """The per-expert tensors with names replaced."""
    return lambda model: {
        name.replace(changes["old"], changes["new"]): array for name, array in _per_expert(model, GATED).items()
    }


BAD: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "no tensors": ({}, {}, "NO_LORA_TENSORS", "holds no tensors"),
    "full weights": ({"model.norm.weight": np.ones(8, np.float32)}, {}, "NO_LORA_TENSORS", "first model.norm.weight"),
    "A without B": ({A: GOOD[A]}, {}, "MISSING_PAIR_HALF", A),
    "B without A": ({**GOOD, B.replace("q_proj", "k_proj"): GOOD[B]}, {}, "MISSING_PAIR_HALF", "1 tensors lack"),
    "empty tensors": (
        {A: np.ones((0,), np.float32), B: np.ones((0,), np.float32)},
        {},
        "EMPTY_TENSOR",
        "did not gather",
    ),
    "ranks differ": ({A: GOOD[A], B: np.ones((8, 4), np.float32)}, {}, "RANK_MISMATCH", "3 rows"),
    "another hidden size": (
        _dense(Q, 16, 16),
        {"base_model_name_or_path": "big"},
        "SHAPE_MISMATCH",
        "trained on 'big'",
    ),
    "three dimensions": ({A: np.ones((1, 3, 8), np.float32), B: GOOD[B]}, {}, "SHAPE_MISMATCH", "two dimensions"),
    "rank over the limit": (_dense(Q, 8, 8, rank=65), {"r": 65}, "LORA_RANK_TOO_LARGE", "limit 64"),
    "unknown module": ({**GOOD, **_dense("score", 8, 64)}, {}, "UNKNOWN_TENSORS", "2 of 4 tensors fit nothing"),
    "foreign prefix": (_dense(f"foo.{Q}", 8, 8), {}, "UNKNOWN_TENSORS", "foo.model.layers"),
    "layer too high": (_dense(Q.replace("0", "2"), 8, 8), {}, "UNKNOWN_TENSORS", "layers.2"),
    "half an embedding pair": (
        {**GOOD, "x.lora_embedding_A": np.ones((3, 8), np.float32)},
        {},
        "MISSING_PAIR_HALF",
        "embedding",
    ),
    "DoRA by tensor": (
        {**GOOD, f"{PREFIX}{Q}.lora_magnitude_vector": np.ones(8, np.float32)},
        {},
        "UNSUPPORTED_ADAPTER",
        "DoRA",
    ),
    "bias by tensor": (
        {**GOOD, f"{PREFIX}{Q}.lora_B.bias": np.ones(8, np.float32)},
        {},
        "UNSUPPORTED_ADAPTER",
        "lora_bias is not set",
    ),
    "two adapters": (
        {A.replace("weight", "x.weight"): GOOD[A], B.replace("weight", "y.weight"): GOOD[B]},
        {},
        "MIXED_ADAPTER_NAMES",
        "2 adapters",
    ),
    "two names of one half": ({**GOOD, A.removeprefix(PREFIX): GOOD[A]}, {}, "DUPLICATE_TENSOR", "both lora_A"),
    "expert out of range": (
        _experts(old="experts.3.", new="experts.4."),
        {},
        "EXPERT_OUT_OF_RANGE",
        "experts 0 to 3",
    ),
    "expert with a leading zero": (
        _experts(old="experts.3.", new="experts.03."),
        {},
        "EXPERT_OUT_OF_RANGE",
        "expert 03",
    ),
    "a projection that experts do not have": (
        _experts(old="gate_proj", new="down_proj_"),
        {},
        "UNKNOWN_TENSORS",
        "down_proj_",
    ),
    "too few experts": (
        lambda model: _stacked(model, BOTH, swapped=False),
        {"target_parameters": TARGETS, "r": 6},
        "WRONG_EXPERT_COUNT",
        "at lora_rank 6 are 2 experts",
    ),
    "no whole number of experts": (
        lambda model: _stacked(model, BOTH, swapped=False),
        {"target_parameters": TARGETS, "r": 5},
        "WRONG_EXPERT_COUNT",
        "no whole number of experts",
    ),
    "one parameter named, two pairs": (
        lambda model: _stacked(model, BOTH, swapped=False),
        {"target_parameters": TARGETS[:1]},
        "WRONG_PARAMETER_COUNT",
        "2 pairs in the file",
    ),
    "two parameters named, one pair": (
        lambda model: _stacked(model, {"": Projection.GATE_UP}, swapped=False),
        {"target_parameters": TARGETS},
        "WRONG_PARAMETER_COUNT",
        "1 pairs in the file",
    ),
    "the other parameter named": (
        lambda model: _stacked(model, {"": Projection.GATE_UP}, swapped=False),
        {"target_parameters": TARGETS[1:]},
        "SHAPE_MISMATCH",
        r"expected \[4\*r, 8\] and \[12, 4\*r\] for gate_up_proj; or \[4\*r, 6\]",
    ),
    "layers of two orientations": (
        lambda model: {
            name: array
            for swapped in (False, True)
            for name, array in _stacked(model, BOTH, swapped=swapped).items()
            if f"layers.{int(swapped)}" in name
        },
        {"target_parameters": TARGETS},
        "SHAPE_MISMATCH",
        "layers.1",
    ),
    "both layouts": (
        lambda model: {
            **_stacked(model, {"": Projection.DOWN}, swapped=False),
            **_dense("model.layers.0.mlp.experts.0.gate_proj", 8, 6),
        },
        {},
        "MIXED_LAYOUTS",
        "more than one layout: ",
    ),
    "dtypes differ among experts": (
        lambda model: {
            name: np.zeros_like(array, np.float16 if "experts.2." in name else np.float32)
            for name, array in _per_expert(model, GATED).items()
        },
        {},
        "MIXED_DTYPES",
        r"\['F16', 'F32'\]",
    ),
    "integers": ({A: np.ones((3, 8), np.int8), B: GOOD[B]}, {}, "UNSUPPORTED_DTYPE", "'I8'"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_adapters(model: ModelSpec, tmp_path: Path, kind: str) -> None:
    tensors, changes, reason, text = BAD[kind]
    path = write_adapter(tmp_path / "a", tensors(model) if callable(tensors) else tensors, **changes)
    with pytest.raises(AdapterFormatError, match=text) as caught:
        resolve(path, model)
    assert caught.value.reason == reason


def test_allow_partial_names_what_it_leaves_out(model: ModelSpec, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", {**GOOD, **_dense("score", 8, 64)})
    form = resolve(path, model, allow_partial=True)
    assert form.ignored == (f"{PREFIX}score.lora_A.weight", f"{PREFIX}score.lora_B.weight")
    assert list(form.dense) == [Q]
    nothing = write_adapter(tmp_path / "b", _dense("score", 8, 64))
    with pytest.raises(AdapterFormatError, match="none of the file's 2 tensors fits this model"):
        resolve(nothing, model, allow_partial=True)
    dora = write_adapter(tmp_path / "c", {**GOOD, f"{PREFIX}{Q}.lora_magnitude_vector": np.ones(8, np.float32)})
    with pytest.raises(AdapterFormatError, match="DoRA"):
        resolve(dora, model, allow_partial=True)


def test_different_dtypes_of_a_and_b(model: ModelSpec, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", {A: GOOD[A], B: GOOD[B].astype(np.float16)})
    pair = resolve(path, model).dense[Q]
    assert (pair.a.tensor.dtype, pair.b.tensor.dtype) == ("F32", "F16")
    np.testing.assert_array_equal(AdapterArrays(path).delta(pair), np.full((8, 8), 6.0))


def test_unused_target_parameters_are_warned_of(model: ModelSpec, tmp_path: Path) -> None:
    form = resolve(write_adapter(tmp_path / "a", GOOD, target_parameters=TARGETS), model)
    assert any("has no pair for stacked experts" in warning for warning in form.warnings)
