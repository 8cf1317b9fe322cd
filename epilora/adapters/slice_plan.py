"""Which bytes of an adapter go where in the slice files of some ranks (layout: docs/slices.md).

A plan is a pure function of the normal form and the load specs. Carrying it out is copying: every tensor of the file
that any of the ranks needs is read once, and its parts go to all places that want them.

Legend: e local slots of a rank, r_s lora_rank of slot s (0 without a pair).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from epilora.adapters.normal_form import LoraPair, NormalForm, Region
from epilora.families import Projection
from epilora.load_spec import MoELayerLoadSpec
from epilora.slices import (
    SliceLayout,
    SliceMetadata,
    SliceTensor,
    dense_tensor_name,
    expert_tensor_name,
    lay_out,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """One matrix to one place."""

    region: Region
    slice_index: int
    """Position of the slice in the plan."""
    offset: int
    """First byte in the slice file; the matrix lies there row-major, without gaps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceSpec:
    """What to build for one rank."""

    layers: tuple[MoELayerLoadSpec, ...]
    metadata: SliceMetadata


@dataclass(frozen=True, kw_only=True, slots=True)
class SlicePlan:
    """How to build the slice files of some ranks."""

    layouts: tuple[SliceLayout, ...]
    """One per slice, in the order of the specs."""
    constants: tuple[Mapping[int, bytes], ...]
    """Per slice: offset -> small values that are not in the file (lora_rank, scale)."""
    copies: Mapping[int, Sequence[Copy]]
    """Index of a tensor of the file -> where its parts go; in order of index. Tensors that no rank needs are absent."""

    @property
    def size_bytes(self) -> int:
        """Of all slice files."""
        return sum(layout.size_bytes for layout in self.layouts)


def plan_slices(form: NormalForm, specs: Sequence[SliceSpec]) -> SlicePlan:
    """Plans the slice files of some ranks."""
    drafts = [_draft(form, spec) for spec in specs]
    layouts = tuple(lay_out(draft.tensors, spec.metadata) for draft, spec in zip(drafts, specs, strict=True))
    copies: dict[int, list[Copy]] = {}
    for index, (draft, layout) in enumerate(zip(drafts, layouts, strict=True)):
        for name, relative, region in draft.parts:
            copy = Copy(region=region, slice_index=index, offset=layout.tensors[name].offset + relative)
            copies.setdefault(region.tensor.index, []).append(copy)
    constants = tuple(
        {layout.tensors[name].offset: value for name, value in draft.constants.items()}
        for draft, layout in zip(drafts, layouts, strict=True)
    )
    return SlicePlan(layouts=layouts, constants=constants, copies={index: copies[index] for index in sorted(copies)})


class _Draft:
    """Tensors of one slice file before they have offsets."""

    def __init__(self) -> None:
        self.tensors: list[SliceTensor] = []
        self.constants: dict[str, bytes] = {}
        self.parts: list[tuple[str, int, Region]] = []
        """(tensor, offset inside it in bytes, matrix)."""

    def add(self, name: str, dtype: str, shape: tuple[int, ...], regions: Sequence[Region]) -> None:
        """A tensor made of matrices, one after the other."""
        self.tensors.append(SliceTensor(name=name, dtype=dtype, shape=shape))
        end = 0
        for region in regions:
            self.parts.append((name, end, region))
            end += region.size_bytes
        assert end == self.tensors[-1].size_bytes, (name, end, self.tensors[-1])

    def add_constant(self, name: str, dtype: str, values: Sequence[float]) -> None:
        """A small vector."""
        self.tensors.append(SliceTensor(name=name, dtype=dtype, shape=(len(values),)))
        self.constants[name] = np.array(values, dtype={"I32": "<i4", "F32": "<f4"}[dtype]).tobytes()


def _draft(form: NormalForm, spec: SliceSpec) -> _Draft:
    draft = _Draft()
    local_experts = {layer.moe.layer: layer.local_experts for layer in spec.layers}
    for (layer, projection), by_expert in form.experts.items():
        slots = [by_expert.get(expert) for expert in local_experts.get(layer, ())]
        if any(slots):
            _add_experts(draft, layer, projection, slots)
    for module, pair in form.dense.items():
        for part, region in (("A", pair.a), ("B", pair.b)):
            draft.add(dense_tensor_name(module, part), region.tensor.dtype, region.shape, [region])
        draft.add_constant(dense_tensor_name(module, "scale"), "F32", [pair.scale])
    return draft


def _add_experts(draft: _Draft, layer: int, projection: Projection, slots: Sequence[LoraPair | None]) -> None:
    present = [pair for pair in slots if pair is not None]
    first = present[0]
    sum_rank = sum(pair.lora_rank for pair in present)
    in_features, out_features = first.a.shape[1], first.b.shape[0]
    draft.add(
        expert_tensor_name(layer, projection, "A"),
        first.a.tensor.dtype,
        (sum_rank, in_features),
        [pair.a for pair in present],
    )
    draft.add(
        expert_tensor_name(layer, projection, "B"),
        first.b.tensor.dtype,
        (out_features * sum_rank,),
        [pair.b for pair in present],
    )
    ranks = [0 if pair is None else pair.lora_rank for pair in slots]
    scales = [0.0 if pair is None else pair.scale for pair in slots]
    draft.add_constant(expert_tensor_name(layer, projection, "lora_rank"), "I32", ranks)
    draft.add_constant(expert_tensor_name(layer, projection, "scale"), "F32", scales)
