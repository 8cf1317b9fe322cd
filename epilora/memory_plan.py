"""What each rank will hold, computed from files' headers: before anything is loaded, or bought.

Legend: D hidden size, F intermediate size of an expert, r lora rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from typing import Any

from epilora.adapters.normal_form import AdapterTarget, LoraPair, NormalForm, Region
from epilora.adapters.open_adapter import open_adapter
from epilora.adapters.resolve import resolve_adapter
from epilora.adapters.safetensors_header import read_header_bytes
from epilora.errors import InvalidArgumentError
from epilora.families import GateUpLayout, ModelFamily, Projection, family_of
from epilora.model_spec import ModelSpec, MoELayerSpec, reading_model
from epilora.placement import ExpertPlacement

ELEMENT_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
_FLOAT_BYTES = 4
"""Of scales, and of what DoRA and biases of lora_B become: float32 whatever the matrices are."""
_SCALE_ENDING = "_scale_inv"
"""Of names of factors that weights in fp8 have beside them."""
_MAX_HEADER_BYTES = 512 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterBytes:
    """Bytes of one adapter on one rank."""

    name: str
    expert_bytes: int
    dense_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlan:
    """What one rank holds, without its key/value cache."""

    ep_rank: int
    num_experts: int
    """Physical experts of all layers."""
    base_expert_bytes: int
    base_dense_bytes: int
    state_bytes: int
    """States of recurrent layers, of all sequences that run at once."""
    adapters: tuple[AdapterBytes, ...]

    @property
    def total_bytes(self) -> int:
        """Of weights, states and adapters."""
        adapters = sum(adapter.expert_bytes + adapter.dense_bytes for adapter in self.adapters)
        return self.base_expert_bytes + self.base_dense_bytes + self.state_bytes + adapters


def plan_memory(
    model: ModelSpec,
    placement: ExpertPlacement,
    adapters: Mapping[str, NormalForm],
    *,
    element_bytes: int,
    num_sequences: int,
    expert_tp: int = 1,
) -> tuple[RankPlan, ...]:
    """What every rank will hold.

    Args:
        model: the model.
        placement: of its experts.
        adapters: by name; their matrices take the model's element type. Backends that compute grouped products make
            the lora ranks of a projection equal, so adapters of mixed ranks take more there.
        element_bytes: of a weight, see ELEMENT_BYTES.
        num_sequences: that run at once on each rank.
        expert_tp: ranks that share each expert; the placement's rank i is ranks expert_tp * i and those after it.

    Raises:
        InvalidArgumentError: reason EXPERT_TP; the width of an expert does not split evenly.
    """
    _check_widths(model, expert_tp)
    sequence_bytes = sum(
        layer.conv_elements * element_bytes + layer.recurrent_bytes for layer in model.recurrent_layers
    )
    dense_bytes = dense_elements(model) * element_bytes
    plans = []
    for ep_rank in range(placement.num_ranks):
        local = {moe.layer: placement.local_experts(moe.layer, ep_rank) for moe in model.moe_layers}
        elements = sum(len(local[moe.layer]) * expert_elements(moe) for moe in model.moe_layers)
        plan = RankPlan(
            ep_rank=ep_rank,
            num_experts=sum(map(len, local.values())),
            base_expert_bytes=elements // expert_tp * element_bytes,
            base_dense_bytes=dense_bytes,
            # One place is spare.
            state_bytes=(num_sequences + 1) * sequence_bytes,
            adapters=tuple(
                _adapter_bytes(name, form, local, element_bytes, expert_tp) for name, form in adapters.items()
            ),
        )
        plans += [replace(plan, ep_rank=expert_tp * ep_rank + part) for part in range(expert_tp)]
    return tuple(plans)


def _check_widths(model: ModelSpec, expert_tp: int) -> None:
    for moe in model.moe_layers:
        if moe.intermediate_size % expert_tp:
            raise InvalidArgumentError(
                f"{expert_tp} ranks cannot share the experts of layer {moe.layer}, whose width is"
                f" {moe.intermediate_size}",
                reason="EXPERT_TP",
            )


def expert_elements(moe: MoELayerSpec) -> int:
    """Weights of one expert."""
    num_matrices = 2 if moe.gate_up_layout == GateUpLayout.NOT_GATED else 3
    return num_matrices * moe.hidden_size * moe.intermediate_size


def dense_elements(model: ModelSpec) -> int:
    """Weights outside the routed experts.

    From the model's description where it has them, else from the weight files' headers. Without weight files from
    config.json, which leaves out norms and biases.

    Raises:
        AdapterFormatError: a weight file is no safetensors file.
        InvalidArgumentError: the files hold fewer weights than the experts have.
    """
    if model.dense_elements:
        return model.dense_elements
    directory = Path(model.name)
    tied = bool(json.loads((directory / "config.json").read_bytes()).get("tie_word_embeddings"))
    lm_head = _family_of(model).lm_head_path
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        return sum(d.in_features * d.out_features for d in model.dense_modules if not (tied and d.module == lm_head))
    sizes: dict[str, int] = {}
    for file in files:
        try:
            for name, entry in _header_of(file).items():
                is_weight = name != "__metadata__" and not name.endswith(_SCALE_ENDING)
                if is_weight and not (tied and name == f"{lm_head}.weight"):
                    sizes[name] = math.prod(map(index, entry["shape"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"{file} has a broken header ({error}); is the checkpoint complete?", reason="BAD_MODEL_WEIGHTS"
            ) from error
    experts = sum(moe.num_experts * expert_elements(moe) for moe in model.moe_layers)
    total = sum(sizes.values())
    if total < experts:
        raise InvalidArgumentError(
            f"{directory}: the weight files hold {total} weights, expected more than the {experts} of the experts; is"
            " the checkpoint complete?",
            reason="BAD_MODEL_WEIGHTS",
        )
    return total - experts


def element_bytes_of(model: ModelSpec, dtype: str) -> int:
    """Bytes of a weight; "auto": of config.json's dtype, float32 if it has none.

    Raises:
        InvalidArgumentError: another dtype.
    """
    if dtype == "auto":
        config = json.loads((Path(model.name) / "config.json").read_bytes())
        dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if not isinstance(dtype, str) or dtype not in ELEMENT_BYTES:
        raise InvalidArgumentError(
            f"dtype is {dtype!r}, expected auto or one of {', '.join(ELEMENT_BYTES)}", reason="BAD_DTYPE"
        )
    return ELEMENT_BYTES[dtype]


def read_adapter(directory: Path, model: ModelSpec, *, max_lora_rank: int) -> NormalForm:
    """Reads and checks an adapter's config and headers, as the loader does.

    Raises:
        NotFoundError: no such directory.
        AdapterFormatError: the loader would refuse the adapter, or a file is missing or cannot be read.
    """
    target = AdapterTarget.make(_family_of(model), model.moe_layers, model.dense_modules)
    with open_adapter(directory) as opened:
        return resolve_adapter(opened.header, opened.config(), target, max_lora_rank=max_lora_rank)


def _family_of(model: ModelSpec) -> ModelFamily:
    return family_of(model.model_type, model.moe_layers[0].gate_up_layout)


def _adapter_bytes(
    name: str, form: NormalForm, local: Mapping[int, tuple[int, ...]], element_bytes: int, expert_tp: int
) -> AdapterBytes:
    expert_bytes = 0
    for (layer, projection), by_expert in form.experts.items():
        present = [by_expert[expert] for expert in local[layer] if expert in by_expert]
        if present:
            # Each slot has a scale, and DoRA's factors, with a pair or without.
            floats = 1 + _numel(present[0].magnitude)
            is_down = projection is Projection.DOWN
            elements = sum(_part_elements(pair, is_down=is_down, expert_tp=expert_tp) for pair in present)
            expert_bytes += elements * element_bytes + len(local[layer]) * floats * _FLOAT_BYTES
    saved = [tensor for module in form.saved.values() for tensor in (module.weight, module.bias) if tensor is not None]
    elements = sum(map(_elements, form.dense.values())) + sum(math.prod(tensor.shape) for tensor in saved)
    floats = sum(_numel(pair.magnitude) + _numel(pair.bias) for pair in form.dense.values())
    dense_bytes = elements * element_bytes + floats * _FLOAT_BYTES
    return AdapterBytes(name=name, expert_bytes=expert_bytes, dense_bytes=dense_bytes)


def _part_elements(pair: LoraPair, *, is_down: bool, expert_tp: int) -> int:
    """Of a pair, one matrix is split: the one whose side is the expert's width."""
    a, b = math.prod(pair.a.shape), math.prod(pair.b.shape)
    return a // expert_tp + b if is_down else a + b // expert_tp


def _elements(pair: LoraPair) -> int:
    return math.prod(pair.a.shape) + math.prod(pair.b.shape)


def _numel(region: Region | None) -> int:
    return 0 if region is None else math.prod(region.shape)


def _header_of(file: Path) -> dict[str, Any]:
    with reading_model(file), file.open("rb") as stream:
        content = read_header_bytes(stream.fileno(), where=str(file), max_header_bytes=_MAX_HEADER_BYTES)
    header: dict[str, Any] = json.loads(content)
    return header
