"""A strict parser of safetensors headers. Reads the header only; a file that passes has every byte accounted for."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from epilora.errors import AdapterFormatError

FLOAT_BYTES: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes of an element of the dtypes that an adapter may have."""

MAX_NAME_LENGTH = 256
"""Of a tensor. Names go into messages, and what a gRPC status can carry is small."""

_LFS_POINTER = b"version https://git-lfs"
# What safetensors writes for adapters: no spaces, no escapes, one key of metadata at most (two could be the same).
_NUMBER = r"(?:0|[1-9][0-9]{0,17})"
_CANONICAL_STRING = re.compile(r'"([^"\\\x00-\x1f]*)":"([^"\\\x00-\x1f]*)"')
_CANONICAL_START = re.compile(rf'\{{(?:"__metadata__":\{{(?P<metadata>(?:{_CANONICAL_STRING.pattern})?)\}},)?')
_CANONICAL_KIND = re.compile(rf'({"|".join(FLOAT_BYTES)})","shape":\[((?:{_NUMBER}(?:,{_NUMBER}){{0,7}})?)')
_PRINTABLE = bytes(character for character in range(0x20, 0x7F) if character != ord("\\"))
# `"name":{"dtype":"F32","shape":[3,8],"data_offsets":[0,96]},"next":` and so on: what stands between the name, the kind
# `F32","shape":[3,8` and the offsets is always the same. Each gets a mark, since no text has these characters.
_AFTER_NAME, _AFTER_KIND, _AFTER_OFFSETS = b'":{"dtype":"', b'],"data_offsets":[', b']},"'
_MARKS = (b"\x01", b"\x02", b"\x03")
_MARK = "\x01"
_MARK_ALIKE = bytes.maketrans(b"".join(_MARKS), _MARK.encode() * len(_MARKS))
_QUOTES_PER_ENTRY = 10
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"


class TensorEntry(NamedTuple):
    """A tensor of a safetensors file. A tuple, since an adapter has tens of thousands and they are made all at once."""

    index: int  # type: ignore[assignment]
    """In order of offset, from 0."""
    name: str
    dtype: str
    """A key of FLOAT_BYTES."""
    shape: tuple[int, ...]
    offset: int
    """First byte in the file."""
    size_bytes: int
    file: int = 0
    """Which of the adapter's weight files."""

    @property
    def num_columns(self) -> int:
        """Extent of the last dimension. Every tensor is read as a matrix: all dimensions before it are its rows."""
        return self.shape[-1] if self.shape else 1

    @property
    def num_rows(self) -> int:
        """Product of all dimensions but the last."""
        return math.prod(self.shape[:-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class SafetensorsHeader:
    """The header of a file that was checked."""

    tensors: tuple[TensorEntry, ...]
    """In order of offset."""
    metadata: Mapping[str, str]
    file_bytes: int


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
    canonical = _parse_canonical(header, file_bytes)
    if canonical is not None:
        return canonical
    entries = _load(header, where)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _error(where, "has a __metadata__ that is not an object of strings")
    data_start = 8 + len(header)
    found = [_entry(name, value, data_start, where) for name, value in entries.items()]
    found.sort(key=lambda item: (item.offset, item.size_bytes))
    _check_coverage(found, data_start, file_bytes, where)
    tensors = tuple(item._replace(index=index) for index, item in enumerate(found))
    return SafetensorsHeader(tensors=tensors, metadata=metadata, file_bytes=file_bytes)


def _parse_canonical(header: bytes, file_bytes: int) -> SafetensorsHeader | None:
    """The header if it is spelled as safetensors itself does and nothing is wrong with it; else None.

    A per-expert adapter has tens of thousands of tensors, and to check each with care takes longer than to copy it. So
    the text is taken apart where all entries are the same, what is left has few kinds, and the offsets are compared
    with what they have to be.
    """
    if header.translate(None, _PRINTABLE):
        return None
    start = _CANONICAL_START.match(header.decode("ascii"))
    columns = _columns_of(header[start.end() :].rstrip(b" ")) if start is not None else None
    if start is None or columns is None:
        return None
    names, kinds, spelled_offsets = columns
    matches = {kind: _CANONICAL_KIND.fullmatch(kind) for kind in set(kinds)}
    dtype_of = {kind: match[1] for kind, match in matches.items() if match}
    shape_of = {
        kind: tuple(map(int, match[2].split(","))) if match[2] else () for kind, match in matches.items() if match
    }
    if len(dtype_of) != len(matches):
        return None
    size_of = {kind: math.prod(shape) * FLOAT_BYTES[dtype_of[kind]] for kind, shape in shape_of.items()}
    sizes = list(map(size_of.__getitem__, kinds))
    # Each begins where the one before ends, and the sizes are those of the shapes.
    ends = list(itertools.accumulate(sizes))
    numbers = tuple(itertools.chain.from_iterable(zip(itertools.chain((0,), ends), ends, strict=False)))
    expected = _MARK.join(["%d,%d"] * len(ends)) % numbers
    data_start = 8 + len(header)
    if data_start + ends[-1] != file_bytes or _MARK.join(spelled_offsets) != expected:
        return None
    if len(set(names)) != len(names) or "__metadata__" in names:
        return None
    offsets = itertools.chain((data_start,), map(data_start.__add__, ends))
    dtypes, shapes = map(dtype_of.__getitem__, kinds), map(shape_of.__getitem__, kinds)
    fields = zip(itertools.count(), names, dtypes, shapes, offsets, sizes, itertools.repeat(0), strict=False)
    return SafetensorsHeader(
        # What TensorEntry._make does, without a call of Python's own for each.
        tensors=tuple(map(partial(tuple.__new__, TensorEntry), fields)),
        metadata=dict(_CANONICAL_STRING.findall(start["metadata"] or "")),
        file_bytes=file_bytes,
    )


def _columns_of(body: bytes) -> tuple[list[str], list[str], list[str]] | None:
    """(name, kind, offsets) of all entries, as spelled, from the text after the metadata.

    Example: `"a":{"dtype":"F32","shape":[3,8],"data_offsets":[0,96]}}` -> a, `F32","shape":[3,8`, `0,96`.
    """
    if body[:1] != b'"' or body[-3:] != b"]}}":
        return None
    text = body[1:-3]
    for between, mark in zip((_AFTER_NAME, _AFTER_KIND, _AFTER_OFFSETS), _MARKS, strict=True):
        text = text.replace(between, mark)
    marks = np.frombuffer(text, np.uint8)
    marks = marks[marks < 4]
    num_entries = len(marks) // 3 + 1
    in_turn = np.resize(np.array([1, 2, 3], np.uint8), 3 * num_entries - 1)
    # The quotes that are left are three in each kind, as its expression has them: so there are none in names.
    if not np.array_equal(marks, in_turn) or body.count(b'"') != num_entries * _QUOTES_PER_ENTRY:
        return None
    fields = text.translate(_MARK_ALIKE).decode("ascii").split(_MARK)
    names = fields[::3]
    lengths = set(map(len, names))
    if min(lengths) < 1 or max(lengths) > MAX_NAME_LENGTH:
        return None
    return names, fields[1::3], fields[2::3]


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
