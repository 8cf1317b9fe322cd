"""Anything may be in an adapter's files: the readers answer with a normal form or a clean error, and nothing else.

`EPILORA_FUZZ_EXAMPLES` says how many files each test tries; 150 by default.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epilora.adapters.layout_hints import LayoutHints
from epilora.adapters.normal_form import NormalForm
from epilora.adapters.open_adapter import open_adapter
from epilora.errors import EpiloraError
from epilora.model_spec import ModelSpec
from tests.unit.epilora_models import model_spec

EXAMPLES = int(os.environ.get("EPILORA_FUZZ_EXAMPLES", "150"))
_SETTINGS = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
_LIMIT_BYTES = 1 << 16

_MODULES = st.sampled_from(
    [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.mlp.gate",
        "model.layers.0.mlp.experts",
        "model.layers.0.mlp.experts.base_layer",
        "model.layers.1.mlp.experts.base_layer.base_layer",
        "model.layers.0.mlp.experts.2.gate_proj",
        "model.layers.0.mlp.experts.4.down_proj",
        "model.layers.0.mlp.experts.w1",
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.1.mlp.experts.down_projs.3",
        "model.language_model.layers.0.mlp.experts.down_proj",
        "model.embed_tokens",
        "lm_head",
        "x",
    ]
)
_ENDINGS = st.sampled_from(
    [
        *(f".lora_{side}{rest}" for side in "AB" for rest in (".weight", "", ".default.weight", ".x.weight", ".bias")),
        *(f".lora_{kind}_{side}" for side in "AB" for kind in ("embedding", "gate_and_up", "down")),
        ".weight",
        ".lora_magnitude_vector",
    ]
)
_SHAPES = st.one_of(
    st.lists(st.sampled_from([0, 1, 3, 4, 6, 8, 12, 16, 24, 64]), max_size=4).map(tuple),
    st.sampled_from([(3, 8), (8, 3), (12, 8), (12, 12), (8, 12), (4, 3, 8), (4, 12, 3), (1, 3, 8), (4, 8, 3), (64, 3)]),
)
_NAMES = st.builds(
    lambda prefix, module, ending: prefix + module + ending,
    st.sampled_from(["", "base_model.model."]),
    _MODULES,
    _ENDINGS,
)


def _whole_module(module: str, sizes: tuple[int, int, int], extras: list[str]) -> dict[str, tuple[int, ...]]:
    """A pair that may fit, and what may be beside it."""
    rank, inputs, outputs = sizes
    shapes: dict[str, tuple[int, ...]] = {"lora_A.weight": (rank, inputs), "lora_B.weight": (outputs, rank)}
    shapes |= {name: (outputs, inputs) if name == "weight" else (outputs,) for name in extras}
    return {f"base_model.model.{module}.{name}": shape for name, shape in shapes.items()}


_WHOLE_MODULES = st.lists(
    st.builds(
        _whole_module,
        _MODULES,
        st.tuples(st.sampled_from([1, 3]), st.sampled_from([8, 6, 64]), st.sampled_from([8, 4, 6, 12, 64])),
        st.lists(st.sampled_from(["lora_magnitude_vector", "lora_B.bias", "weight", "bias"]), max_size=2),
    ),
    max_size=3,
).map(lambda modules: {name: shape for module in modules for name, shape in module.items()})
_CONFIGS = st.fixed_dictionaries(
    {"peft_type": st.just("LORA")},
    optional={
        "r": st.sampled_from([1, 2, 3, 4, 0, None, "3", 1 << 70]),
        "lora_alpha": st.sampled_from([0, 6, -1, 1e308, None]),
        "use_rslora": st.booleans(),
        "target_parameters": st.sampled_from([None, [], ["mlp.experts.gate_up_proj"], ["experts.down_proj", "x"]]),
        "peft_version": st.sampled_from(["0.18.1", "0.19.1", "x", ""]),
        "rank_pattern": st.dictionaries(st.text(max_size=8), st.integers(-1, 9), max_size=2),
        "alpha_pattern": st.dictionaries(st.text(max_size=8), st.floats(), max_size=2),
        "use_dora": st.booleans(),
        "lora_bias": st.booleans(),
        "modules_to_save": st.sampled_from([None, [], ["gate"], ["q_proj", "embed_tokens"], ["x"]]),
    },
)
_HINTS = st.builds(
    LayoutHints,
    swapped=st.sampled_from([None, True, False]),
    expert_rank_from_shape=st.booleans(),
    stacked_parameters=st.sampled_from([(), ("down_proj",), ("x",)]),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return model_spec(tmp_path_factory.mktemp("model"))


def _outcome(directory: Path, model: ModelSpec, options: dict[str, Any]) -> NormalForm | EpiloraError:
    try:
        with open_adapter(directory) as adapter:
            return adapter.resolve(model, **options)
    except EpiloraError as error:
        return error


def _read(files: dict[str, bytes], model: ModelSpec, **options: Any) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for name, content in files.items():
            (Path(directory) / name).write_bytes(content)
        outcome = _outcome(Path(directory), model, options)
    if isinstance(outcome, EpiloraError):
        assert outcome.reason
        assert len(outcome.message) < 20_000
        return
    for pair in outcome.pairs():
        assert pair.a.shape[0] == pair.b.shape[1] == pair.lora_rank >= 1
        for region in (pair.a, pair.b):
            assert region.tensor.offset + region.tensor.size_bytes <= sum(map(len, files.values()))


def _safetensors(tensors: dict[str, tuple[int, ...]]) -> bytes:
    entries, end = {}, 0
    for name, shape in tensors.items():
        size = 4
        for extent in shape:
            size *= extent
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + bytes(min(end, _LIMIT_BYTES))


@_SETTINGS
@given(
    tensors=st.dictionaries(_NAMES, _SHAPES, max_size=8) | st.just({}),
    modules=_WHOLE_MODULES,
    config=_CONFIGS,
    hints=_HINTS,
    allow_partial=st.booleans(),
)
def test_any_names_shapes_and_config(  # noqa: PLR0917
    model: ModelSpec,
    tensors: dict[str, tuple[int, ...]],
    modules: dict[str, tuple[int, ...]],
    config: Any,
    hints: LayoutHints,
    allow_partial: bool,
) -> None:
    weights = _safetensors(tensors | modules)
    files = {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": weights}
    _read(files, model, hints=hints, allow_partial=allow_partial)


def _changed(content: bytes, changes: list[tuple[int, int]], cut: int) -> bytes:
    changed = bytearray(content)
    for position, value in changes:
        changed[position % len(changed)] = value
    return bytes(changed[: len(changed) - cut % len(changed)])


_CHANGES = st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), max_size=6)
_CUTS = st.one_of(st.just(0), st.integers(0, 1 << 20))
_GOOD = {
    "model.layers.0.self_attn.q_proj.lora_A.weight": (3, 8),
    "model.layers.0.self_attn.q_proj.lora_B.weight": (8, 3),
}
_CONFIG = b'{"peft_type": "LORA", "r": 3, "lora_alpha": 6}'


@_SETTINGS
@given(changes=_CHANGES, cut=_CUTS)
def test_a_safetensors_file_with_wrong_bytes(model: ModelSpec, changes: list[tuple[int, int]], cut: int) -> None:
    weights = _changed(_safetensors(_GOOD), changes, cut)
    _read({"adapter_config.json": _CONFIG, "adapter_model.safetensors": weights}, model)


@_SETTINGS
@given(changes=_CHANGES, cut=_CUTS)
def test_a_config_with_wrong_bytes(model: ModelSpec, changes: list[tuple[int, int]], cut: int) -> None:
    config = _changed(_CONFIG, changes, cut)
    _read({"adapter_config.json": config, "adapter_model.safetensors": _safetensors(_GOOD)}, model)


@_SETTINGS
@given(changes=_CHANGES, cut=_CUTS)
def test_a_torch_file_with_wrong_bytes(model: ModelSpec, changes: list[tuple[int, int]], cut: int) -> None:
    torch = pytest.importorskip("torch")
    buffer = io.BytesIO()
    torch.save({name: torch.ones(shape) for name, shape in _GOOD.items()}, buffer)
    weights = _changed(buffer.getvalue(), changes, cut)
    _read({"adapter_config.json": _CONFIG, "adapter_model.bin": weights}, model)
