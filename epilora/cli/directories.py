"""The directories of one `epilora serve`: chosen, locked against a second one, and removed if it made them itself."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from epilora.errors import FailedPreconditionError, InvalidArgumentError
from epilora.last_error import GATEWAY, LOADER, WORKERS, path_of_last_error

MAX_SOCKET_PATH_BYTES = 107
ADDRESS_FILE = "addresses.json"
"""In the run directory: where the gateway listens."""
_FILES = (ADDRESS_FILE, *(path_of_last_error(Path(), process).name for process in (LOADER, WORKERS, GATEWAY)))
_SHARED_MEMORY = Path("/dev/shm")
_SOCKET = re.compile(r"loader\.sock|worker-\d+\.sock")
_LOGS_OF_A_START = re.compile(r"[0-9a-f]{32}_\w+")
"""Below the run directory's torchelastic/, one of each start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Directories:
    """Absolute paths."""

    state: Path
    run: Path
    cache: Path
    temporary: tuple[Path, ...]
    """Those of them that nobody named: gone after the service."""

    @classmethod
    def choose(cls, *, state: Path, run: Path | None, cache: Path | None) -> Directories:
        """Fills in what was not named; after a crash the next start takes the same directories.

        Raises:
            InvalidArgumentError: reason RUN_DIR_TOO_LONG, Unix sockets in it could not be bound; or SAME_DIRECTORY.
        """
        state = state.resolve()
        name = f"epilora-{os.getuid()}-{hashlib.blake2b(str(state).encode(), digest_size=4).hexdigest()}"
        run_dir = (run or Path(tempfile.gettempdir()) / name).resolve()
        default_cache = _SHARED_MEMORY / name if os.access(_SHARED_MEMORY, os.W_OK) else run_dir / "cache"
        cache_dir = (cache or default_cache).resolve()
        if len(os.fsencode(run_dir / "worker-9999.sock")) > MAX_SOCKET_PATH_BYTES:
            raise InvalidArgumentError(
                f"{run_dir} is too long for Unix sockets ({MAX_SOCKET_PATH_BYTES} bytes); give a shorter --run-dir",
                reason="RUN_DIR_TOO_LONG",
            )
        for one, another in combinations(
            {"--state-dir": state, "--run-dir": run_dir, "--cache-dir": cache_dir}.items(), 2
        ):
            if one[1] == another[1]:
                raise InvalidArgumentError(
                    f"{one[0]} and {another[0]} are both {one[1]}; give each its own", reason="SAME_DIRECTORY"
                )
        temporary = [path for named, path in ((run, run_dir), (cache, cache_dir)) if named is None]
        return cls(state=state, run=run_dir, cache=cache_dir, temporary=tuple(temporary))

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Holds all three, and removes the temporary ones at the end, however that comes.

        Raises:
            FailedPreconditionError: reason STATE_DIR_IN_USE, RUN_DIR_IN_USE or CACHE_DIR_IN_USE; nothing of the other's
                was touched.
            InvalidArgumentError: reason BAD_DIRECTORY; one cannot be made or written.
        """
        with ExitStack() as stack:
            stack.enter_context(_locked(self.state, "--state-dir", "STATE_DIR_IN_USE"))
            stack.enter_context(_locked(self.run, "--run-dir", "RUN_DIR_IN_USE"))
            # Each only with its lock: what is removed is nobody else's. Shared memory above all would never be freed.
            stack.callback(self._remove_run)
            with writing("--cache-dir", self.cache):
                self.cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            stack.enter_context(_locked(self.cache, "--cache-dir", "CACHE_DIR_IN_USE"))
            stack.callback(self._remove_cache)
            with writing("--cache-dir", self.cache):
                try_to_write(self.cache)
            yield

    def _remove_run(self) -> None:
        if self.run in self.temporary:
            shutil.rmtree(self.run, ignore_errors=True)
        else:
            _clean_run(self.run)

    def _remove_cache(self) -> None:
        if self.cache in self.temporary:
            shutil.rmtree(self.cache, ignore_errors=True)


def _clean_run(directory: Path) -> None:
    """Removes from a run directory that somebody named what the processes made in it, and nothing else."""
    for path in directory.iterdir():
        if path.name in _FILES or (_SOCKET.fullmatch(path.name) and path.is_socket()):
            path.unlink(missing_ok=True)
    logs = directory / "torchelastic"
    if not logs.is_dir():
        return
    for path in logs.iterdir():
        if _LOGS_OF_A_START.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        # What is left is not ours.
        logs.rmdir()


@contextmanager
def writing(option: str, path: Path, *, reason: str = "BAD_DIRECTORY") -> Iterator[None]:
    """Makes one InvalidArgumentError of whatever keeps the block from writing where an option says."""
    try:
        yield
    except OSError as error:
        raise InvalidArgumentError(
            f"{option} is {path}, which cannot be written: {error.strerror}", reason=reason
        ) from None


def try_to_write(directory: Path) -> None:
    """Makes a file in a directory, which is gone at once. Raises OSError if it cannot."""
    with tempfile.TemporaryFile(dir=directory):
        pass


@contextmanager
def _locked(directory: Path, option: str, reason: str) -> Iterator[None]:
    """A lock that ends with this process, so that a second service fails at once and clearly."""
    with writing(option, directory):
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / "serve.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FailedPreconditionError(
                f"another `epilora serve` runs on {directory}; stop it or give {option}", reason=reason
            ) from None
        yield
    finally:
        os.close(descriptor)
