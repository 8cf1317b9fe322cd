"""Adapters that are refused, each by its reason and by what the message names; and what `allow_partial` leaves out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from epilora.errors import AdapterFormatError
from epilora.families import Projection
from epilora.model_spec import ModelSpec
from tests.unit.coded_tensors import BOTH, GATED, GOOD, PREFIX, TARGETS, A, B, Q, Tensors, dense, per_expert, stacked
from tests.unit.epilora_adapters import resolve, write_adapter
from tests.unit.epilora_models import model_spec


@pytest.fixture
def model(tmp_path: Path) -> ModelSpec:
    return model_spec(tmp_path / "model")


def _experts(**changes: Any) -> Callable[[ModelSpec], Tensors]:
    """The per-expert tensors with names replaced."""
    return lambda model: {
        name.replace(changes["old"], changes["new"]): array for name, array in per_expert(model, GATED).items()
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
        dense(Q, 16, 16),
        {"base_model_name_or_path": "big"},
        "SHAPE_MISMATCH",
        "trained on 'big'",
    ),
    "three dimensions": ({A: np.ones((1, 3, 8), np.float32), B: GOOD[B]}, {}, "SHAPE_MISMATCH", "two dimensions"),
    "rank over the limit": (dense(Q, 8, 8, rank=65), {"r": 65}, "LORA_RANK_TOO_LARGE", "limit 64"),
    "unknown module": ({**GOOD, **dense("score", 8, 64)}, {}, "UNKNOWN_TENSORS", "2 of 4 tensors fit nothing"),
    "foreign prefix": (dense(f"foo.{Q}", 8, 8), {}, "UNKNOWN_TENSORS", "foo.model.layers"),
    "layer too high": (dense(Q.replace("0", "2"), 8, 8), {}, "UNKNOWN_TENSORS", "layers.2"),
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
        lambda model: stacked(model, BOTH, swapped=False),
        {"target_parameters": TARGETS, "r": 6},
        "WRONG_EXPERT_COUNT",
        "at lora_rank 6 are 2 experts",
    ),
    "no whole number of experts": (
        lambda model: stacked(model, BOTH, swapped=False),
        {"target_parameters": TARGETS, "r": 5},
        "WRONG_EXPERT_COUNT",
        "no whole number of experts",
    ),
    "one parameter named, two pairs": (
        lambda model: stacked(model, BOTH, swapped=False),
        {"target_parameters": TARGETS[:1]},
        "WRONG_PARAMETER_COUNT",
        "2 pairs in the file",
    ),
    "two parameters named, one pair": (
        lambda model: stacked(model, {"": Projection.GATE_UP}, swapped=False),
        {"target_parameters": TARGETS},
        "WRONG_PARAMETER_COUNT",
        "1 pairs in the file",
    ),
    "the other parameter named": (
        lambda model: stacked(model, {"": Projection.GATE_UP}, swapped=False),
        {"target_parameters": TARGETS[1:]},
        "SHAPE_MISMATCH",
        r"expected \[4\*r, 8\] and \[12, 4\*r\] for gate_up_proj; or \[4\*r, 6\]",
    ),
    "layers of two orientations": (
        lambda model: {
            name: array
            for swapped in (False, True)
            for name, array in stacked(model, BOTH, swapped=swapped).items()
            if f"layers.{int(swapped)}" in name
        },
        {"target_parameters": TARGETS},
        "SHAPE_MISMATCH",
        "layers.1",
    ),
    "both layouts": (
        lambda model: {
            **stacked(model, {"": Projection.DOWN}, swapped=False),
            **dense("model.layers.0.mlp.experts.0.gate_proj", 8, 6),
        },
        {},
        "MIXED_LAYOUTS",
        "more than one layout: ",
    ),
    "dtypes differ among experts": (
        lambda model: {
            name: np.zeros_like(array, np.float16 if "experts.2." in name else np.float32)
            for name, array in per_expert(model, GATED).items()
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
    path = write_adapter(tmp_path / "a", {**GOOD, **dense("score", 8, 64)})
    form = resolve(path, model, allow_partial=True)
    assert form.ignored == (f"{PREFIX}score.lora_A.weight", f"{PREFIX}score.lora_B.weight")
    assert list(form.dense) == [Q]
    nothing = write_adapter(tmp_path / "b", dense("score", 8, 64))
    with pytest.raises(AdapterFormatError, match="none of the file's 2 tensors fits this model"):
        resolve(nothing, model, allow_partial=True)
    dora = write_adapter(tmp_path / "c", {**GOOD, f"{PREFIX}{Q}.lora_magnitude_vector": np.ones(8, np.float32)})
    with pytest.raises(AdapterFormatError, match="DoRA"):
        resolve(dora, model, allow_partial=True)
