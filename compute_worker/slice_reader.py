"""One adapter's slice file, mapped and checked against what this rank holds.

Legend: e local slots of a layer, r lora rank.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from epilora.errors import InternalError, InvalidArgumentError, StalePlacementError
from epilora.families import GateUpLayout, Projection
from epilora.load_spec import MoEEPLoadSpec, MoELayerLoadSpec
from epilora.model_spec import DenseModuleSpec
from epilora.slices import (
    ALIGNMENT,
    LAYOUT_VERSION,
    SliceHeader,
    SliceTensor,
    dense_tensor_name,
    expert_tensor_name,
    open_slice,
    read_slice_header,
)

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32}
_WEIGHT_DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSlice:
    """One projection of one layer, as views of the file.

    Attributes:
        a: [sum of lora_rank, in].
        b: [out * sum of lora_rank].
        lora_rank: per local slot.
        scale_e: float32 [e].
        out_features: rows of each block of b.
        local_experts: logical expert of each slot.
        magnitude: [slots with a pair, out], DoRA's; None without.
    """

    layer: int
    projection: str
    a: torch.Tensor
    b: torch.Tensor
    lora_rank: tuple[int, ...]
    scale_e: torch.Tensor
    out_features: int
    local_experts: tuple[int, ...]
    magnitude: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseSlice:
    """One dense module, as views of the file: a [r, in], b [out, r]; [out] DoRA's magnitude and lora_B's bias."""

    module: str
    a: torch.Tensor
    b: torch.Tensor
    scale: float
    magnitude: torch.Tensor | None = None
    bias: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedSlice:
    """What replaces a dense module's weight [out, in] (an embedding's: [in, out]) and bias [out], as views."""

    module: str
    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSlice:
    """What one slice file holds."""

    experts: tuple[ExpertSlice, ...]
    dense: tuple[DenseSlice, ...]
    saved: tuple[SavedSlice, ...]

    def matrices(self) -> list[torch.Tensor]:
        """A, B and weights of all modules, and biases that replace a module's."""
        pairs = [matrix for part in self.experts for matrix in (part.a, part.b)]
        pairs += [matrix for part in self.dense for matrix in (part.a, part.b)]
        weights = [tensor for part in self.saved for tensor in (part.weight, part.bias) if tensor is not None]
        return pairs + weights


