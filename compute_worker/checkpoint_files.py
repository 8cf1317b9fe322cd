"""The safetensors files of a checkpoint, mapped: a tensor is a view of the file's pages until it is copied."""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from epilora.errors import InvalidArgumentError, NotFoundError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """Where a tensor lies."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class CheckpointFiles:
    """All tensors of a checkpoint by key. A context manager: leaving it unmaps the files."""

    def __init__(self, directory: Path) -> None:
        """Reads the headers.

        Raises:
            NotFoundError: no safetensors files there.
            InvalidArgumentError: a file is truncated, or its header or the index is broken.
        """
        self._entries: dict[str, _Entry] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        found = _files_of(directory)
        self.identity = tuple((file.name, *_identity_of(file)) for file in found)
        """Changes when a file is replaced or written to."""
        for file in found:
            for key, entry in _read_header(file).items():
                if key in self._entries:
                    raise _broken(file, f"key {key} is in {self._entries[key].file.name}, too")
                self._entries[key] = entry

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(self, *_: object) -> None:
        # The memory goes back when the last view does; a map with views cannot be closed.
        self._maps.clear()

    def keys(self) -> list[str]:
        """All keys."""
        return list(self._entries)

    def shape(self, key: str) -> tuple[int, ...]:
        """That of one tensor."""
        return self._entries[key].shape

    def expert(self, key: str, expert: int) -> torch.Tensor:
        """A view of one expert's part of a tensor [E, ...]."""
        return self.tensor(key)[expert]

    def tensor(self, key: str) -> torch.Tensor:
        """A view of one tensor's pages; do not write to it.

        Raises:
            InvalidArgumentError: an element type that weights never have.
        """
        entry = self._entries[key]
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise _broken(entry.file, f"{key} has dtype {entry.dtype}, expected one of {', '.join(_DTYPES)}")
        if entry.file not in self._maps:
            with entry.file.open("rb") as stream:
                # A private map is writable in name, as torch wants, and never reaches the file.
                self._maps[entry.file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        count = (entry.end - entry.start) // dtype.itemsize
        if count == 0:
            return torch.empty(entry.shape, dtype=dtype)
        flat = torch.frombuffer(self._maps[entry.file], dtype=dtype, count=count, offset=entry.start)
        return flat.view(entry.shape)


def _files_of(directory: Path) -> list[Path]:
    """The weight files: those of the index where there is one."""
    index = directory / _INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise _broken(index, f"not a weight index: {error!r}") from error
        files = [directory / name for name in names]
    else:
        files = [directory / _SINGLE]
    for file in files:
        if not file.is_file() or file.parent != directory:
            raise NotFoundError(
                f"Weight file {file} does not exist; the checkpoint must hold {_SINGLE}, or {_INDEX} and its files",
                reason="WEIGHTS_NOT_FOUND",
            )
    return files


def _identity_of(file: Path) -> tuple[int, ...]:
    status = file.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _read_header(file: Path) -> dict[str, _Entry]:
    """Tensors of one file; start and end are bytes from the start of the file."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise _broken(file, f"{size} bytes, too short for a header of {length}")
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
        except ValueError as error:
            raise _broken(file, f"header is no JSON: {error}") from error
    header.pop("__metadata__", None)
    entries = {}
    for key, value in header.items():
        start, end = (8 + length + offset for offset in value["data_offsets"])
        if end > size:
            raise _broken(file, f"{key} ends at byte {end}, the file at {size}; copy it again")
        entries[key] = _Entry(file=file, dtype=value["dtype"], shape=tuple(value["shape"]), start=start, end=end)
    return entries


def _broken(file: Path, message: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{file}: {message}", reason="BAD_CHECKPOINT")
