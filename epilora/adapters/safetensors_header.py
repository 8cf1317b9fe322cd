"""A strict parser of safetensors headers. Reads the header only; a file that passes has every byte accounted for."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epilora.adapters.canonical_header import parse_canonical
from epilora.adapters.tensor_entry import FLOAT_BYTES, MAX_NAME_LENGTH, TensorEntry
from epilora.adapters.tensor_table import TensorTable
from epilora.errors import AdapterFormatError

_LFS_POINTER = b"version https://git-lfs"
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"


@dataclass(frozen=True, kw_only=True, slots=True)
class SafetensorsHeader:
    """The header of a file that was checked."""

    tensors: Sequence[TensorEntry]
    """In order of offset."""
    metadata: Mapping[str, str]
    file_bytes: int

    def dtypes(self) -> list[str]:
        """Of all tensors, in order of name."""
        if isinstance(self.tensors, TensorTable):
            return sorted({kind.dtype for kind in self.tensors.kinds})
        return sorted({tensor.dtype for tensor in self.tensors})


def read_header_bytes(fd: int, *, where: str, max_header_bytes: int) -> bytes:
    """The raw JSON of a file's header.

    Raises:
        AdapterFormatError: reason BAD_SAFETENSORS; the file is something else, or shorter than its header.
    """
    size = os.fstat(fd).st_size
    start = os.pread(fd, 64, 0)
    if start.startswith(_LFS_POINTER):
        raise _error(where, "is a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
    if start.startswith(_ZIP) or (start.startswith(_PICKLE) and b"ctorch" in os.pread(fd, 4096, 0)):
        raise _error(where, "is a PyTorch pickle that was renamed; convert it to safetensors")
    if size < 8:
        raise _error(where, f"has {size} bytes, expected at least the 8 of the header's length")
    length = int.from_bytes(start[:8], "little")
    if length > max_header_bytes:
        raise _error(where, f"says its header has {length} bytes, the limit is {max_header_bytes}")
    if length > size - 8:
        raise _error(where, f"is truncated: header of {length} bytes in a file of {size}")
    header = os.pread(fd, length, 8)
    if len(header) != length:
        raise _error(where, f"ended after {len(header)} of {length} header bytes while it was read")
    return header


def header_digest(header: bytes) -> str:
    """Identity of a header, 64 hex digits."""
    return hashlib.sha256(header).hexdigest()


def parse_header(header: bytes, *, file_bytes: int, where: str) -> SafetensorsHeader:
    """Checks a header against the size of its file.

    Every tensor has a float dtype, a size that is its shape's, and begins where the one before ends; the last
    one ends with the file.

    Args:
        header: from `read_header_bytes`.
        file_bytes: size of the file.
        where: path, for messages.

    Raises:
        AdapterFormatError: reason BAD_SAFETENSORS, or UNSUPPORTED_DTYPE.
    """
    canonical = parse_canonical(header, file_bytes)
    if canonical is not None:
        tensors, metadata = canonical
        return SafetensorsHeader(tensors=tensors, metadata=metadata, file_bytes=file_bytes)
    entries = _load(header, where)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _error(where, "has a __metadata__ that is not an object of strings")
    data_start = 8 + len(header)
    found = [_entry(name, value, data_start, where) for name, value in entries.items()]
    found.sort(key=lambda item: (item.offset, item.size_bytes))
    _check_coverage(found, data_start, file_bytes, where)
    indexed = tuple(item._replace(index=index) for index, item in enumerate(found))
    return SafetensorsHeader(tensors=indexed, metadata=metadata, file_bytes=file_bytes)


def _load(header: bytes, where: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise _error(where, f"has {twice!r} twice in its header")
        return values

    try:
        entries = json.loads(header.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _error(where, f"has a header that is not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise _error(where, f"has a header that is {type(entries).__name__}, not an object")
    return entries


def _entry(name: str, value: Any, data_start: int, where: str) -> TensorEntry:
    if len(name) > MAX_NAME_LENGTH:
        raise _error(where, f"has a tensor name of {len(name)} characters, the limit is {MAX_NAME_LENGTH}")
    if not is_text(name):
        raise _error(where, f"has the tensor name {name!r}, which is not Unicode text")
    fields: dict[str, Any] = value if isinstance(value, dict) else {}
    dtype: Any
    shape: Any
    offsets: Any
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if set(fields) != {"dtype", "shape", "data_offsets"} or not _is_sizes(shape) or not _is_sizes(offsets):
        raise _error(where, f"tensor {_short(name)}: not an entry of dtype, shape and data_offsets")
    if not isinstance(dtype, str) or dtype not in FLOAT_BYTES:
        raise AdapterFormatError(
            f"{where}: tensor {_short(name)} has dtype {_short(dtype)}, expected one of {', '.join(FLOAT_BYTES)}",
            reason="UNSUPPORTED_DTYPE",
        )
    if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * FLOAT_BYTES[dtype]:
        raise _error(where, f"tensor {_short(name)}: data_offsets {offsets} do not match shape {shape} of {dtype}")
    return TensorEntry(
        index=-1,
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        offset=data_start + offsets[0],
        size_bytes=offsets[1] - offsets[0],
    )


def _check_coverage(found: Sequence[TensorEntry], data_start: int, file_bytes: int, where: str) -> None:
    end = data_start
    for entry in found:
        if entry.offset != end:
            relation = "overlaps the one before" if entry.offset < end else "leaves a hole before it"
            raise _error(where, f"tensor {_short(entry.name)} {relation}: begins at {entry.offset}, expected {end}")
        end += entry.size_bytes
    if end > file_bytes:
        raise _error(where, f"is truncated: its tensors end at byte {end}, the file at {file_bytes}")
    if end < file_bytes:
        raise _error(where, f"has {file_bytes - end} bytes after its last tensor")


def is_text(value: str) -> bool:
    """False for strings with lone surrogates, which JSON can hold and messages cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 8 and all(type(size) is int and size >= 0 for size in value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


def _error(where: str, message: str) -> AdapterFormatError:
    return AdapterFormatError(f"{where} {message}", reason="BAD_SAFETENSORS")
