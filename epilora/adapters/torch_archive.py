"""Tensors of a file that torch.save wrote, found without torch and without running anything that the file says.

Such a file is a zip archive: `data.pkl` is a pickle that builds a dict of tensors, `data/0`, `data/1` ... hold their
elements, not compressed. The pickle is read by an interpreter that knows the few instructions which torch writes, and
for which the only names are those of tensors, storages and dicts; any other is an error. So the result is where each
tensor lies in the file, the same as from a safetensors header, and the elements are read from there.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from epilora.adapters.safetensors_header import is_text
from epilora.adapters.tensor_entry import FLOAT_BYTES, MAX_NAME_LENGTH, TensorEntry
from epilora.errors import AdapterFormatError

MAX_PICKLE_BYTES = 64 << 20
"""Of data.pkl; 40,000 tensors take about 6 MB."""
_LOCAL_HEADER_BYTES = 30
_STORAGES = {"FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16"}
_INSTRUCTIONS = (
    "PROTO FRAME STOP MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 "
    "LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 SETITEM "
    "SETITEMS APPEND APPENDS GLOBAL STACK_GLOBAL BINPERSID REDUCE BUILD"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Storage:
    dtype: str
    key: str
    num_elements: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tensor:
    storage: _Storage
    first: int
    """First element in the storage."""
    shape: tuple[int, ...]


class TorchArchive:
    """One file, open."""

    def __init__(self, fd: int, *, where: str, max_header_bytes: int) -> None:
        """Reads the directory of the archive and its pickle.

        Args:
            fd: of the file; stays open and the caller's.
            where: path, for messages.
            max_header_bytes: limit of either.

        Raises:
            AdapterFormatError: reason BAD_TORCH_FILE; not such an archive, or over the limit.
        """
        self._where = where
        self._reader = _Reader(fd, where, max_header_bytes)
        try:
            archive = zipfile.ZipFile(self._reader)
            self._entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if len(self._entries) != len(archive.infolist()):
                raise _error(where, "has two entries of one name, or more than one folder")
            info = self._entry("data.pkl")
            limit = min(MAX_PICKLE_BYTES, max_header_bytes)
            if info.file_size > limit:
                raise _error(where, f"has a data.pkl of {info.file_size} bytes, the limit is {limit}")
            self._check_byte_order()
            self.pickle = self._reader.at(self._start_of(info), info.file_size)
        except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, OverflowError, OSError) as error:
            raise _error(
                where, f"is not a file of torch.save in its zip form ({error}); convert it to safetensors"
            ) from error

    def tensors(self) -> list[TensorEntry]:
        """All tensors, in order of offset.

        Raises:
            AdapterFormatError: BAD_TORCH_FILE, UNSAFE_PICKLE (it names something that is no tensor),
                UNSUPPORTED_DTYPE.
        """
        found = _Interpreter(self.pickle, self._where).run()
        if not isinstance(found, Mapping):
            raise _error(self._where, f"holds {type(found).__name__}, expected a dict of tensors")
        entries = [self._tensor_entry(name, value) for name, value in found.items()]
        return sorted(entries, key=lambda entry: (entry.offset, entry.size_bytes))

    def _tensor_entry(self, name: object, tensor: object) -> TensorEntry:
        if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH or not is_text(name):
            raise _error(
                self._where, f"has the key {str(name)[:80]!r}, expected a name of {MAX_NAME_LENGTH} characters"
            )
        if not isinstance(tensor, _Tensor):
            raise _error(
                self._where, f"{name} is {type(tensor).__name__}, expected a tensor; save the state dict alone"
            )
        storage = tensor.storage
        if storage.dtype not in FLOAT_BYTES:
            raise AdapterFormatError(
                f"{self._where}: tensor {name} is a {storage.dtype}, expected one of {', '.join(_STORAGES)}",
                reason="UNSUPPORTED_DTYPE",
            )
        item, count = FLOAT_BYTES[storage.dtype], math.prod(tensor.shape)
        info = self._entry(f"data/{storage.key}")
        if info.file_size != storage.num_elements * item or tensor.first + count > storage.num_elements:
            raise _error(
                self._where,
                f"tensor {name}: elements {tensor.first} to {tensor.first + count} of a storage of "
                f"{storage.num_elements} that has {info.file_size} bytes",
            )
        return TensorEntry(
            index=-1,
            name=name,
            dtype=storage.dtype,
            shape=tensor.shape,
            offset=self._start_of(info) + tensor.first * item,
            size_bytes=count * item,
        )

    def _entry(self, name: str) -> zipfile.ZipInfo:
        info = self._entries.get(name)
        if info is None:
            raise _error(self._where, f"has no entry {name}: not a file of torch.save, or cut short")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.flag_bits & 1:
            raise _error(self._where, f"has the entry {name} compressed or encrypted; torch.save does neither")
        return info

    def _start_of(self, info: zipfile.ZipInfo) -> int:
        """First byte of an entry's content."""
        header = self._reader.at(info.header_offset, _LOCAL_HEADER_BYTES)
        if header[:4] != b"PK\x03\x04":
            raise _error(self._where, f"has no entry at byte {info.header_offset}")
        name_length, extra_length = struct.unpack("<HH", header[26:30])
        start: int = info.header_offset + _LOCAL_HEADER_BYTES + name_length + extra_length
        if start + info.file_size > self._reader.size:
            raise _error(self._where, f"is truncated: {info.filename} ends past the file's {self._reader.size} bytes")
        return start

    def _check_byte_order(self) -> None:
        info = self._entries.get("byteorder")
        if info is not None and self._reader.at(self._start_of(info), min(info.file_size, 16)) != b"little":
            raise _error(self._where, "was written on a big-endian machine")


