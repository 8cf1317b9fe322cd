"""From an adapter's directory to a rank's slice file, by the loader's own reading, planning and writing."""

from __future__ import annotations

import os
from pathlib import Path

from epilora.adapters.layout_hints import NO_HINTS, LayoutHints
from epilora.adapters.normal_form import AdapterTarget, NormalForm
from epilora.adapters.peft_config import parse_peft_config
from epilora.adapters.resolve import resolve_adapter
from epilora.adapters.safetensors_header import parse_header
from epilora.adapters.slice_plan import SliceSpec, plan_slices
from epilora.families import family_of
from epilora.load_spec import MoEEPLoadSpec
from epilora.model_spec import ModelSpec
from epilora.slices import LAYOUT_VERSION, SliceMetadata
from loader_service.writer import BuildProgress, write_slices


def read_adapter(directory: Path, spec: ModelSpec, *, hints: LayoutHints = NO_HINTS) -> NormalForm:
    """The normal form of an adapter for a model."""
    weights = (directory / "adapter_model.safetensors").read_bytes()
    length = int.from_bytes(weights[:8], "little")
    target = AdapterTarget.make(
        family_of(spec.model_type, spec.moe_layers[0].gate_up_layout), spec.moe_layers, spec.dense_modules
    )
    return resolve_adapter(
        parse_header(weights[8 : 8 + length], file_bytes=len(weights), where=str(directory)),
        parse_peft_config((directory / "adapter_config.json").read_bytes()),
        target,
        max_lora_rank=64,
        hints=hints,
    )


def write_adapter_slice(
    directory: Path, spec: ModelSpec, load_spec: MoEEPLoadSpec, path: Path, *, hints: LayoutHints = NO_HINTS
) -> Path:
    """The slice file of one rank."""
    metadata = SliceMetadata(
        layout_version=LAYOUT_VERSION,
        model_digest=load_spec.model_digest,
        placement_id=load_spec.placement_id,
        ep_rank=load_spec.ep_rank,
    )
    form = read_adapter(directory, spec, hints=hints)
    plan = plan_slices(form, [SliceSpec(layers=load_spec.layers, metadata=metadata)])
    descriptor = os.open(directory / "adapter_model.safetensors", os.O_RDONLY)
    try:
        write_slices(plan, [descriptor], [path], BuildProgress())
    finally:
        os.close(descriptor)
    return path