def views_of(source: AdapterSlice, image: torch.Tensor) -> AdapterSlice:
    """The same tensors, as views of another copy of the file's bytes.

    Args:
        source: of `read_slice`.
        image: uint8 [a multiple of 4], at least the file's bytes, anywhere.
    """
    typed = {dtype: image.view(dtype) for dtype in _DTYPES.values()}

    def view(tensor: torch.Tensor) -> torch.Tensor:
        return typed[tensor.dtype].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def view_any(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else view(tensor)

    return AdapterSlice(
        experts=tuple(
            replace(
                part, a=view(part.a), b=view(part.b), scale_e=view(part.scale_e), magnitude=view_any(part.magnitude)
            )
            for part in source.experts
        ),
        dense=tuple(
            replace(part, a=view(part.a), b=view(part.b), magnitude=view_any(part.magnitude), bias=view_any(part.bias))
            for part in source.dense
        ),
        saved=tuple(replace(part, weight=view(part.weight), bias=view_any(part.bias)) for part in source.saved),
    )


def read_slice(
    path: Path, *, placement_id: str, load_spec: MoEEPLoadSpec, dense_modules: Mapping[str, DenseModuleSpec]
) -> AdapterSlice:
    """Maps a slice file; the tensors are views of its pages.

    Args:
        path: the file.
        placement_id: what the sender says it was built for.
        load_spec: of this rank.
        dense_modules: of this model, by path.

    Raises:
        StalePlacementError: built for another placement, rank or model than this worker's.
        UnavailableError: the file is gone (SLICE_GONE).
        InternalError: not a slice file, or one with tensors that do not belong there (BAD_SLICE).
    """
    header = read_slice_header(path)
    _check_metadata(path, header, placement_id, load_spec)
    reader = _Reader(path, header)
    experts = []
    for layer in load_spec.layers:
        for projection in Projection:
            if expert_tensor_name(layer.moe.layer, projection, "A") in header.tensors:
                experts.append(_expert(reader, layer, projection))
    dense = [
        _dense(reader, spec)
        for module, spec in dense_modules.items()
        if dense_tensor_name(module, "A") in header.tensors
    ]
    saved = [
        _saved(reader, spec)
        for module, spec in dense_modules.items()
        if dense_tensor_name(module, "weight") in header.tensors
    ]
    reader.check_consumed()
    return AdapterSlice(experts=tuple(experts), dense=tuple(dense), saved=tuple(saved))


def _check_metadata(path: Path, header: SliceHeader, placement_id: str, load_spec: MoEEPLoadSpec) -> None:
    metadata = header.metadata
    if metadata.layout_version != LAYOUT_VERSION:
        raise InvalidArgumentError(
            f"{path} has slice layout version {metadata.layout_version}, expected {LAYOUT_VERSION}; loader and worker"
            " must be of one release",
            reason="SLICE_VERSION",
        )
    pairs = [
        ("placement_id", placement_id, load_spec.placement_id),
        ("placement_id", metadata.placement_id, load_spec.placement_id),
        ("model_digest", metadata.model_digest, load_spec.model_digest),
        ("ep_rank", metadata.ep_rank, load_spec.ep_rank),
    ]
    for name, got, expected in pairs:
        if got != expected:
            raise StalePlacementError(
                f"Slice {path} was built for {name} {got}, expected {expected}; build it for this worker's load spec",
                reason="STALE_PLACEMENT",
                metadata={"name": name, "got": got, "expected": expected},
            )


class _Reader:
    """Takes tensors out of the mapped file and notes which were taken."""

    def __init__(self, path: Path, header: SliceHeader) -> None:
        self._path = path
        self._header = header
        self._left = set(header.tensors)
        with open_slice(path) as stream:
            # A private map is writable in name, as torch wants, and never reaches the file.
            pages = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        self._typed = {
            dtype: torch.frombuffer(pages, dtype=dtype, count=len(pages) // dtype.itemsize)
            for dtype in _DTYPES.values()
        }

    def error(self, message: str) -> InternalError:
        return InternalError(f"slice file {self._path}: {message}", reason="BAD_SLICE")

    def take(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = _WEIGHT_DTYPES) -> torch.Tensor:
        """A tensor that must have this shape."""
        tensor = self._header.tensors.get(name)
        if tensor is None:
            raise self.error(f"{name} is missing")
        if tensor.shape != shape or tensor.dtype not in dtypes:
            raise self.error(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {'/'.join(dtypes)} {list(shape)}"
            )
        self._left.discard(name)
        return self._view(tensor)

    def _view(self, tensor: SliceTensor) -> torch.Tensor:
        dtype = _DTYPES[tensor.dtype]
        if tensor.offset % dtype.itemsize:
            raise self.error(f"{tensor.name} begins at byte {tensor.offset}, expected a multiple of {ALIGNMENT}")
        strides = [math.prod(tensor.shape[place + 1 :]) for place in range(len(tensor.shape))]
        return self._typed[dtype].as_strided(tensor.shape, strides, tensor.offset // dtype.itemsize)

    def vector(self, name: str, size: int) -> torch.Tensor | None:
        """A tensor [1, size] as [size]; None if it is missing."""
        return self.take(name, (1, size)).flatten() if name in self._header.tensors else None

    def rows(self, name: str) -> int:
        """First extent of a tensor; 0 if it is missing."""
        tensor = self._header.tensors.get(name)
        return tensor.shape[0] if tensor is not None and tensor.shape else 0

    def check_consumed(self) -> None:
        """Raises if a tensor was not taken."""
        if self._left:
            names = sorted(self._left)
            raise self.error(f"{len(names)} tensors have no place in this model: {', '.join(names[:8])}")


def _expert(reader: _Reader, layer: MoELayerLoadSpec, projection: Projection) -> ExpertSlice:
    moe, num_slots = layer.moe, len(layer.local_experts)
    in_features, out_features = moe.hidden_size, moe.intermediate_size
    if projection is Projection.DOWN:
        in_features, out_features = out_features, in_features
    elif projection is Projection.GATE_UP and moe.gate_up_layout != GateUpLayout.NOT_GATED:
        out_features *= 2

    def name(part: str) -> str:
        return expert_tensor_name(moe.layer, projection, part)

    lora_rank = tuple(reader.take(name("lora_rank"), (num_slots,), ("I32",)).tolist())
    if any(rank < 0 for rank in lora_rank):
        raise reader.error(f"{name('lora_rank')} holds {min(lora_rank)}")
    total = sum(lora_rank)
    present = sum(rank > 0 for rank in lora_rank)
    has_magnitude = reader.rows(name("magnitude")) > 0
    return ExpertSlice(
        layer=moe.layer,
        projection=projection.value,
        a=reader.take(name("A"), (total, in_features)),
        b=reader.take(name("B"), (out_features * total,)),
        lora_rank=lora_rank,
        scale_e=reader.take(name("scale"), (num_slots,), ("F32",)),
        out_features=out_features,
        local_experts=layer.local_experts,
        magnitude=reader.take(name("magnitude"), (present, out_features)) if has_magnitude else None,
    )


def _dense(reader: _Reader, spec: DenseModuleSpec) -> DenseSlice:
    def name(part: str) -> str:
        return dense_tensor_name(spec.module, part)

    rank = reader.rows(name("A"))
    return DenseSlice(
        module=spec.module,
        a=reader.take(name("A"), (rank, spec.in_features)),
        b=reader.take(name("B"), (spec.out_features, rank)),
        scale=float(reader.take(name("scale"), (1,), ("F32",)).item()),
        magnitude=reader.vector(name("magnitude"), spec.out_features),
        bias=reader.vector(name("bias"), spec.out_features),
    )


def _saved(reader: _Reader, spec: DenseModuleSpec) -> SavedSlice:
    name = dense_tensor_name(spec.module, "weight")
    # An embedding's weight is [vocabulary, D], that is [in, out].
    is_linear = reader.rows(name) == spec.out_features
    sizes = (spec.out_features, spec.in_features) if is_linear else (spec.in_features, spec.out_features)
    return SavedSlice(
        module=spec.module,
        weight=reader.take(name, sizes),
        bias=reader.vector(dense_tensor_name(spec.module, "weight_bias"), spec.out_features),
    )
