"""Finding and opening an adapter's files, inside the allowed roots only."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote, urlsplit

from epilora.adapters.peft_config import MAX_CONFIG_BYTES
from epilora.adapters.weights import STAT_NUMBERS, AdapterWeights
from epilora.errors import AdapterFormatError, InvalidArgumentError, NotFoundError, PermissionDeniedError

CONFIG_NAME = "adapter_config.json"
_FIELD = "source"
_MAX_PATH_BYTES = 4095
"""Linux's PATH_MAX, less the zero byte that ends a path."""
_SHOWN = 200
"""Characters of a source that is shown in part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceIdentity:
    """What tells one state of an adapter's files from another, without reading the weights."""

    weights_stat: tuple[int, ...]
    """Device, inode, size, mtime in ns and ctime in ns of each weight file."""
    config_digest: str
    header_digest: str
    pinned_source: str = ""
    """The source with its revision pinned, if it is in a repository that has revisions. Not a part of the digests."""

    @property
    def digest(self) -> str:
        """Of all of it, 64 hex digits."""
        return self._digest_of(self.weights_stat)

    @property
    def shared_digest(self) -> str:
        """The same for every node that mounts the files: without the device, which each node numbers as it likes."""
        return self._digest_of([number for place, number in enumerate(self.weights_stat) if place % STAT_NUMBERS])

    def _digest_of(self, stat: Sequence[int]) -> str:
        canonical = json.dumps([stat, self.config_digest, self.header_digest])
        return hashlib.sha256(canonical.encode()).hexdigest()


class SourceFiles:
    """An adapter's files, open. Use as a context manager."""

    def __init__(self, *, config: bytes, weights: AdapterWeights) -> None:
        self.config = config
        """Content of adapter_config.json."""
        self.weights = weights
        self.identity = SourceIdentity(
            weights_stat=weights.stat,
            config_digest=hashlib.sha256(config).hexdigest(),
            header_digest=weights.digest,
        )

    def __enter__(self) -> SourceFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.weights.__exit__(kind, value, trace)


class SourceRoots:
    """The directories under which adapters may lie."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = [Path(os.path.realpath(root)) for root in roots]

    def open(self, source: str, *, max_header_bytes: int) -> SourceFiles:
        """Opens an adapter's files.

        Links are followed; what they lead to must lie under a root, too.

        Args:
            source: absolute path, or file:// URL, of the directory.
            max_header_bytes: limit of each header.

        Raises:
            InvalidArgumentError: not such a path, or not an adapter.
            PermissionDeniedError: outside the roots.
            NotFoundError: no such directory.
        """
        directory = self._directory(source)
        config = self._read_config(directory)
        weights = AdapterWeights.open(directory, self._open_file, max_header_bytes=max_header_bytes)
        return SourceFiles(config=config, weights=weights)

    def _directory(self, source: str) -> Path:
        path = Path(os.path.realpath(_path_of(source)))
        self._check_inside(path, source)
        # Path.is_dir raises for a name that is too long, and for directories on the way that are closed to us.
        if not os.path.isdir(path):
            message = f"adapter directory {source} does not exist, or cannot be read"
            raise NotFoundError(message, reason="SOURCE_NOT_FOUND", field=_FIELD)
        return path

    def _check_inside(self, path: Path, named: object) -> None:
        if any(path.is_relative_to(root) for root in self._roots):
            return
        allowed = ", ".join(map(str, self._roots)) or "none (EPILORA_ADAPTER_ROOTS is empty)"
        raise PermissionDeniedError(
            f"{named} is outside the directories that adapters may be loaded from: {allowed}",
            reason="SOURCE_OUTSIDE_ROOTS",
            field=_FIELD,
        )

    def _read_config(self, directory: Path) -> bytes:
        path = directory / CONFIG_NAME
        fd = self._open_file(path)
        if fd is None:
            raise AdapterFormatError(
                f"{directory} has no {CONFIG_NAME}; expected the directory of an adapter that PEFT saved",
                reason="NO_ADAPTER_CONFIG",
                field=_FIELD,
            )
        with os.fdopen(fd, "rb") as stream:
            content = stream.read(MAX_CONFIG_BYTES + 1)
        if len(content) > MAX_CONFIG_BYTES:
            raise AdapterFormatError(
                f"{path} has more than {MAX_CONFIG_BYTES} bytes", reason="BAD_ADAPTER_CONFIG", field=_FIELD
            )
        return content

    def _open_file(self, path: Path) -> int | None:
        """A descriptor of a regular file under a root; None if there is no such file."""
        try:
            # Not blocking: opening a FIFO would wait for a writer.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise AdapterFormatError(
                f"{path} cannot be opened: {error.strerror}", reason="SOURCE_UNREADABLE", field=_FIELD
            ) from error
        try:
            # Asked of the descriptor, so that no link can be changed between the check and the reading.
            self._check_inside(Path(os.readlink(f"/proc/self/fd/{fd}")), path)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise AdapterFormatError(f"{path} is not a file", reason="SOURCE_UNREADABLE", field=_FIELD)
        except BaseException:
            os.close(fd)
            raise
        return fd


def _path_of(source: str) -> str:
    path = source
    if "://" in source:
        url = urlsplit(source)
        if url.scheme != "file" or url.netloc not in ("", "localhost") or url.query or url.fragment:
            raise InvalidArgumentError(
                f"source {_start(source)}: expected an absolute path or a file:///path URL",
                reason="BAD_SOURCE",
                field=_FIELD,
            )
        path = unquote(url.path)
    if not os.path.isabs(path):
        wrong = "expected an absolute path or a file:///path URL"
    elif "\0" in path:
        wrong = "a path cannot hold a zero byte"
    elif (num_bytes := len(os.fsencode(path))) > _MAX_PATH_BYTES:
        wrong = f"a path of {num_bytes} bytes is too long, expected at most {_MAX_PATH_BYTES} (PATH_MAX of the system)"
    else:
        return path
    raise InvalidArgumentError(f"source {_start(source)}: {wrong}", reason="BAD_SOURCE", field=_FIELD)


def _start(source: str) -> str:
    return repr(source) if len(source) <= _SHOWN else f"{source[:_SHOWN]!r}..."
