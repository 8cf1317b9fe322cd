"""The files of the cache: equal ones stored once, read ones kept, damaged ones found, left-over ones removed."""

from __future__ import annotations

import asyncio
import fcntl
import os
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import pytest
from typer.testing import CliRunner

from epilora.cli.app import app
from epilora.errors import UnavailableError
from epilora.model_spec import ModelSpec
from epilora.placement import ExpertPlacement
from epilora.slices import is_unlinked, open_slice
from epilora.v1 import loader_service_pb2 as pb
from loader_service.slice_store import SliceStore
from tests.loader.loader_harness import big_adapter, build_request, loader_settings, running_loader, wide_model


@pytest.fixture
def model(tmp_path: Path) -> ModelSpec:
    return wide_model(tmp_path / "model")


@pytest.fixture
def request_for(tmp_path: Path, model: ModelSpec) -> pb.BuildSlicesRequest:
    adapter = big_adapter(tmp_path / "adapters" / "a")
    return build_request(adapter, model, ExpertPlacement.make("linear", model, 2))


async def test_slices_of_equal_content_are_one_file(tmp_path: Path, model: ModelSpec) -> None:
    placement = ExpertPlacement.make("linear", model, 2)
    adapters = [
        big_adapter(tmp_path / "adapters" / name, lora_rank=2, seed=seed)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    async with running_loader(loader_settings(tmp_path, [tmp_path / "adapters"])) as loader:
        first, second, third = [await loader.build(build_request(adapter, model, placement)) for adapter in adapters]
        assert first.adapter_digest != second.adapter_digest
        assert not second.report.cache_hit, "only its bytes show that it is equal"
        assert [piece.path for piece in first.slices] == [piece.path for piece in second.slices]
        state = await loader.cache()
        size = sum(piece.size_bytes for piece in first.slices)
        assert (state.num_entries, state.used_bytes) == (3, 2 * size)
        assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 4
        assert await loader.release(first.lease_id) == 0, "the second still has them"
        assert all(Path(piece.path).exists() for piece in second.slices)
        assert await loader.release(second.lease_id) == size
        assert await loader.release(third.lease_id) == size


def test_equal_digests_of_other_bytes_are_two_files(tmp_path: Path) -> None:
    """The digest is fast, not safe: whoever can make two files with one digest must not get one served as the other."""
    store = SliceStore(tmp_path / "cache")
    store.open()
    paths = []
    for content in (b"one", b"two", b"one", b"longer"):
        unfinished = store.make_unfinished()
        (unfinished / "slice").write_bytes(content)
        paths.append(store.add(unfinished / "slice", "d" * 32))
        store.discard(unfinished)
    assert [path.read_bytes() for path in paths] == [b"one", b"two", b"one", b"longer"]
    assert len(set(paths)) == 3
    assert store.used_bytes == 12
    assert store.release(paths[:1]) == 0
    assert store.release(paths[1:]) == 12
    store.close()


async def test_the_bytes_of_a_file_that_is_read_count_until_it_is_not(
    tmp_path: Path, request_for: pb.BuildSlicesRequest
) -> None:
    async with running_loader(loader_settings(tmp_path, [tmp_path / "adapters"])) as loader:
        result = await loader.build(request_for)
        read, other = result.slices
        content = Path(read.path).read_bytes()
        with open_slice(Path(read.path)) as stream:
            assert not is_unlinked(stream)
            assert await loader.release(result.lease_id) == other.size_bytes
            assert is_unlinked(stream), "which tells the reader that its bytes are wanted"
            assert stream.read() == content
            state = await loader.cache()
            assert (state.num_entries, state.used_bytes) == (0, read.size_bytes)
            again = await loader.build(request_for)
            assert again.slices == result.slices, "equal bytes have equal names"
            assert (await loader.cache()).used_bytes == 2 * read.size_bytes + other.size_bytes
            assert await loader.release(again.lease_id) == read.size_bytes + other.size_bytes
        assert (await loader.cache()).used_bytes == 0
        assert not Path(read.path).exists()


@pytest.mark.parametrize("lets_go", [True, False])
async def test_a_build_waits_for_those_who_keep_what_is_gone(
    tmp_path: Path, model: ModelSpec, monkeypatch: pytest.MonkeyPatch, lets_go: bool
) -> None:
    placement = ExpertPlacement.make("linear", model, 2)
    first, second = (big_adapter(tmp_path / "adapters" / name, lora_rank=2, seed=ord(name)) for name in "ab")
    monkeypatch.setattr("loader_service.cache._LET_GO_SECONDS", 30.0 if lets_go else 0.2)
    settings = loader_settings(tmp_path, [tmp_path / "adapters"], cache_budget_bytes=4 << 20)
    async with running_loader(settings) as loader:
        result = await loader.build(build_request(first, model, placement))
        with ExitStack() as kept:
            for piece in result.slices:
                kept.enter_context(open_slice(Path(piece.path)))
            assert await loader.release(result.lease_id) == 0
            build = build_request(second, model, placement)
            if lets_go:
                waiting = asyncio.create_task(loader.build(build))
                await asyncio.sleep(0.3)
                assert not waiting.done()
                assert (await loader.cache()).used_bytes <= 4 << 20
                kept.close()
                await asyncio.wait_for(waiting, 20)
            else:
                assert (await loader.error(build)).reason == "CACHE_FULL"
        assert (await loader.cache()).used_bytes <= 4 << 20


def test_a_name_that_goes_while_it_is_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader may have counted its bytes as free by then."""
    path = tmp_path / "slice"
    path.write_bytes(b"content")
    flock = fcntl.flock

    def gone_first(stream: BinaryIO, operation: int) -> None:
        path.unlink()
        flock(stream, operation)

    monkeypatch.setattr("fcntl.flock", gone_first)
    with pytest.raises(UnavailableError, match="is gone"):
        open_slice(path)


async def test_verify_finds_what_has_changed(tmp_path: Path, model: ModelSpec) -> None:
    placement = ExpertPlacement.make("linear", model, 2)
    adapters = [big_adapter(tmp_path / "adapters" / name, lora_rank=2, seed=seed) for seed, name in enumerate("ab")]
    async with running_loader(loader_settings(tmp_path, [tmp_path / "adapters"])) as loader:
        results = [await loader.build(build_request(adapter, model, placement)) for adapter in adapters]
        found = await loader.verify()
        size = sum(piece.size_bytes for piece in results[0].slices)
        assert (found.num_slices, found.num_bytes, list(found.damaged_paths)) == (4, 2 * size, [])
        damaged = Path(results[0].slices[1].path)
        with damaged.open("r+b") as stream:
            stream.seek(-1, os.SEEK_END)
            stream.write(b"?")
        address = f"unix:{tmp_path}/run/loader.sock"
        verified = await asyncio.to_thread(CliRunner().invoke, app, ["cache", "verify", "--loader", address])
        assert verified.exit_code == 1
        assert f"{damaged} is not what was written" in verified.output
        assert "4 slices" in verified.output
        shown = await asyncio.to_thread(CliRunner().invoke, app, ["cache", "show", "--loader", address])
        assert shown.exit_code == 0, "the damaged entry is gone"
        again = await loader.build(build_request(adapters[0], model, placement))
        assert not again.report.cache_hit
        assert again.slices == results[0].slices
        assert (await loader.verify()).damaged_paths == []
        assert (await loader.build(build_request(adapters[1], model, placement))).report.cache_hit


async def test_pinned_sources_stay(tmp_path: Path, model: ModelSpec) -> None:
    placement = ExpertPlacement.make("linear", model, 2)
    pinned, other = (big_adapter(tmp_path / "adapters" / name, lora_rank=2, seed=ord(name)) for name in "ab")
    settings = loader_settings(
        tmp_path, [tmp_path / "adapters"], cache_pinned_sources=[str(pinned)], cache_budget_bytes=4 << 20
    )
    async with running_loader(settings) as loader:
        result = await loader.build(build_request(pinned, model, placement))
        assert await loader.release(result.lease_id) == 0
        error = await loader.error(build_request(other, model, placement))
        assert error.reason == "CACHE_FULL", "nothing makes it go"
        assert (await loader.build(build_request(pinned, model, placement))).report.cache_hit


def test_dead_loaders_of_other_services_leave_nothing(tmp_path: Path) -> None:
    names = [f"epilora-{os.getuid()}-{number:08x}" for number in range(3)]
    dead, alive = SliceStore(tmp_path / names[0]), SliceStore(tmp_path / names[1])
    for store in (dead, alive):
        store.open()
        (store.make_unfinished() / "slice").write_bytes(b"x")
        (store.directory / f"{'0' * 32}.safetensors").write_bytes(b"x")
    (tmp_path / names[0] / "somebody-elses").touch()
    os.close(dead._lock_fd)  # as the kernel does when a process is killed
    mine = SliceStore(tmp_path / names[2])
    mine.open()
    assert sorted(path.name for path in (tmp_path / names[0]).iterdir()) == [".lock", "somebody-elses"]
    assert len(list((tmp_path / names[1]).iterdir())) == 3
    mine.close()
    alive.close()
