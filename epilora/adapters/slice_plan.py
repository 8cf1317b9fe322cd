"""Which bytes of an adapter go where in the slice files of some ranks (layout: docs/slices.md).

A plan is a pure function of the normal form and the load specs. Carrying it out is copying, tensor name by tensor name,
so that all slice files are written front to back.

Legend: e local slots of a rank, r_s lora_rank of slot s (0 without a pair).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from epilora.adapters.normal_form import GridPairs, LoraPair, NormalForm, Region
from epilora.families import Projection
from epilora.load_spec import MoELayerLoadSpec
from epilora.slices import (
    SliceLayout,
    SliceMetadata,
    SliceTensor,
    dense_tensor_name,
    expert_tensor_name,
    lay_out,
    lay_out_alike,
)


class Piece(NamedTuple):
    """What one slice file has under one tensor name: matrices one after the other, row-major, without gaps.

    A tuple, since a plan has thousands.
    """

    slice_index: int
    """Position of the slice in the plan."""
    offset: int
    """First byte in the slice file."""
    size_bytes: int
    regions: Sequence[Region] = ()
    """Matrices of the adapter's file, of one dtype; empty for a constant."""
    constant: bytes = b""
    """Small values that are not in the file (lora_rank, scale)."""


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
    tensors: tuple[tuple[Piece, ...], ...]
    """By tensor name, the pieces of all slices that have it. Taken in this order, every file fills front to back."""

    @property
    def size_bytes(self) -> int:
        """Of all slice files."""
        return sum(layout.size_bytes for layout in self.layouts)


def plan_slices(form: NormalForm, specs: Sequence[SliceSpec]) -> SlicePlan:
    """Plans the slice files of some ranks."""
    known: _KnownItems = {}
    drafts = [_draft(form, spec, known) for spec in specs]
    layouts = _lay_out_all(drafts, specs)
    tensors: dict[str, list[Piece]] = {}
    for index, (draft, layout) in enumerate(zip(drafts, layouts, strict=True)):
        for item in draft:
            tensor = layout.tensors[item.tensor.name]
            piece = Piece(index, tensor.offset, tensor.size_bytes, item.regions, item.constant)
            tensors.setdefault(item.tensor.name, []).append(piece)
    # A name's place among the others is the same in every slice, but the first slice need not have all names.
    order = {name: place for place, name in enumerate(_names(form))}
    return SlicePlan(
        layouts=tuple(layouts), tensors=tuple(tuple(tensors[name]) for name in sorted(tensors, key=order.__getitem__))
    )


class _Item(NamedTuple):
    """A tensor of one slice file before it has an offset, and what it is made of."""

    tensor: SliceTensor
    regions: Sequence[Region] = ()
    constant: bytes = b""


_KnownItems = dict[tuple[int, Projection, tuple[bool, ...]], tuple[_Item, _Item, _Item, _Item]]
"""Tensors of grids, by layer, projection and which slots have a pair: most ranks have the same ones."""


def _lay_out_all(drafts: Sequence[Sequence[_Item]], specs: Sequence[SliceSpec]) -> list[SliceLayout]:
    layouts: list[SliceLayout] = []
    tensors: list[SliceTensor] = []
    for draft, spec in zip(drafts, specs, strict=True):
        before, tensors = tensors, [item.tensor for item in draft]
        alike = lay_out_alike(layouts[-1], spec.metadata) if layouts and tensors == before else None
        layouts.append(alike or lay_out(tensors, spec.metadata))
    return layouts


def _constant(name: str, dtype: str, values: Sequence[float]) -> _Item:
    raw = struct.pack(f"<{len(values)}{'i' if dtype == 'I32' else 'f'}", *values)
    return _Item(tensor=SliceTensor(name=name, dtype=dtype, shape=(len(values),)), constant=raw)


def _names(form: NormalForm) -> list[str]:
    """All names that slices of an adapter may have, in order."""
    experts = [
        expert_tensor_name(layer, projection, part)
        for layer, projection in form.experts
        for part in ("A", "B", "lora_rank", "scale", "magnitude")
    ]
    parts = ("A", "B", "scale", "magnitude", "bias")
    dense = [dense_tensor_name(module, part) for module in form.dense for part in parts]
    saved = [dense_tensor_name(module, part) for module in form.saved for part in ("weight", "weight_bias")]
    return experts + dense + saved


