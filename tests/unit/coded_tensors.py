"""Arrays of small adapters whose values say what they are, by the names that PEFT gives them.

For models of 2 layers, E = 4, D = 8, F = 6; r = 3, so that a wrong axis fails by shape.
"""

from __future__ import annotations

import numpy as np

from epilora.families import Projection
from epilora.model_spec import ModelSpec

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


def lora_a(model: ModelSpec, layer: int, expert: int, projection: Projection, rank: int = R) -> np.ndarray:
    """A of one expert, float32 [rank, in]."""
    return _code(layer, expert, projection, 0, (rank, _sizes(model, projection)[0]))


def lora_b(model: ModelSpec, layer: int, expert: int, projection: Projection, rank: int = R) -> np.ndarray:
    """B of one expert, float32 [out, rank]."""
    return _code(layer, expert, projection, 1, (_sizes(model, projection)[1], rank))


def per_expert(model: ModelSpec, names: dict[str, Projection], experts: str = EXPERTS) -> Tensors:
    """A pair for each expert and projection, `names` being how the file calls the projections."""
    tensors = {}
    for layer in LAYERS:
        for expert in range(E):
            for name, projection in names.items():
                module = f"{PREFIX}{experts.format(layer)}.{expert}.{name}"
                tensors[f"{module}.lora_A.weight"] = lora_a(model, layer, expert, projection)
                tensors[f"{module}.lora_B.weight"] = lora_b(model, layer, expert, projection)
    return tensors


def _stack(model: ModelSpec, layer: int, projection: Projection, swapped: bool, rank: int) -> tuple[np.ndarray, ...]:
    """A [E*r, in] and B [out, r*E]; swapped: A holds the transposed B blocks, and B the transposed A blocks."""
    a = [lora_a(model, layer, expert, projection, rank) for expert in range(E)]
    b = [lora_b(model, layer, expert, projection, rank) for expert in range(E)]
    if swapped:
        a, b = [block.T for block in b], [block.T for block in a]
    return np.concatenate(a), np.stack(b, axis=2).reshape(b[0].shape[0], -1)


def stacked(model: ModelSpec, wrappers: dict[str, Projection], *, swapped: bool, rank: int = R) -> Tensors:
    """A pair for each stacked parameter, `wrappers` being where PEFT puts it; see `_stack`."""
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


def dense(module: str, in_features: int, out_features: int, rank: int = R) -> Tensors:
    """The pair of a linear module, all ones."""
    return {
        f"{PREFIX}{module}.lora_A.weight": np.ones((rank, in_features), np.float32),
        f"{PREFIX}{module}.lora_B.weight": np.ones((out_features, rank), np.float32),
    }


Q = "model.layers.0.self_attn.q_proj"
GOOD = dense(Q, 8, 8)
"""A pair that fits."""
A, B = GOOD
