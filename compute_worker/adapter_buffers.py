"""From the views of a slice file to tensors in memory: one flat buffer of matrices, one of scales and other float32s.

Legend: e local slots, r lora rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from compute_worker.dense_lora import DensePair, DenseWeight
from compute_worker.dora import WeightSource, row_gain
from compute_worker.expert_shard import ExpertShard
from compute_worker.experts_base import LayerPairs, LoraPair
from compute_worker.slice_reader import AdapterSlice, DenseSlice, ExpertSlice, SavedSlice
from epilora.errors import InvalidArgumentError
from epilora.model_spec import GateUpLayout

if TYPE_CHECKING:
    from compute_worker.kernels.adapter_table import TableRows
    from compute_worker.kernels.dense_lora import DensePointers

Allocate = Callable[[int, torch.dtype], torch.Tensor]
"""(elements, dtype) -> flat tensor on the device."""

_FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterRows:
    """Rows of the kernels' tables, on the device: of experts by layer, and of dense modules."""

    experts: Mapping[int, TableRows]
    dense: DensePointers | None

    def tensors(self) -> list[torch.Tensor]:
        """One of each storage at least."""
        rows = [row.pointers for row in self.experts.values()]
        return [tensor for pointers in (*rows, *([self.dense] if self.dense else [])) for tensor in pointers]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterTensors:
    """An adapter as the kernels read it.

    Attributes:
        layers: pairs of the local experts, by layer.
        dense: pairs of dense modules, and what replaces their weights, by path.
        buffers: the storages all of them are views of.
        rows: what the kernels' tables will hold of it; None: they make it when they are told of the adapter.
    """

    layers: Mapping[int, LayerPairs]
    dense: Mapping[str, DensePair | DenseWeight]
    buffers: tuple[torch.Tensor, ...]
    rows: AdapterRows | None = None

    @property
    def is_plain(self) -> bool:
        """True if its dense modules have pairs and nothing else: no DoRA, no biases, no weights of their own."""
        return all(
            isinstance(pair, DensePair) and pair.gain_O is None and pair.offset_O is None
            for pair in self.dense.values()
        )

    def storage_bytes(self) -> int:
        """Bytes of the live storages."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self.buffers)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterPlan:
    """What an adapter will take.

    Attributes:
        source: views of the file.
        dtype: of the matrices in memory.
        lora_rank: rank per slot as stored in memory, one entry for each of source.experts.
        num_floats: scales, gains and offsets, which are float32 whatever the dtype.
        expert_bytes: of what experts take.
        dense_bytes: of what dense modules take.
        is_as_stored: what is in memory can be what is in the file.
    """

    source: AdapterSlice
    dtype: torch.dtype
    lora_rank: tuple[tuple[int, ...], ...]
    num_floats: int
    expert_bytes: int
    dense_bytes: int
    is_as_stored: bool

    @property
    def num_bytes(self) -> int:
        """All bytes."""
        return self.expert_bytes + self.dense_bytes


def shard_slice(source: AdapterSlice, shard: ExpertShard, layouts: Mapping[int, GateUpLayout]) -> AdapterSlice:
    """This rank's part of a slice, whose experts are whole.

    Args:
        source: of this rank's local experts.
        shard: the part.
        layouts: of gate and up, by layer.
    """
    if shard.count == 1:
        return source
    experts = []
    for part in source.experts:
        a, b = shard.pair(part.projection, layouts[part.layer], part.a, part.b, part.lora_rank)
        is_down = part.projection == "down"
        out_features = part.out_features if is_down else shard.width(part.out_features)
        assert part.magnitude is None, part.projection
        experts.append(replace(part, a=a, b=b, out_features=out_features))
    return replace(source, experts=tuple(experts))


def plan_adapter(source: AdapterSlice, *, dtype: torch.dtype | None, rank_multiple: int) -> AdapterPlan:
    """Decides ranks and bytes; see AdapterPool for the arguments."""
    tensors = [part.a for part in source.experts] + [part.a for part in source.dense]
    tensors += [part.weight for part in source.saved]
    if dtype is None:
        dtype = tensors[0].dtype if tensors else torch.float32
        for tensor in tensors:
            dtype = torch.promote_types(dtype, tensor.dtype)
    ranks = tuple(_stored_ranks(part.lora_rank, rank_multiple) for part in source.experts)
    elements = sum(
        sum(rank) * (part.a.shape[1] + part.out_features) for part, rank in zip(source.experts, ranks, strict=True)
    )
    dense_elements = sum(part.a.numel() + part.b.numel() for part in source.dense)
    saved_elements = sum(part.weight.numel() + _numel(part.bias) for part in source.saved)
    expert_floats = sum(len(part.lora_rank) * (1 + _gain_size(part)) for part in source.experts)
    dense_floats = sum(_numel(part.magnitude) + _numel(part.bias) for part in source.dense)
    return AdapterPlan(
        source=source,
        dtype=dtype,
        lora_rank=ranks,
        num_floats=expert_floats + dense_floats,
        expert_bytes=elements * dtype.itemsize + expert_floats * _FLOAT_BYTES,
        dense_bytes=(dense_elements + saved_elements) * dtype.itemsize + dense_floats * _FLOAT_BYTES,
        is_as_stored=(
            all(part.lora_rank == rank for part, rank in zip(source.experts, ranks, strict=True))
            and all(matrix.dtype == dtype for matrix in source.matrices())
            and dense_floats == 0
            and all(part.magnitude is None for part in source.experts)
        ),
    )


def _numel(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel()


def _gain_size(part: ExpertSlice) -> int:
    """Elements that a local slot's gain takes."""
    return 0 if part.magnitude is None else part.out_features


