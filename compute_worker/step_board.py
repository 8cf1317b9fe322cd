"""A few cache lines that the ranks of one host share: each one's latest message, and a bell to wake it.

Layout: 64 bytes that name the board, then for each rank two records of 128 bytes, used in turn, and 64 for its bell.
A record is its number (from 1), the message's int64s and a checksum, so that a reader never takes a half-written one,
in whatever order another processor's stores become visible. A rank writes record n + 2 over n only after every rank
wrote n + 1, which each does after it read n.

The bell is a 32-bit word: its rank sets it to 0 before it looks once more and then sleeps on it; others set it to 1
after they wrote something, and wake the sleeper. Sleeps are bounded, so a wake-up that was missed only costs time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import signal
import struct
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_NAME_BYTES = 64
_RECORD_BYTES = 128
_RANK_BYTES = 2 * _RECORD_BYTES + 64
_NUMBER = struct.Struct("q")
_WORD_ASLEEP, _WORD_RUNG = 0, 1

_FUTEX_CALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_POLL_SECONDS = 0.0005
_libc = ctypes.CDLL(None, use_errno=True)


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class StepBoard:
    """One rank's view of the board.

    Args:
        path: of the file, in shared memory.
        name: what the board was created with.
        ep_rank: this rank.
        num_ranks: ranks on the board.
        num_fields: int64s of a message, at most 14.

    Raises:
        OSError: no such file here.
        ValueError: the file is another board.
    """

    def __init__(self, path: Path, name: bytes, *, ep_rank: int, num_ranks: int, num_fields: int) -> None:
        self._ep_rank = ep_rank
        self._message = struct.Struct(f"{1 + num_fields}q")
        self._record = struct.Struct(f"{1 + num_fields + 1}q")
        assert self._record.size <= _RECORD_BYTES, num_fields
        size = _NAME_BYTES + num_ranks * _RANK_BYTES
        with path.open("r+b") as file:
            if os.fstat(file.fileno()).st_size != size:
                raise ValueError(f"{path} has {os.fstat(file.fileno()).st_size} bytes, expected {size}")
            self._map = mmap.mmap(file.fileno(), size)
        if self._map[: len(name)] != name:
            raise ValueError(f"{path} is another board")
        self._offsets = [[self._offset(rank, number) for number in range(2)] for rank in range(num_ranks)]
        bells = [_NAME_BYTES + rank * _RANK_BYTES + 2 * _RECORD_BYTES for rank in range(num_ranks)]
        self._bells = [ctypes.c_uint32.from_buffer(self._map, offset) for offset in bells]
        # Looking at words this way takes a fraction of unpacking them, or of asking ctypes.
        self._words = memoryview(self._map).cast("q")
        self._half_words = memoryview(self._map).cast("I")
        self._other_bells = [(rank, offset // 4) for rank, offset in enumerate(bells) if rank != ep_rank]

    @staticmethod
    def create(path: Path, name: bytes, num_ranks: int) -> None:
        """Makes a new board, readable by this user alone.

        Raises:
            OSError: the file is there already, or cannot be made.
        """
        assert len(name) <= _NAME_BYTES
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.ftruncate(descriptor, _NAME_BYTES + num_ranks * _RANK_BYTES)
            os.pwrite(descriptor, name, 0)
        finally:
            os.close(descriptor)

    def write(self, number: int, fields: Sequence[int]) -> None:
        """Puts up this rank's message of a number, and wakes the ranks that sleep."""
        payload = self._message.pack(number, *fields)
        offset = self._offsets[self._ep_rank][number & 1]
        self._map[offset : offset + self._record.size] = payload + _NUMBER.pack(zlib.crc32(payload))
        for rank, bell in self._other_bells:
            if self._half_words[bell] == _WORD_ASLEEP:
                self.ring(rank)

    def is_written(self, ep_rank: int, number: int) -> bool:
        """True if a rank has begun to put up its message of a number."""
        return self._words[self._offsets[ep_rank][number & 1] // _NUMBER.size] == number

    def read(self, ep_rank: int, number: int) -> list[int] | None:
        """A rank's message of a number; None if it is not there (whole) yet."""
        offset = self._offsets[ep_rank][number & 1]
        if self._words[offset // _NUMBER.size] != number:
            return None
        record = self._map[offset : offset + self._record.size]
        found, *fields, checksum = self._record.unpack(record)
        if found != number or checksum != zlib.crc32(record[: self._message.size]):
            return None
        return fields

    def ring(self, ep_rank: int) -> None:
        """Wakes a rank if it sleeps. Any thread."""
        bell = self._bells[ep_rank]
        bell.value = _WORD_RUNG
        if _FUTEX_CALL is not None:
            _libc.syscall(ctypes.c_long(_FUTEX_CALL), ctypes.byref(bell), _FUTEX_WAKE, 1, None, None, 0)

    def arm(self) -> None:
        """Says that this rank is about to sleep; look once more for what you wait for after this."""
        self._bells[self._ep_rank].value = _WORD_ASLEEP

    def sleep(self, seconds: float) -> None:
        """Sleeps until somebody rang since `arm`, at most the given time."""
        bell = self._bells[self._ep_rank]
        if _FUTEX_CALL is None:
            deadline = time.monotonic() + seconds
            while bell.value == _WORD_ASLEEP and (left := deadline - time.monotonic()) > 0:
                time.sleep(min(left, _POLL_SECONDS))
        else:
            limit = _TimeSpec(int(seconds), int(seconds % 1 * 1e9))
            _libc.syscall(
                ctypes.c_long(_FUTEX_CALL), ctypes.byref(bell), _FUTEX_WAIT, _WORD_ASLEEP, ctypes.byref(limit), None, 0
            )
        bell.value = _WORD_RUNG

    @staticmethod
    def _offset(ep_rank: int, number: int) -> int:
        return _NAME_BYTES + ep_rank * _RANK_BYTES + number % 2 * _RECORD_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessIdentity:
    """A process, told apart from a later one with the same pid."""

    pid: int
    start_time: int
    """Clock ticks since the machine started."""
    pid_namespace: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """A process of this user that is there."""
        identity = cls.find(pid)
        assert identity is not None, pid
        return identity

    @classmethod
    def find(cls, pid: int) -> ProcessIdentity | None:
        """A process of this user; None if there is none, or its parent knows already that it ended."""
        stat = _stat_of(pid)
        if stat is None:
            return None
        return cls(pid=pid, start_time=stat[1], pid_namespace=os.readlink(f"/proc/{pid}/ns/pid"))

    @classmethod
    def of_self(cls) -> ProcessIdentity:
        """This process."""
        return cls.of(os.getpid())

    def is_alive(self) -> bool:
        """False once it ended, also while its parent has not noticed."""
        stat = _stat_of(self.pid)
        return stat is not None and stat[1] == self.start_time and stat[0] not in "ZX"

    def is_stopped(self) -> bool:
        """True while a signal or a debugger holds it."""
        stat = _stat_of(self.pid)
        return stat is not None and stat[1] == self.start_time and stat[0] in "Tt"

    def kill(self) -> None:
        """Ends it at once, also if it is stopped; nothing if it ended already. Never hits a later process."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            # The descriptor stands for whoever has the pid now, and for nobody else from here on.
            if self.is_alive():
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            os.close(descriptor)


def _stat_of(pid: int) -> tuple[str, int] | None:
    """(state, start time) of a process; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name, in parentheses, may hold anything.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])
