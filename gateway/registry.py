"""The durable list of adapters that should be served: one JSON file, written atomically, owned by one gateway."""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from epilora.errors import FailedPreconditionError, InternalError

FORMAT_VERSION = 1


class RegistryEntry(BaseModel):
    """One adapter that was loaded and not unloaded."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    source: str
    allow_partial: bool
    layout_hints: dict[str, Any] = Field(default_factory=dict)
    """LayoutHints as JSON."""
    generation: int
    digest: str
    """Identity of the content that was loaded."""
    lease_id: str
    """The loader's lease of its slices."""
    serving_since: float
    """Unix time, seconds."""
    report: dict[str, Any]
    """AdapterLoadReport as JSON."""


class RegistryContent(BaseModel):
    """What the file holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = FORMAT_VERSION
    next_generation: int = Field(default=1, ge=1)
    adapters: dict[str, RegistryEntry] = Field(default_factory=dict)
    leases: list[str] = Field(default_factory=list)
    """All leases taken and not given back yet, so that those of a load that a crash cut short are given back."""


class Registry:
    """The registry in memory and on disk; a change has reached the disk when its call returns.

    Raises (constructor):
        FailedPreconditionError: another process owns the directory (REGISTRY_IN_USE), or the file
            is not one of ours (REGISTRY_CORRUPT). A damaged file is never taken for an empty one.
    """

    def __init__(self, state_dir: Path) -> None:
        state_dir.mkdir(parents=True, exist_ok=True)
        self.path = state_dir / "registry.json"
        self._lock_file = _own(state_dir / "registry.lock")
        try:
            self._content = _read(self.path)
        except BaseException:
            os.close(self._lock_file)
            raise
        self._write_lock = asyncio.Lock()

    def entries(self) -> list[RegistryEntry]:
        """All adapters in order of name."""
        return [self._content.adapters[name] for name in sorted(self._content.adapters)]

    def get(self, name: str) -> RegistryEntry | None:
        """The entry of a name."""
        return self._content.adapters.get(name)

    def stray_leases(self) -> list[str]:
        """Leases that belong to no entry: what crashed loads and unloads left behind."""
        held = {entry.lease_id for entry in self._content.adapters.values()}
        return [lease for lease in self._content.leases if lease not in held]

    async def next_generation(self, *, at_least: int = 1) -> int:
        """A number that no load has had before, also across crashes: it is on disk before it is used."""
        async with self._write_lock:
            generation = max(self._content.next_generation, at_least)
            await self._store(next_generation=generation + 1)
            return generation

    async def put(self, entry: RegistryEntry) -> None:
        """Adds or replaces an entry."""
        async with self._write_lock:
            await self._store(adapters={**self._content.adapters, entry.name: entry})

    async def remove(self, name: str) -> None:
        """Forgets a name; a name that is not there is not an error."""
        async with self._write_lock:
            if name in self._content.adapters:
                rest = {key: value for key, value in self._content.adapters.items() if key != name}
                await self._store(adapters=rest)

    async def add_lease(self, lease_id: str) -> None:
        """Notes a lease before anything is done with it."""
        async with self._write_lock:
            await self._store(leases=[*self._content.leases, lease_id])

    async def drop_lease(self, lease_id: str) -> None:
        """Forgets a lease that was given back."""
        async with self._write_lock:
            if lease_id in self._content.leases:
                await self._store(leases=[lease for lease in self._content.leases if lease != lease_id])

    async def _store(self, **changes: Any) -> None:
        content = self._content.model_copy(update=changes)
        data = content.model_dump_json(indent=1).encode()
        # In a thread: a slow disk must not stall the streams of this process.
        writing = asyncio.ensure_future(asyncio.to_thread(_write_atomically, self.path, data))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing])
            if not writing.cancelled() and writing.exception() is None:
                self._content = content
            raise
        except OSError as error:
            raise InternalError(
                f"cannot write the adapter registry {self.path}: {error}; nothing was changed",
                reason="REGISTRY_WRITE_FAILED",
                metadata={"path": self.path},
            ) from error
        self._content = content

    def close(self) -> None:
        """Lets another process own the directory."""
        os.close(self._lock_file)


def _own(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise FailedPreconditionError(
            f"{path.parent} is in use by another gateway; stop it or choose another state directory",
            reason="REGISTRY_IN_USE",
            metadata={"state_dir": path.parent},
        ) from error
    return descriptor


def _read(path: Path) -> RegistryContent:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return RegistryContent()
    try:
        content = RegistryContent.model_validate_json(data)
        if content.version != FORMAT_VERSION:
            raise ValueError(f"format version is {content.version}, expected {FORMAT_VERSION}")
    except (ValidationError, ValueError) as error:
        raise FailedPreconditionError(
            f"the adapter registry {path} is not readable: {error}; restore it from a backup, or move it away "
            "to start without adapters",
            reason="REGISTRY_CORRUPT",
            metadata={"path": path},
        ) from error
    return content


def _write_atomically(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
