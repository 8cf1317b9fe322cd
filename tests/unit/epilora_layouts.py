"""One adapter written in every layout that is read, with its deltas in float64 as the reference.

The adapter can be expressed in all of them: gate and up of an expert share A, which all experts share; the experts'
down projections share B. What differs by expert, layer, projection and side is drawn at random, so a swap is seen.
Experts without a gate have an up projection only.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from epilora.families import GateUpLayout
from epilora.model_spec import ModelSpec, MoELayerSpec

Tensors = dict[str, np.ndarray]
ALPHA = 6.0


@dataclass(frozen=True, kw_only=True)
class Values:
    """Matrices of one layer: a_gate_up [r, D], b_gate and b_up [E, F, r], a_down [E, r, F], b_down [D, r]."""

    a_gate_up: np.ndarray
    b_gate: np.ndarray
    b_up: np.ndarray
    a_down: np.ndarray
    b_down: np.ndarray

    @classmethod
    def draw(cls, moe: MoELayerSpec, lora_rank: int) -> Values:
        """By layer; float32 values."""
        generator = np.random.default_rng(moe.layer)
        experts, hidden, inner = moe.num_experts, moe.hidden_size, moe.intermediate_size

        def some(*shape: int) -> np.ndarray:
            return (generator.standard_normal(shape) * 0.2).astype(np.float32)

        return cls(
            a_gate_up=some(lora_rank, hidden),
            b_gate=some(experts, inner, lora_rank),
            b_up=some(experts, inner, lora_rank),
            a_down=some(experts, lora_rank, inner),
            b_down=some(hidden, lora_rank),
        )

    def b_gate_up(self, layout: GateUpLayout) -> np.ndarray:
        """[E, 2F, r] in the rows of a model."""
        if layout is GateUpLayout.NOT_GATED:
            return self.b_up
        if layout is GateUpLayout.INTERLEAVED:
            return np.stack([self.b_gate, self.b_up], axis=2).reshape(self.b_gate.shape[0], -1, self.b_gate.shape[2])
        assert layout is GateUpLayout.CONCATENATED
        return np.concatenate([self.b_gate, self.b_up], axis=1)


def reference_deltas(model: ModelSpec, lora_rank: int) -> Mapping[tuple[int, str, int], np.ndarray]:
    """(layer, "gate" | "up" | "down", expert) -> delta of the weight [out, in], float64."""
    scale, deltas = ALPHA / lora_rank, {}
    for moe in model.moe_layers:
        values = Values.draw(moe, lora_rank)
        a = values.a_gate_up.astype(np.float64)
        for expert in range(moe.num_experts):
            if _has_gate(moe):
                deltas[moe.layer, "gate", expert] = scale * values.b_gate[expert].astype(np.float64) @ a
            deltas[moe.layer, "up", expert] = scale * values.b_up[expert].astype(np.float64) @ a
            down = values.b_down.astype(np.float64) @ values.a_down[expert].astype(np.float64)
            deltas[moe.layer, "down", expert] = scale * down
    return deltas


def _has_gate(moe: MoELayerSpec) -> bool:
    return moe.gate_up_layout is not GateUpLayout.NOT_GATED


def first_name(moe: MoELayerSpec) -> str:
    """Of the stacked parameter of the first projection."""
    return "gate_up_proj" if _has_gate(moe) else "up_proj"


def _pair(module: str, a: np.ndarray, b: np.ndarray) -> Tensors:
    return {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}


def _per_expert(moe: MoELayerSpec, values: Values, names: tuple[str, str, str] = ("gate", "up", "down")) -> Tensors:
    gate, up, down = (name if name.startswith("w") else f"{name}_proj" for name in names)
    if not _has_gate(moe) and up == "w3":
        up = "w1"
    tensors: Tensors = {}
    for expert in range(moe.num_experts):
        module = f"{moe.module}.{expert}"
        if _has_gate(moe):
            tensors |= _pair(f"{module}.{gate}", values.a_gate_up, values.b_gate[expert])
        tensors |= _pair(f"{module}.{up}", values.a_gate_up, values.b_up[expert])
        tensors |= _pair(f"{module}.{down}", values.a_down[expert], values.b_down)
    return tensors


def _expert_lists(moe: MoELayerSpec, values: Values) -> Tensors:
    b_gate_up, tensors = values.b_gate_up(moe.gate_up_layout), {}
    for expert in range(moe.num_experts):
        tensors |= _pair(f"{moe.module}.{first_name(moe)}s.{expert}", values.a_gate_up, b_gate_up[expert])
        tensors |= _pair(f"{moe.module}.down_projs.{expert}", values.a_down[expert], values.b_down)
    return tensors


def _stack(a_erI: np.ndarray, b_eOr: np.ndarray, *, swapped: bool) -> tuple[np.ndarray, np.ndarray]:
    if swapped:
        a_erI, b_eOr = b_eOr.transpose(0, 2, 1), a_erI.transpose(0, 2, 1)
    a = a_erI.reshape(-1, a_erI.shape[2])
    return a, b_eOr.transpose(1, 2, 0).reshape(b_eOr.shape[1], -1)


def _all(moe: MoELayerSpec, matrix: np.ndarray) -> np.ndarray:
    return np.broadcast_to(matrix, (moe.num_experts, *matrix.shape))


def _stacked(moe: MoELayerSpec, values: Values, *, swapped: bool) -> Tensors:
    gate_up = _stack(_all(moe, values.a_gate_up), values.b_gate_up(moe.gate_up_layout), swapped=swapped)
    down = _stack(values.a_down, _all(moe, values.b_down), swapped=swapped)
    return {**_pair(f"{moe.module}.base_layer", *gate_up), **_pair(moe.module, *down)}


def _packed(moe: MoELayerSpec, values: Values) -> Tensors:
    b_gate_up = values.b_gate_up(moe.gate_up_layout)
    return {
        **_pair(f"{moe.module}.{first_name(moe)}", _all(moe, values.a_gate_up), b_gate_up),
        **_pair(f"{moe.module}.down_proj", values.a_down, _all(moe, values.b_down)),
    }


def _shared_outer(moe: MoELayerSpec, values: Values) -> Tensors:
    if not _has_gate(moe):
        # What a trainer of gated models writes for the projection that is not there.
        return {
            **_pair(f"{moe.module}.w1", values.a_gate_up[None], values.b_up),
            **_pair(f"{moe.module}.w3", np.zeros(0, np.float32), np.zeros(0, np.float32)),
            **_pair(f"{moe.module}.w2", values.a_down, values.b_down[None]),
        }
    return {
        **_pair(f"{moe.module}.w1", values.a_gate_up[None], values.b_gate),
        **_pair(f"{moe.module}.w3", values.a_gate_up[None], values.b_up),
        **_pair(f"{moe.module}.w2", values.a_down, values.b_down[None]),
    }


def _grouped(moe: MoELayerSpec, values: Values) -> Tensors:
    b_gate_up = values.b_gate_up(moe.gate_up_layout)
    module = f"base_model.model.{moe.module}"
    return {
        f"{module}.lora_gate_and_up_A": _all(moe, values.a_gate_up).transpose(0, 2, 1),
        f"{module}.lora_gate_and_up_B": b_gate_up.transpose(0, 2, 1),
        f"{module}.lora_down_A": values.a_down.transpose(0, 2, 1),
        f"{module}.lora_down_B": _all(moe, values.b_down).transpose(0, 2, 1),
    }


def _renamed(write: Callable[[MoELayerSpec, Values], Tensors], old: str, new: str) -> Callable[..., Tensors]:
    return lambda moe, values: {name.replace(old, new): array for name, array in write(moe, values).items()}


LAYOUTS: Mapping[str, tuple[str, Callable[[MoELayerSpec, Values], Tensors]]] = {
    "F1": ("per_expert", _per_expert),
    "F2a": ("target_parameters", lambda moe, values: _stacked(moe, values, swapped=False)),
    "F2b": ("target_parameters", lambda moe, values: _stacked(moe, values, swapped=True)),
    "F3": ("packed", _packed),
    "F4": ("shared_outer", _shared_outer),
    "F5": ("grouped", _grouped),
    "F6": ("per_expert", lambda moe, values: _per_expert(moe, values, ("w1", "w3", "w2"))),
    "F7": ("expert_lists", _expert_lists),
    "F9 adapter name": ("per_expert", _renamed(_per_expert, ".weight", ".default.weight")),
    "F9 no prefix": ("packed", _renamed(_packed, "base_model.model.", "")),
    "F9 no .weight": ("packed", _renamed(_packed, ".weight", "")),
    "F9 multimodal": ("grouped", _renamed(_grouped, "model.layers.", "model.language_model.layers.")),
    "F9 old multimodal": ("per_expert", _renamed(_per_expert, ".model.layers.", ".language_model.model.layers.")),
}
"""Name -> (expert_layout of the report, writer of one layer)."""


def magnitude_of(module: str, size: int) -> np.ndarray:
    """float32 [size], DoRA's of a module as the file names it; the same at each call."""
    return np.random.default_rng(zlib.crc32(module.encode())).uniform(0.5, 2, size).astype(np.float32)


def with_dora(tensors: Tensors) -> Tensors:
    """The same pairs, each with a magnitude."""
    ending = ".lora_B.weight"
    modules = {name.removesuffix(ending): array.shape[0] for name, array in tensors.items() if name.endswith(ending)}
    return tensors | {f"{name}.lora_magnitude_vector": magnitude_of(name, size) for name, size in modules.items()}


def tensors_of(model: ModelSpec, layout: str, lora_rank: int) -> tuple[Tensors, dict[str, Any]]:
    """The tensors of a layout, and what adapter_config.json has to say."""
    tensors: Tensors = {}
    for moe in model.moe_layers:
        tensors |= LAYOUTS[layout][1](moe, Values.draw(moe, lora_rank))
    changes: dict[str, Any] = {"r": lora_rank, "lora_alpha": ALPHA}
    if layout.startswith("F2"):
        first = model.moe_layers[0]
        path = first.module.split(f"layers.{first.layer}.")[1]
        changes["target_parameters"] = [f"{path}.{first_name(first)}", f"{path}.down_proj"]
        changes["peft_version"] = {"F2a": "0.21.2", "F2b": "0.18.1"}[layout]
    return {name: np.ascontiguousarray(array) for name, array in tensors.items()}, changes
