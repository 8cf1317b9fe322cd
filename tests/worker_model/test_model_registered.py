"""Slice files that stay mapped for later loads: right bytes, kept within their room, let go of when the loader asks."""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from compute_worker.registered_slices import RegisteredSlices
from epilora.slices import open_slice

CHUNK = 4096
SECONDS = 10.0


class Driver:
    """What CUDA does of it on a machine without: knows the pages, and may refuse them."""

    def __init__(self) -> None:
        self.pages: dict[int, int] = {}
        self.most_bytes = 0
        self.refuses_after = 1 << 30
        self.num_calls = 0
        self.breaks = False
        self.threads: set[str] = set()

    def enter_thread(self) -> None:
        self.threads.add(threading.current_thread().name)

    def register(self, pages: torch.Tensor) -> int:
        self.num_calls += 1
        if self.breaks:
            raise RuntimeError("no device")
        if self.num_calls > self.refuses_after:
            return 1
        assert pages.data_ptr() not in self.pages, "registered twice"
        self.pages[pages.data_ptr()] = pages.numel()
        self.most_bytes = max(self.most_bytes, sum(self.pages.values()))
        return 0

    def unregister(self, pages: torch.Tensor) -> int:
        assert self.pages.pop(pages.data_ptr()) == pages.numel()
        int(pages[-1])  # still mapped
        return 0


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def slices(driver: Driver) -> Iterator[RegisteredSlices]:
    registered = RegisteredSlices(driver, max_bytes=3 * CHUNK, chunk_bytes=CHUNK)
    yield registered
    registered.close()
    assert driver.pages == {}, "all is let go of at the end"
    assert driver.threads == {"registered-slices"}


def write(path: Path, size: int) -> bytes:
    content = bytes((place * 7 + place // 251 + len(path.name)) % 256 for place in range(size))
    path.write_bytes(content)
    return content


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def keep(slices: RegisteredSlices, path: Path) -> None:
    with open_slice(path) as stream:
        slices.keep(stream)


def bytes_of(slices: RegisteredSlices, path: Path) -> bytes | None:
    with open_slice(path) as stream, slices.borrow(stream) as chunks:
        return None if chunks is None else b"".join(bytes(chunk.tolist()) for chunk in chunks)


def is_free(path_or_fd: int) -> bool:
    try:
        fcntl.flock(path_or_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@pytest.mark.parametrize("size", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_registered_once_with_all_bytes(slices: RegisteredSlices, driver: Driver, tmp_path: Path, size: int) -> None:
    content = write(tmp_path / "a", size)
    assert bytes_of(slices, tmp_path / "a") is None, "nobody asked for it to be kept"
    for _ in range(3):
        keep(slices, tmp_path / "a")
    wait_for(lambda: slices.state().num_files == 1)
    keep(slices, tmp_path / "a")
    for _ in range(2):
        assert bytes_of(slices, tmp_path / "a") == content
    assert driver.num_calls == -(-size // CHUNK)
    assert slices.state().num_bytes == size


def test_a_file_of_the_same_name_is_another(slices: RegisteredSlices, tmp_path: Path) -> None:
    write(tmp_path / "a", CHUNK)
    keep(slices, tmp_path / "a")
    wait_for(lambda: slices.state().num_files == 1)
    write(tmp_path / "new", CHUNK)
    (tmp_path / "new").rename(tmp_path / "a")
    assert bytes_of(slices, tmp_path / "a") is None
    wait_for(lambda: slices.state().num_files == 0)


def test_lets_go_when_the_name_is_gone_and_no_copy_reads(
    slices: RegisteredSlices, driver: Driver, tmp_path: Path
) -> None:
    content = write(tmp_path / "a", 2 * CHUNK)
    keep(slices, tmp_path / "a")
    wait_for(lambda: slices.state().num_files == 1)
    with (tmp_path / "a").open("rb") as loader:
        with open_slice(tmp_path / "a") as stream, slices.borrow(stream) as chunks:
            (tmp_path / "a").unlink()
            stream.close()
            time.sleep(0.3)
            assert not is_free(loader.fileno()), "a copy is under way"
            assert chunks is not None
            assert b"".join(bytes(chunk.tolist()) for chunk in chunks) == content
        wait_for(lambda: is_free(loader.fileno()))
        assert driver.pages == {}


def test_the_file_used_longest_ago_makes_room(slices: RegisteredSlices, driver: Driver, tmp_path: Path) -> None:
    for name in "abc":
        write(tmp_path / name, CHUNK)
        keep(slices, tmp_path / name)
        wait_for(lambda: bytes_of(slices, tmp_path / name) is not None)  # noqa: B023 called at once
    bytes_of(slices, tmp_path / "a")
    content = write(tmp_path / "d", CHUNK)
    keep(slices, tmp_path / "d")
    wait_for(lambda: bytes_of(slices, tmp_path / "d") == content)
    assert bytes_of(slices, tmp_path / "b") is None
    assert bytes_of(slices, tmp_path / "a") is not None
    assert driver.most_bytes <= 3 * CHUNK


def test_what_has_no_room_is_not_kept(slices: RegisteredSlices, driver: Driver, tmp_path: Path) -> None:
    write(tmp_path / "large", 3 * CHUNK + 1)
    keep(slices, tmp_path / "large")
    write(tmp_path / "used", 3 * CHUNK)
    keep(slices, tmp_path / "used")
    wait_for(lambda: slices.state().num_files == 1)
    write(tmp_path / "b", CHUNK)
    with open_slice(tmp_path / "used") as stream, slices.borrow(stream), (tmp_path / "b").open("rb") as loader:
        keep(slices, tmp_path / "b")
        wait_for(lambda: is_free(loader.fileno()))
        assert bytes_of(slices, tmp_path / "used") is not None
    assert driver.most_bytes == 3 * CHUNK
    with (tmp_path / "large").open("rb") as loader:
        assert is_free(loader.fileno())


def test_a_refusal_ends_it_and_leaves_nothing(slices: RegisteredSlices, driver: Driver, tmp_path: Path) -> None:
    driver.refuses_after = 2
    for name in "ab":
        write(tmp_path / name, 3 * CHUNK)
        keep(slices, tmp_path / name)
    wait_for(lambda: slices.state().num_failures == 1)
    for name in "ab":
        with (tmp_path / name).open("rb") as loader:
            wait_for(lambda: is_free(loader.fileno()))
        keep(slices, tmp_path / name)
        assert bytes_of(slices, tmp_path / name) is None
    assert driver.num_calls == 3, "no more are tried"
    assert driver.pages == {}


def test_a_driver_that_breaks_leaves_nothing(slices: RegisteredSlices, driver: Driver, tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / name, CHUNK)
    keep(slices, tmp_path / "a")
    wait_for(lambda: slices.state().num_files == 1)
    driver.breaks = True
    keep(slices, tmp_path / "b")
    wait_for(lambda: slices.state().num_failures == 1)
    for name in "ab":
        with (tmp_path / name).open("rb") as loader:
            wait_for(lambda: is_free(loader.fileno()))
        assert bytes_of(slices, tmp_path / name) is None