class _Reader(io.RawIOBase):
    """Reads a descriptor at any place, never more than a limit at once."""

    def __init__(self, fd: int, where: str, limit: int) -> None:
        super().__init__()
        self._fd, self._where, self._limit = fd, where, limit
        self._position = 0
        self.size = os.fstat(fd).st_size

    def at(self, offset: int, size: int) -> bytes:
        """Bytes at a place."""
        if size > self._limit:
            raise _error(self._where, f"needs {size} bytes of directory at once, the limit is {self._limit}")
        return os.pread(self._fd, size, offset)

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        if start + offset < 0:
            raise OSError("seek to a negative offset")
        self._position = start + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        wanted = max(0, self.size - self._position) if size is None or size < 0 else size
        content = self.at(self._position, min(wanted, max(0, self.size - self._position)))
        self._position += len(content)
        return content


def _rebuild_tensor(storage: object, first: object, shape: object, stride: object, *_: object) -> _Tensor:
    """torch._utils._rebuild_tensor_v2, for tensors whose elements lie one after the other."""
    if not isinstance(storage, _Storage) or type(first) is not int or first < 0:
        raise ValueError("a tensor without a storage")
    sizes, strides = (tuple(value) if isinstance(value, tuple | list) else (None,) for value in (shape, stride))
    if len(sizes) > 8 or not all(type(size) is int and size >= 0 for size in (*sizes, *strides)):
        raise ValueError(f"a tensor of shape {str(shape)[:80]} and stride {str(stride)[:80]}")
    expected: list[int] = []
    step = 1
    for size in reversed(sizes):
        expected.insert(0, step)
        step *= size
    if any(size > 1 and got != want for size, got, want in zip(sizes, strides, expected, strict=True)):
        raise ValueError(f"a tensor of shape {sizes} with strides {strides}; save it contiguous")
    return _Tensor(storage=storage, first=first, shape=sizes)


def _rebuild_parameter(data: object, *_: object) -> object:
    """torch._utils._rebuild_parameter: the tensor in it."""
    return data


_NAMES: Mapping[tuple[str, str], Callable[..., object]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
}


class _Interpreter(pickle._Unpickler):  # type: ignore[name-defined, misc]
    """Runs the pickle. The one written in Python: its tables grow with what is put in, not with what is announced."""

    dispatch = {  # noqa: RUF012
        getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]]  # type: ignore[attr-defined]
        for name in _INSTRUCTIONS.split()
    }

    def __init__(self, content: bytes, where: str) -> None:
        super().__init__(io.BytesIO(content))
        self._where = where

    def run(self) -> object:
        """What the pickle builds."""
        try:
            return self.load()
        except AdapterFormatError:
            raise
        except Exception as error:
            raise _error(self._where, f"has a pickle that cannot be read: {type(error).__name__}: {error}") from error

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name.endswith("Storage"):
            return name
        found = _NAMES.get((module, name))
        if found is None:
            raise AdapterFormatError(
                f"{self._where} has a pickle that asks for {module[:80]}.{name[:80]}, which is no part of a tensor; it "
                "is not run. Load the file where you trust it, and save its state dict as safetensors",
                reason="UNSAFE_PICKLE",
                metadata={"name": f"{module[:80]}.{name[:80]}"},
            )
        return found

    def persistent_load(self, pid: Any) -> object:
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            raise ValueError("a persistent id that is no storage")
        _, kind, key, _, count = pid
        if not isinstance(kind, str) or not isinstance(key, str) or type(count) is not int or count < 0:
            raise ValueError("a storage of unknown form")
        return _Storage(dtype=_STORAGES.get(kind, kind), key=key, num_elements=count)


def _error(where: str, message: str) -> AdapterFormatError:
    return AdapterFormatError(f"{where} {message}", reason="BAD_TORCH_FILE")
