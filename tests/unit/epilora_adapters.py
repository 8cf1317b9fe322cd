"""Reading adapters in tests: files -> normal form -> plain arrays."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from epilora.adapters.layout_hints import NO_HINTS, LayoutHints
from epilora.adapters.normal_form import AdapterTarget, LoraPair, NormalForm, Region
from epilora.adapters.peft_config import parse_peft_config
from epilora.adapters.resolve import resolve_adapter
from epilora.adapters.safetensors_header import parse_header
from epilora.families import family_of
from epilora.model_spec import ModelSpec

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 3, "lora_alpha": 6}


def target_of(model: ModelSpec) -> AdapterTarget:
    """What adapters for a model have to fit."""
    family = family_of(model.model_type, model.moe_layers[0].gate_up_layout)
    return AdapterTarget.make(family, model.moe_layers, model.dense_modules)


def write_adapter(path: Path, tensors: Mapping[str, np.ndarray], **changes: Any) -> Path:
    """Writes an adapter's directory: CONFIG with changes (None drops a key), and the tensors."""
    path.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {name: np.ascontiguousarray(array) for name, array in tensors.items()}, path / "adapter_model.safetensors"
    )
    return path


def resolve(
    path: Path,
    model: ModelSpec,
    *,
    max_lora_rank: int = 64,
    allow_partial: bool = False,
    hints: LayoutHints = NO_HINTS,
) -> NormalForm:
    """The normal form of an adapter's directory."""
    weights = (path / "adapter_model.safetensors").read_bytes()
    length = int.from_bytes(weights[:8], "little")
    return resolve_adapter(
        parse_header(weights[8 : 8 + length], file_bytes=len(weights), where="adapter_model.safetensors"),
        parse_peft_config((path / "adapter_config.json").read_bytes()),
        target_of(model),
        max_lora_rank=max_lora_rank,
        allow_partial=allow_partial,
        hints=hints,
    )


class AdapterArrays:
    """The matrices of a normal form, as float64."""

    def __init__(self, path: Path) -> None:
        self._weights = (path / "adapter_model.safetensors").read_bytes()

    def matrix(self, region: Region) -> np.ndarray:
        tensor = region.tensor
        raw = self._weights[tensor.offset : tensor.offset + tensor.size_bytes]
        if tensor.dtype == "BF16":
            values = (np.frombuffer(raw, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(raw, dtype={"F32": "<f4", "F16": "<f2"}[tensor.dtype])
        matrix = region.view(values.reshape(tensor.num_rows, tensor.num_columns)).astype(np.float64)
        assert matrix.shape == region.shape
        return matrix

    def delta(self, pair: LoraPair) -> np.ndarray:
        """[out, in]: scale * B @ A."""
        a, b = self.matrix(pair.a), self.matrix(pair.b)
        assert a.shape[0] == b.shape[1] == pair.lora_rank
        return pair.scale * (b @ a)
