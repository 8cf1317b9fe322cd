"""Merging an adapter into transformers' model, through the normal form: the oracle of the parsing tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from epilora.adapters.normal_form import NormalForm
from epilora.families import Projection
from epilora.model_spec import ModelSpec
from tests.unit.epilora_adapters import AdapterArrays, resolve


def load_model(directory: Path) -> Any:
    """The model in float32. Eager experts: the default path refuses the widths of tiny models."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager"
    )


@torch.no_grad()
def merged_model(directory: Path, adapter: Path) -> tuple[Any, NormalForm]:
    """The model with every delta added to its weights."""
    spec = ModelSpec.from_directory(directory)
    form, arrays = resolve(adapter, spec), AdapterArrays(adapter)
    model = load_model(directory)
    modules = dict(model.named_modules())
    for module, pair in form.dense.items():
        delta = torch.from_numpy(arrays.delta(pair)).float()
        modules[module].weight += delta.t() if isinstance(modules[module], torch.nn.Embedding) else delta
    layers = {layer.layer: layer for layer in spec.moe_layers}
    for (layer, projection), by_expert in form.experts.items():
        experts, inner = modules[layers[layer].module], layers[layer].intermediate_size
        rows = {Projection.GATE: slice(0, inner), Projection.UP: slice(inner, None)}.get(projection, slice(None))
        weight = experts.down_proj if projection is Projection.DOWN else experts.gate_up_proj
        for expert, pair in by_expert.items():
            weight[expert, rows] += torch.from_numpy(arrays.delta(pair)).float()
    return model, form
