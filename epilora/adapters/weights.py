"""The weight files of an adapter, open: one safetensors file, the shards of one, or one file of torch.save."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from epilora.adapters.safetensors_header import (
    SafetensorsHeader,
    header_digest,
    parse_header,
    read_header_bytes,
)
from epilora.adapters.tensor_entry import TensorEntry
from epilora.adapters.torch_archive import TorchArchive
from epilora.errors import AdapterFormatError

OpenFile = Callable[[Path], int | None]
"""Opens a file for reading: a descriptor, or None if there is no such file."""

WEIGHTS_NAME = "adapter_model.safetensors"
INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
TORCH_NAMES = ("adapter_model.bin", "adapter_model.pt")
_SHARD = re.compile(r"adapter_model-(\d{5})-of-(\d{5})\.safetensors")
_MAX_FILES = 1024
_MAX_INDEX_BYTES = 64 << 20
_FIELD = "source"
STAT_NUMBERS = 5
"""Numbers of each file in `AdapterWeights.stat`; the first is its device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    """One of the files."""

    fd: int
    where: str
    """Path, for messages."""
    directory: bytes
    """What of it says where its tensors are: the safetensors header, or the pickle."""
    archive: TorchArchive | None
    stat: tuple[int, ...]

    def tensors(self) -> SafetensorsHeader:
        size = self.stat[2]
        if self.archive is None:
            return parse_header(self.directory, file_bytes=size, where=self.where)
        return SafetensorsHeader(tensors=tuple(self.archive.tensors()), metadata={}, file_bytes=size)


