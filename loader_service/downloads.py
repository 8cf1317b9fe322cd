"""Files of remote adapters on this node's disk: streamed with a digest, resumed, and kept up to a number of bytes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

from epilora.errors import ResourceExhaustedError, UnavailableError
from loader_service.remote_stores import FileStore, RemoteFile, changed
from loader_service.writer import BuildProgress

log = structlog.get_logger(__name__)

_NUM_TRIES = 8
_PART = ".part"
_DIGEST = ".sha256"
_BLOCK_BYTES = 1 << 20


class Downloads:
    """A directory of downloaded adapters, one directory each; several processes may share it."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """Args:
        directory: made where it is needed.
        max_bytes: of adapters that no build reads; those that were read last are kept.
        """
        self._directory = directory
        self._max_bytes = max_bytes

    @contextmanager
    def fetched(
        self, name: str, store: FileStore, files: Sequence[RemoteFile], progress: BuildProgress
    ) -> Iterator[Path]:
        """A directory with the files; it stays while the block runs.

        Args:
            name: of this state of the adapter, letters and digits.
            store: where the files are.
            files: which, in the state they must have.
            progress: checked for cancellation.

        Raises:
            UnavailableError: SOURCE_UNAVAILABLE, SOURCE_CHANGED.
            ResourceExhaustedError: reason DOWNLOADS_FULL.
            BuildCancelledError: progress was cancelled. What was read already is used by the next try.
        """
        directory = self._directory / name
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(self._directory / f"{name}.lock", progress):
            self._make_room(sum(file.size_bytes for file in files), keep=name)
            directory.mkdir(mode=0o700, exist_ok=True)
            os.utime(directory)
            for file in files:
                if not (directory / file.name).exists():
                    _download(store, file, directory / file.name, progress)
            yield directory

    def _make_room(self, num_bytes: int, *, keep: str) -> None:
        """Removes the adapters that were used longest ago, as far as there has to be room."""
        held = {path: _bytes_of(path) for path in self._directory.iterdir() if path.is_dir() and path.name != keep}
        free = shutil.disk_usage(self._directory).free
        for path in sorted(held, key=lambda path: path.stat().st_mtime):
            if sum(held.values()) + num_bytes <= self._max_bytes and num_bytes <= free:
                break
            with _try_locked(self._directory / f"{path.name}.lock") as is_unused:
                if is_unused:
                    shutil.rmtree(path, ignore_errors=True)
                    free += held.pop(path)
                    log.info("removed a downloaded adapter", path=str(path))
        if num_bytes > free:
            raise ResourceExhaustedError(
                f"the adapter has {num_bytes} bytes; {self._directory} has {free} free. Make room there, or set "
                "EPILORA_DOWNLOAD_DIR",
                reason="DOWNLOADS_FULL",
                metadata={"needed": num_bytes, "free": free},
            )


def _download(store: FileStore, file: RemoteFile, target: Path, progress: BuildProgress) -> None:
    """Streams a file, goes on where a broken connection ended, and gives it its name once it is whole."""
    part = target.with_name(target.name + _PART)
    for last in (False,) * (_NUM_TRIES - 1) + (True,):
        try:
            digest = _append(store, file, part, progress)
            break
        except UnavailableError as error:
            if last or error.reason == "SOURCE_CHANGED":
                raise
            log.warning("a download broke off; going on", file=file.name, why=str(error))
            progress.wait(0.2)
    target.with_name(target.name + _DIGEST).write_text(f"{digest}\n")
    part.rename(target)
    log.info("downloaded", file=file.name, bytes=file.size_bytes, sha256=digest)


def _append(store: FileStore, file: RemoteFile, part: Path, progress: BuildProgress) -> str:
    """Reads what a partial file lacks; the SHA-256 of the whole."""
    digest = hashlib.sha256()
    with part.open("a+b") as stream:
        stream.seek(0)
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
        if stream.tell() < file.size_bytes:
            for block in store.stream(file, stream.tell()):
                progress.check()
                digest.update(block)
                stream.write(block)
        size = stream.tell()
    if size > file.size_bytes:
        part.unlink()
        raise changed(file.name)
    if size < file.size_bytes:
        raise UnavailableError(
            f"{file.name} ended after {size} of {file.size_bytes} bytes",
            reason="SOURCE_UNAVAILABLE",
            retry_after_seconds=5.0,
        )
    return digest.hexdigest()


def _bytes_of(directory: Path) -> int:
    total = 0
    for path in directory.iterdir():
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


@contextmanager
def _locked(path: Path, progress: BuildProgress) -> Iterator[None]:
    """A lock that ends with this process; waits for it, as long as the build is wanted."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while not _try(fd):
            progress.check()
            progress.wait(0.1)
        yield
    finally:
        os.close(fd)


@contextmanager
def _try_locked(path: Path) -> Iterator[bool]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield _try(fd)
    finally:
        os.close(fd)


def _try(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
