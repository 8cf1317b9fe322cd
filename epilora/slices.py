"""Names and headers of slice files: what the loader writes and a worker maps (docs/slices.md).

A slice file is a plain safetensors file that holds one rank's part of one adapter. Every tensor starts at a multiple
of 64 bytes; the gaps are filled by U8 tensors named "padding.N", since the format allows no holes.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from epilora.errors import InternalError, UnavailableError
from epilora.families import Projection

LAYOUT_VERSION = 1
"""Of the contents of slice files. A cache entry of another version is not used."""
ALIGNMENT = 64
PADDING_PREFIX = "padding."
MAX_HEADER_BYTES = 256 << 20
_METADATA = "__metadata__"
_METADATA_START = b'{"__metadata__":'
_MAX_METADATA_BYTES = 4096

DTYPE_BYTES: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4, "U8": 1}
"""Bytes of an element, by safetensors' name of the dtype. No others occur in slice files."""


def expert_tensor_name(layer: int, projection: Projection, part: str) -> str:
    """Name of an expert tensor; part is "A", "B", "lora_rank", "scale" or "magnitude"."""
    return f"experts.{layer}.{projection}.{part}"


def dense_tensor_name(module: str, part: str) -> str:
    """Name of a dense module's tensor; part is "A", "B", "scale", "magnitude", "bias", "weight" or "weight_bias"."""
    return f"dense.{module}.{part}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceMetadata:
    """The `__metadata__` of a slice file. Nothing of where the adapter came from: equal slices are equal bytes."""

    layout_version: int
    model_digest: str
    placement_id: str
    ep_rank: int

    def to_strings(self) -> dict[str, str]:
        """safetensors allows strings only."""
        return {
            "layout_version": str(self.layout_version),
            "model_digest": self.model_digest,
            "placement_id": self.placement_id,
            "ep_rank": str(self.ep_rank),
        }

    @classmethod
    def from_strings(cls, values: Mapping[str, str]) -> SliceMetadata:
        """Reverse of to_strings."""
        return cls(
            layout_version=int(values["layout_version"]),
            model_digest=values["model_digest"],
            placement_id=values["placement_id"],
            ep_rank=int(values["ep_rank"]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceTensor:
    """A tensor of a slice file."""

    name: str
    dtype: str
    """safetensors' name, a key of DTYPE_BYTES."""
    shape: tuple[int, ...]
    offset: int = -1
    """First byte in the file; -1 before it was laid out."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceLayout:
    """Where everything of a slice file lies."""

    header: bytes
    """First bytes of the file, up to the first tensor: length, JSON, spaces."""
    tensors: Mapping[str, SliceTensor]
    """By name, in order of offset, without padding."""
    size_bytes: int
    """Of the whole file."""
    tensor_bytes: int
    """Of the tensors, without padding and header."""


def lay_out(tensors: Sequence[SliceTensor], metadata: SliceMetadata) -> SliceLayout:
    """Lays tensors out in the order given, each at a multiple of ALIGNMENT bytes.

    Semantics: offset[i] = align(end[i-1]); header length is padded with spaces so that the data starts aligned.
    """
    entries: dict[str, object] = {_METADATA: metadata.to_strings()}
    starts: list[int] = []
    end = 0
    for tensor in tensors:
        start = _align(end)
        if start > end:
            entries[f"{PADDING_PREFIX}{len(starts)}"] = _entry("U8", (start - end,), end, start)
        starts.append(start)
        end = start + tensor.size_bytes
        entries[tensor.name] = _entry(tensor.dtype, tensor.shape, start, end)
    header = _header_of(json.dumps(entries, separators=(",", ":")).encode())
    placed = {
        tensor.name: SliceTensor(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, offset=len(header) + start)
        for tensor, start in zip(tensors, starts, strict=True)
    }
    assert len(placed) == len(tensors), "tensor names must differ"
    return SliceLayout(
        header=header,
        tensors=placed,
        size_bytes=len(header) + end,
        tensor_bytes=sum(tensor.size_bytes for tensor in tensors),
    )


def lay_out_alike(other: SliceLayout, metadata: SliceMetadata) -> SliceLayout | None:
    """The layout of the same tensors under other metadata; None if that moves them, so that it has to be laid out.

    Slices of an adapter differ in little else, and to write a header of thousands of tensors takes a while.
    """
    text = other.header[8:].rstrip(b" ")
    start = len(_METADATA_START)
    _, end = json.JSONDecoder().raw_decode(text[:_MAX_METADATA_BYTES].decode("ascii", "ignore"), start)
    header = _header_of(text[:start] + json.dumps(metadata.to_strings(), separators=(",", ":")).encode() + text[end:])
    return replace(other, header=header) if len(header) == len(other.header) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceHeader:
    """The header of an existing slice file."""

    metadata: SliceMetadata
    tensors: Mapping[str, SliceTensor]
    """By name, in order of offset, without padding."""


def read_slice_header(path: Path) -> SliceHeader:
    """Reads the header of a slice file that a loader wrote.

    Raises:
        UnavailableError: reason SLICE_GONE; no such file.
        InternalError: reason BAD_SLICE; not a whole slice file.
    """
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise ValueError(f"{size} bytes with a header of {length}")
            entries = json.loads(stream.read(length))
        metadata = SliceMetadata.from_strings(entries.pop(_METADATA))
        tensors = {
            name: SliceTensor(
                name=name,
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                offset=8 + length + entry["data_offsets"][0],
            )
            for name, entry in entries.items()
            if not name.startswith(PADDING_PREFIX)
        }
        for tensor in tensors.values():
            if tensor.offset + tensor.size_bytes > size:
                raise ValueError(f"{tensor.name} ends past the file's {size} bytes")
    except FileNotFoundError as error:
        raise _gone(path) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InternalError(f"slice file {path} cannot be read: {error!r}", reason="BAD_SLICE") from error
    return SliceHeader(metadata=metadata, tensors=tensors)


def open_slice(path: Path) -> BinaryIO:
    """Opens a slice file for reading, with a shared lock that keeps a loader from freeing its bytes.

    The lock ends when the file and every map of it are closed, or their process has ended.

    Raises:
        UnavailableError: reason SLICE_GONE; no such file, or it is being removed.
    """
    try:
        stream = path.open("rb")
    except FileNotFoundError as error:
        raise _gone(path) from error
    try:
        fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        stream.close()
        raise _gone(path) from error
    if is_unlinked(stream):
        # Between the two calls above; the loader may have counted its bytes as free already.
        stream.close()
        raise _gone(path)
    return stream


def is_unlinked(stream: BinaryIO) -> bool:
    """True once the loader has taken the name of an open slice file away: it wants the bytes back."""
    return os.fstat(stream.fileno()).st_nlink == 0


def _gone(path: Path) -> UnavailableError:
    return UnavailableError(
        f"slice file {path} is gone: its loader was started anew, or its lease was given back; load the adapter again",
        reason="SLICE_GONE",
        retry_after_seconds=1.0,
    )


def _header_of(text: bytes) -> bytes:
    text += b" " * (_align(8 + len(text)) - 8 - len(text))
    return len(text).to_bytes(8, "little") + text


def _entry(dtype: str, shape: tuple[int, ...], start: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
