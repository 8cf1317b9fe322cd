"""What an adapter may have beside pairs of A and B: DoRA's magnitudes, biases of lora_B, whole modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from epilora.adapters.base_model import base_model_warnings
from epilora.adapters.convert import ConvertedLayout, convert_adapter
from epilora.adapters.open_adapter import open_adapter
from epilora.adapters.report import make_report
from epilora.errors import AdapterFormatError, InvalidArgumentError
from epilora.families import Projection
from epilora.model_spec import ModelSpec
from tests.unit.epilora_adapters import resolve, write_adapter
from tests.unit.epilora_layouts import Tensors, tensors_of
from tests.unit.epilora_models import model_spec

PREFIX = "base_model.model."
Q_PROJ = "model.layers.0.self_attn.q_proj"
ROUTER = "model.layers.1.mlp.gate"
EXPERT = "model.layers.0.mlp.experts.2.up_proj"


@pytest.fixture
def model(tmp_path: Path) -> ModelSpec:
    """Two layers, E 4, D 8, F 6."""
    return model_spec(tmp_path / "model")


def _pair(module: str, in_features: int = 8, out_features: int = 8) -> Tensors:
    return {
        f"{PREFIX}{module}.lora_A.weight": np.ones((3, in_features), np.float32),
        f"{PREFIX}{module}.lora_B.weight": np.ones((out_features, 3), np.float32),
    }


def _ones(name: str, *shape: int) -> Tensors:
    return {f"{PREFIX}{name}": np.ones(shape, np.float32)}


@pytest.mark.parametrize("ending", ["", ".weight", ".default", ".default.weight"])
def test_magnitudes_belong_to_their_pairs(model: ModelSpec, tmp_path: Path, ending: str) -> None:
    tensors = _pair(Q_PROJ) | _pair(EXPERT, 8, 6)
    tensors |= _ones(f"{Q_PROJ}.lora_magnitude_vector{ending}", 8) | _ones(f"{EXPERT}.lora_magnitude_vector{ending}", 6)
    path = write_adapter(tmp_path / "a", tensors, use_dora=True)
    form = resolve(path, model)
    dense, expert = form.dense[Q_PROJ], form.experts[0, Projection.UP][2]
    assert dense.magnitude is not None
    assert expert.magnitude is not None
    assert (dense.magnitude.shape, expert.magnitude.shape) == ((1, 8), (1, 6))
    with open_adapter(path) as opened:
        report = make_report(opened.header, opened.config(), form)
        assert report.num_tensors == report.num_tensors_used == 6
        with pytest.raises(InvalidArgumentError, match="cannot be converted"):
            convert_adapter(opened, model, tmp_path / "out", ConvertedLayout.FUSED)


def test_a_bias_of_lora_b(model: ModelSpec, tmp_path: Path) -> None:
    tensors = _pair(Q_PROJ) | _ones(f"{Q_PROJ}.lora_B.bias", 8)
    pair = resolve(write_adapter(tmp_path / "a", tensors, lora_bias=True), model).dense[Q_PROJ]
    assert pair.bias is not None
    assert pair.bias.tensor.shape == (8,)


def test_whole_modules(model: ModelSpec, tmp_path: Path) -> None:
    tensors = _pair(Q_PROJ) | _ones(f"{ROUTER}.weight", 4, 8) | _ones("model.embed_tokens.weight", 64, 8)
    path = write_adapter(tmp_path / "a", tensors, modules_to_save=["mlp.gate", "embed_tokens"])
    form = resolve(path, model)
    assert list(form.saved) == [ROUTER, "model.embed_tokens"]
    assert len(form.used_indices()) == 4


REFUSED: dict[str, tuple[Tensors, dict[str, Any], str, str]] = {
    "no flag, magnitude": (
        _pair(Q_PROJ) | _ones(f"{Q_PROJ}.lora_magnitude_vector", 8),
        {},
        "UNSUPPORTED_ADAPTER",
        "use_dora is not set, but the file holds magnitudes",
    ),
    "flag, no magnitude": (
        _pair(Q_PROJ) | _pair(EXPERT, 8, 6) | _ones(f"{Q_PROJ}.lora_magnitude_vector", 8),
        {"use_dora": True},
        "UNSUPPORTED_ADAPTER",
        "1 of 2 pairs have no lora_magnitude_vector",
    ),
    "no flag, bias": (
        _pair(Q_PROJ) | _ones(f"{Q_PROJ}.lora_B.bias", 8),
        {},
        "UNSUPPORTED_ADAPTER",
        "lora_bias is not set",
    ),
    "bias of an expert": (
        _pair(EXPERT, 8, 6) | _ones(f"{EXPERT}.lora_B.bias", 6),
        {"lora_bias": True},
        "UNSUPPORTED_ADAPTER",
        "lora_bias for routed experts is not supported",
    ),
    "magnitude of another size": (
        _pair(Q_PROJ) | _ones(f"{Q_PROJ}.lora_magnitude_vector", 7),
        {"use_dora": True},
        "SHAPE_MISMATCH",
        r"shape \[7\], expected \[8\]",
    ),
    "magnitude without elements": (
        _pair(Q_PROJ) | _ones(f"{Q_PROJ}.lora_magnitude_vector", 0),
        {"use_dora": True},
        "EMPTY_TENSOR",
        "lora_magnitude_vector",
    ),
    "magnitude alone": (
        _pair(Q_PROJ) | _ones(f"{ROUTER}.lora_magnitude_vector", 4),
        {"use_dora": True},
        "MISSING_PAIR_HALF",
        "lacks the pair of its module",
    ),
    "two magnitudes": (
        _pair(Q_PROJ)
        | _ones(f"{Q_PROJ}.lora_magnitude_vector", 8)
        | _ones(f"{Q_PROJ}.lora_magnitude_vector.weight", 8),
        {"use_dora": True},
        "DUPLICATE_TENSOR",
        "both the magnitude of",
    ),
    "a module that is not there": (
        _pair(Q_PROJ),
        {"modules_to_save": ["mlp.gate"]},
        "UNSUPPORTED_ADAPTER",
        "modules_to_save names 'mlp.gate'",
    ),
    "a module that is not named": (
        _pair(Q_PROJ) | _ones(f"{ROUTER}.weight", 4, 8),
        {},
        "UNKNOWN_TENSORS",
        r"mlp\.gate\.weight",
    ),
    "a module of another size": (
        _pair(Q_PROJ) | _ones("lm_head.weight", 66, 8),
        {"modules_to_save": ["lm_head"]},
        "SHAPE_MISMATCH",
        "vocabulary with new tokens",
    ),
    "an embedding that is tied": (
        _pair(Q_PROJ) | _ones("model.embed_tokens.weight", 64, 8),
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        "UNSUPPORTED_ADAPTER",
        "counts for lm_head, too",
    ),
    "a norm": (
        _pair(Q_PROJ) | _ones("model.norm.weight", 8),
        {"modules_to_save": ["norm"]},
        "UNSUPPORTED_ADAPTER",
        r"modules_to_save replaces model\.norm .*only linear maps, routers, embeddings and lm_head can be",
    ),
    "stacked experts": (
        _pair(Q_PROJ) | _ones("model.layers.0.mlp.experts.down_proj", 4, 8, 6),
        {"modules_to_save": ["mlp.experts"]},
        "UNSUPPORTED_ADAPTER",
        r"modules_to_save replaces model\.layers\.0\.mlp\.experts .*allow_partial",
    ),
    "half a router": (
        _pair(Q_PROJ) | _ones(f"{ROUTER}.weight", 4, 8) | _ones(f"{ROUTER}.e_score_correction_bias", 4),
        {"modules_to_save": ["mlp.gate"]},
        "UNSUPPORTED_ADAPTER",
        "half of a trained module is none",
    ),
    "a bias without its weight": (
        _pair(Q_PROJ) | _ones(f"{ROUTER}.bias", 4),
        {"modules_to_save": ["mlp.gate"]},
        "UNSUPPORTED_ADAPTER",
        "without the weight of its module",
    ),
    "a pair and a whole weight": (
        _pair(Q_PROJ) | _pair(ROUTER, 8, 4) | _ones(f"{ROUTER}.weight", 4, 8),
        {"modules_to_save": ["mlp.gate"]},
        "DUPLICATE_TENSOR",
        "for the same module",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(model: ModelSpec, tmp_path: Path, case: str) -> None:
    tensors, changes, reason, text = REFUSED[case]
    with pytest.raises(AdapterFormatError, match=text) as caught:
        resolve(write_adapter(tmp_path / "a", tensors, **changes), model)
    assert caught.value.reason == reason


def test_dora_of_stacked_experts_is_refused_as_in_peft(model: ModelSpec, tmp_path: Path) -> None:
    for layout in ("F2a", "F3"):
        tensors, changes = tensors_of(model, layout, 3)
        modules = {name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")}
        tensors |= {f"{module}.lora_magnitude_vector": np.ones(8, np.float32) for module in modules}
        with pytest.raises(AdapterFormatError, match="use_dora for stacked experts is not supported") as caught:
            resolve(write_adapter(tmp_path / layout, tensors, **changes, use_dora=True), model)
        assert caught.value.reason == "UNSUPPORTED_ADAPTER"


@pytest.mark.parametrize(
    ("recorded", "served", "warns"),
    [
        ("Qwen/Qwen3-30B-A3B", "/models/qwen3-30b-a3b/", False),
        ("/data/hub/models--Qwen--Qwen3-30B-A3B/snapshots/0a1b", "Qwen3-30B-A3B", False),
        ("Qwen/Qwen3-30B-A3B-Base", "/models/Qwen3-30B-A3B", True),
        ("", "/models/a", False),
        ("/", "/models/a", True),
    ],
)
def test_an_adapter_of_another_model_is_warned_of(recorded: str, served: str, warns: bool) -> None:
    warnings = base_model_warnings(recorded, served)
    assert len(warnings) == int(warns)
    assert all(repr(recorded) in warning and repr(served) in warning for warning in warnings)


def test_a_part_of_a_saved_module_is_never_left_out(model: ModelSpec, tmp_path: Path) -> None:
    """A router without the bias that was saved with it would choose other experts; a norm goes as a whole."""
    router = _pair(Q_PROJ) | _ones(f"{ROUTER}.weight", 4, 8) | _ones(f"{ROUTER}.deeper.e_score_correction_bias", 4)
    with pytest.raises(AdapterFormatError, match="half of a trained module is none"):
        resolve(write_adapter(tmp_path / "a", router, modules_to_save=["gate"]), model, allow_partial=True)
    norm = _pair(Q_PROJ) | _ones(f"{ROUTER}.weight", 4, 8) | _ones("model.norm.weight", 8)
    path = write_adapter(tmp_path / "b", norm, modules_to_save=["mlp.gate", "norm"])
    form = resolve(path, model, allow_partial=True)
    assert (list(form.saved), form.ignored) == ([ROUTER], (f"{PREFIX}model.norm.weight",))