def fill_adapter(plan: AdapterPlan, allocate: Allocate, base: WeightSource) -> AdapterTensors:
    """Allocates both buffers, and copies and casts everything into them.

    Raises:
        InvalidArgumentError: reason UNSUPPORTED_ADAPTER; a bias for a module that adds none.
    """
    matrix_bytes = plan.num_bytes - plan.num_floats * _FLOAT_BYTES
    matrices = _Cursor(allocate(matrix_bytes // plan.dtype.itemsize, plan.dtype))
    floats = _Cursor(allocate(plan.num_floats, torch.float32))
    layers: dict[int, dict[str, LoraPair]] = {}
    for part, rank in zip(plan.source.experts, plan.lora_rank, strict=True):
        layers.setdefault(part.layer, {})[part.projection] = _fill_expert(part, rank, matrices, floats, base)
    dense: dict[str, DensePair | DenseWeight] = {
        part.module: _fill_dense(part, matrices, floats, base) for part in plan.source.dense
    }
    dense |= {part.module: _fill_saved(part, matrices, base) for part in plan.source.saved}
    assert matrices.is_full
    assert floats.is_full
    return AdapterTensors(layers=layers, dense=dense, buffers=(matrices.flat, floats.flat))


def keep_as_stored(source: AdapterSlice, image: torch.Tensor) -> AdapterTensors:
    """An adapter that is views of its file's bytes.

    Args:
        source: views of image.
        image: the file's bytes, on the device.
    """
    layers: dict[int, dict[str, LoraPair]] = {}
    for part in source.experts:
        layers.setdefault(part.layer, {})[part.projection] = LoraPair(
            a=part.a, b=part.b, lora_rank=part.lora_rank, scale_e=part.scale_e, out_features=part.out_features
        )
    dense: dict[str, DensePair | DenseWeight] = {
        part.module: DensePair(a=part.a, b=part.b, scale=part.scale) for part in source.dense
    }
    dense |= {part.module: DenseWeight(weight=part.weight, bias=part.bias) for part in source.saved}
    return AdapterTensors(layers=layers, dense=dense, buffers=(image,))


class _Cursor:
    """Takes consecutive parts of a flat buffer."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self._next = 0

    def take(self, source: torch.Tensor) -> torch.Tensor:
        """The next part, holding a copy of source in its shape."""
        part = self.flat[self._next : self._next + source.numel()].view(source.shape)
        self._next += source.numel()
        # The cast is done where the copy arrives: on a GPU, on the stream of the copy.
        part.copy_(source.to(part.device))
        return part

    @property
    def is_full(self) -> bool:
        return self._next == self.flat.numel()


def _fill_expert(
    part: ExpertSlice, rank: tuple[int, ...], matrices: _Cursor, floats: _Cursor, base: WeightSource
) -> LoraPair:
    a, b = (part.a, part.b) if rank == part.lora_rank else _padded(part, rank[0])
    return LoraPair(
        a=matrices.take(a),
        b=matrices.take(b),
        lora_rank=rank,
        scale_e=floats.take(part.scale_e),
        out_features=part.out_features,
        gain_eO=None if part.magnitude is None else floats.take(_expert_gain(part, part.magnitude, base)),
    )


def _expert_gain(part: ExpertSlice, magnitude: torch.Tensor, base: WeightSource) -> torch.Tensor:
    """float32 [e, out] of DoRA; 1 for slots without a pair."""
    gain_eO = torch.ones((len(part.lora_rank), part.out_features))
    first = present = 0
    for slot, rank in enumerate(part.lora_rank):
        if rank == 0:
            continue
        block = part.b[part.out_features * first : part.out_features * (first + rank)]
        gain_eO[slot] = row_gain(
            base.expert(part.layer, part.projection, part.local_experts[slot]),
            part.a[first : first + rank],
            block.view(part.out_features, rank),
            float(part.scale_e[slot]),
            magnitude[present],
        )
        first, present = first + rank, present + 1
    return gain_eO


def _fill_dense(part: DenseSlice, matrices: _Cursor, floats: _Cursor, base: WeightSource) -> DensePair:
    gain = None
    if part.magnitude is not None:
        gain = row_gain(base.dense(part.module), part.a, part.b, part.scale, part.magnitude)
    return DensePair(
        a=matrices.take(part.a),
        b=matrices.take(part.b),
        scale=part.scale,
        gain_O=None if gain is None else floats.take(gain),
        offset_O=None if part.bias is None else floats.take(part.bias.float() * part.scale),
    )


def _fill_saved(part: SavedSlice, matrices: _Cursor, base: WeightSource) -> DenseWeight:
    if part.bias is not None and not base.has_bias(part.module):
        raise InvalidArgumentError(
            f"the adapter holds a bias for {part.module}, which has none in this model; it was trained on another one",
            reason="UNSUPPORTED_ADAPTER",
        )
    bias = None if part.bias is None else matrices.take(part.bias)
    return DenseWeight(weight=matrices.take(part.weight), bias=bias)


def _stored_ranks(lora_rank: tuple[int, ...], multiple: int) -> tuple[int, ...]:
    """The same rank for all slots, a multiple of `multiple`; as they are for 0. Example: (3, 0), 8 -> (8, 8)."""
    if multiple == 0:
        return lora_rank
    largest = -(-max(lora_rank, default=0) // multiple) * multiple
    return (largest,) * len(lora_rank)


def _padded(part: ExpertSlice, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks widened to `rank` with zeros, which add nothing."""
    num_slots = len(part.lora_rank)
    a = part.a.new_zeros((num_slots, rank, part.a.shape[1]))
    b = part.b.new_zeros((num_slots, part.out_features, rank))
    first = 0
    for slot, own in enumerate(part.lora_rank):
        a[slot, :own] = part.a[first : first + own]
        block = part.b[part.out_features * first : part.out_features * (first + own)]
        b[slot, :, :own] = block.view(part.out_features, own)
        first += own
    return a.flatten(0, 1), b.flatten()