def _draft(form: NormalForm, spec: SliceSpec, known: _KnownItems) -> list[_Item]:
    draft: list[_Item] = []
    local_experts = {layer.moe.layer: layer.local_experts for layer in spec.layers}
    for (layer, projection), by_expert in form.experts.items():
        if isinstance(by_expert, GridPairs):
            draft += _grid_items(layer, projection, by_expert, local_experts.get(layer, ()), known)
            continue
        slots = [by_expert.get(expert) for expert in local_experts.get(layer, ())]
        if any(slots):
            draft += _expert_items(layer, projection, slots)
    for module, pair in form.dense.items():
        draft += [_whole(dense_tensor_name(module, part), region) for part, region in (("A", pair.a), ("B", pair.b))]
        draft.append(_constant(dense_tensor_name(module, "scale"), "F32", [pair.scale]))
        for part, vector in (("magnitude", pair.magnitude), ("bias", pair.bias)):
            if vector is not None:
                draft.append(_whole(dense_tensor_name(module, part), vector))
    for module, saved in form.saved.items():
        draft.append(_whole(dense_tensor_name(module, "weight"), Region.whole(saved.weight)))
        if saved.bias is not None:
            draft.append(_whole(dense_tensor_name(module, "weight_bias"), Region.whole(saved.bias)))
    return draft


def _whole(name: str, region: Region) -> _Item:
    """One matrix."""
    return _Item(tensor=SliceTensor(name=name, dtype=region.tensor.dtype, shape=region.shape), regions=(region,))


def _grid_items(
    layer: int,
    projection: Projection,
    pairs: GridPairs,
    local_experts: Sequence[int],
    known: _KnownItems,
) -> list[_Item]:
    """As _expert_items, for pairs that are all alike."""
    places = pairs.places(local_experts)
    present = [place for place in places if place >= 0]
    if not present:
        return []
    a, b = pairs.regions(present)
    first = pairs.first
    key = (layer, projection, tuple([place >= 0 for place in places]))
    items = known.get(key)
    if items is None:
        sum_rank = len(present) * first.lora_rank
        in_features, out_features = first.a.shape[1], first.b.shape[0]
        a_name, b_name, ranks_name, scales_name = (
            expert_tensor_name(layer, projection, part) for part in ("A", "B", "lora_rank", "scale")
        )
        items = known[key] = (
            _Item(SliceTensor(name=a_name, dtype=a.dtype, shape=(sum_rank, in_features))),
            _Item(SliceTensor(name=b_name, dtype=b.dtype, shape=(out_features * sum_rank,))),
            _constant(ranks_name, "I32", [0 if place < 0 else first.lora_rank for place in places]),
            _constant(scales_name, "F32", [0.0 if place < 0 else first.scale for place in places]),
        )
    a_item, b_item, ranks, scales = items
    return [_Item(a_item.tensor, a), _Item(b_item.tensor, b), ranks, scales]


def _expert_items(layer: int, projection: Projection, slots: Sequence[LoraPair | None]) -> list[_Item]:
    present = [pair for pair in slots if pair is not None]
    first = present[0]
    sum_rank = sum(pair.lora_rank for pair in present)
    in_features, out_features = first.a.shape[1], first.b.shape[0]

    def name(part: str) -> str:
        return expert_tensor_name(layer, projection, part)

    a = SliceTensor(name=name("A"), dtype=first.a.tensor.dtype, shape=(sum_rank, in_features))
    b = SliceTensor(name=name("B"), dtype=first.b.tensor.dtype, shape=(out_features * sum_rank,))
    ranks = [0 if pair is None else pair.lora_rank for pair in slots]
    scales = [0.0 if pair is None else pair.scale for pair in slots]
    magnitudes = tuple(pair.magnitude for pair in present if pair.magnitude is not None)
    assert len(magnitudes) in (0, len(present)), (layer, projection)
    items = [
        _Item(tensor=a, regions=tuple(pair.a for pair in present)),
        _Item(tensor=b, regions=tuple(pair.b for pair in present)),
        _constant(name("lora_rank"), "I32", ranks),
        _constant(name("scale"), "F32", scales),
    ]
    if magnitudes:
        shape = (len(magnitudes), out_features)
        tensor = SliceTensor(name=name("magnitude"), dtype=magnitudes[0].tensor.dtype, shape=shape)
        items.append(_Item(tensor=tensor, regions=magnitudes))
    return items