class AdapterWeights:
    """See the module. Use as a context manager, which closes the files."""

    def __init__(self, files: tuple[_File, ...], weight_map: Mapping[str, str] | None) -> None:
        self._files = files
        self._weight_map = weight_map
        self.file_bytes = sum(file.stat[2] for file in files)

    @classmethod
    def open(cls, directory: Path, open_file: OpenFile, *, max_header_bytes: int) -> AdapterWeights:
        """Opens what a directory holds, and reads headers only.

        Args:
            directory: of the adapter.
            open_file: opens a file of it.
            max_header_bytes: limit of each header.

        Raises:
            AdapterFormatError: NO_ADAPTER_WEIGHTS, BAD_INDEX, BAD_SAFETENSORS, BAD_TORCH_FILE.
        """
        paths, weight_map = _weight_files(directory, open_file)
        with ExitStack() as stack:
            files = []
            for path in paths:
                fd = open_file(path)
                if fd is None:
                    raise AdapterFormatError(
                        f"{directory} has no {path.name}, one of the {len(paths)} files of its weights",
                        reason="NO_ADAPTER_WEIGHTS",
                        field=_FIELD,
                    )
                stack.callback(os.close, fd)
                files.append(_open(fd, path, max_header_bytes))
            stack.pop_all()
            return cls(tuple(files), weight_map)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Of the files, by `TensorEntry.file`."""
        return tuple(file.fd for file in self._files)

    @property
    def stat(self) -> tuple[int, ...]:
        """Device, inode, size, mtime in ns and ctime in ns of each file, one after the other."""
        return tuple(number for file in self._files for number in file.stat)

    @property
    def digest(self) -> str:
        """Of what says where the tensors are, 64 hex digits."""
        if len(self._files) == 1:
            return header_digest(self._files[0].directory)
        return hashlib.sha256(b"".join(header_digest(file.directory).encode() for file in self._files)).hexdigest()

    def is_unchanged(self) -> bool:
        """False if a file was written to since it was opened."""
        return all(_stat(file.fd) == file.stat for file in self._files)

    def tensors(self) -> SafetensorsHeader:
        """All tensors, in order of file and offset.

        Raises:
            AdapterFormatError: the files are broken; DUPLICATE_TENSOR, BAD_INDEX.
        """
        headers = [file.tensors() for file in self._files]
        if len(headers) == 1 and self._weight_map is None and self._files[0].archive is None:
            return headers[0]
        found: dict[str, TensorEntry] = {}
        metadata: dict[str, str] = {}
        for number, header in enumerate(headers):
            metadata |= header.metadata
            for tensor in header.tensors:
                other = found.setdefault(tensor.name, tensor._replace(file=number, index=len(found)))
                if other.file != number:
                    raise AdapterFormatError(
                        f"{tensor.name} is in {self._files[other.file].where} and in {self._files[number].where}",
                        reason="DUPLICATE_TENSOR",
                    )
        self._check_index(found)
        return SafetensorsHeader(tensors=tuple(found.values()), metadata=metadata, file_bytes=self.file_bytes)

    def _check_index(self, found: Mapping[str, TensorEntry]) -> None:
        if self._weight_map is None:
            return
        held = {name: Path(self._files[tensor.file].where).name for name, tensor in found.items()}
        names = held.keys() | self._weight_map.keys()
        wrong = sorted(name for name in names if held.get(name) != self._weight_map.get(name))
        if wrong:
            raise AdapterFormatError(
                f"{INDEX_NAME} has {wrong[0]} in {self._weight_map.get(wrong[0])}, the files have it in "
                f"{held.get(wrong[0])} ({len(wrong)} tensors differ)",
                reason="BAD_INDEX",
                field=_FIELD,
            )

    def __enter__(self) -> AdapterWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            os.close(file.fd)


def _open(fd: int, path: Path, max_header_bytes: int) -> _File:
    archive = None
    if path.suffix == ".safetensors":
        directory = read_header_bytes(fd, where=str(path), max_header_bytes=max_header_bytes)
    else:
        archive = TorchArchive(fd, where=str(path), max_header_bytes=max_header_bytes)
        directory = archive.pickle
    return _File(fd=fd, where=str(path), directory=directory, archive=archive, stat=_stat(fd))


def choose_weight_names(names: Sequence[str], *, where: str) -> list[str]:
    """Which files of a directory hold the weights, by their names. What PEFT itself would load comes first.

    Args:
        names: of the directory's files.
        where: the directory, for messages.

    Returns:
        The names. Of shards with an index, the index and all files that it may name.

    Raises:
        AdapterFormatError: reason NO_ADAPTER_WEIGHTS.
    """
    names = sorted(names)
    if WEIGHTS_NAME in names:
        return [WEIGHTS_NAME]
    if INDEX_NAME in names:
        return [INDEX_NAME, *(name for name in names if name.endswith(".safetensors"))]
    shards = [match for match in map(_SHARD.fullmatch, names) if match]
    if shards:
        numbers, totals = {int(match[1]) for match in shards}, {int(match[2]) for match in shards}
        if len(totals) != 1 or numbers != set(range(1, max(totals) + 1)):
            raise AdapterFormatError(
                f"{where} has {len(shards)} shards of {sorted(totals)}, expected all of one set",
                reason="NO_ADAPTER_WEIGHTS",
                field=_FIELD,
            )
        return [match[0] for match in shards]
    for name in TORCH_NAMES:
        if name in names:
            return [name]
    similar = [name for name in names if name.endswith((".safetensors", ".bin", ".pt", ".pth", ".index.json"))]
    found = (
        f"found {', '.join(similar[:5])}, which is not named as an adapter's weights are" if similar else "found none"
    )
    raise AdapterFormatError(f"{where} has no {WEIGHTS_NAME}: {found}", reason="NO_ADAPTER_WEIGHTS", field=_FIELD)


def shard_names(index: bytes, *, where: str) -> list[str]:
    """The files that an index names, from its content. Raises AdapterFormatError, reason BAD_INDEX."""
    return sorted(set(_weight_map(index, where).values()))


def _weight_files(directory: Path, open_file: OpenFile) -> tuple[list[Path], Mapping[str, str] | None]:
    """The files, and the index that says which tensor is in which."""
    names = choose_weight_names(os.listdir(directory), where=str(directory))
    if names[0] != INDEX_NAME:
        return [directory / name for name in names], None
    path = directory / INDEX_NAME
    fd = open_file(path)
    assert fd is not None, path
    with os.fdopen(fd, "rb") as stream:
        weight_map = _weight_map(stream.read(_MAX_INDEX_BYTES + 1), str(path))
    return [directory / name for name in sorted(set(weight_map.values()))], weight_map


def _weight_map(content: bytes, where: str) -> Mapping[str, str]:
    weight_map: dict[str, str] = {}
    try:
        found = json.loads(content)["weight_map"] if len(content) <= _MAX_INDEX_BYTES else None
        if isinstance(found, dict) and all(map(_is_file_name, found.values())):
            weight_map = found
    except (ValueError, KeyError, TypeError, RecursionError):
        weight_map = {}
    if not 1 <= len(set(weight_map.values())) <= _MAX_FILES:
        raise AdapterFormatError(
            f"{where} is not an index: expected a weight_map of tensor names to names of safetensors files beside it",
            reason="BAD_INDEX",
            field=_FIELD,
        )
    return weight_map


def _is_file_name(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[\w.-]{1,200}\.safetensors", value) is not None


def _stat(fd: int) -> tuple[int, ...]:
    status = os.fstat(fd)
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
