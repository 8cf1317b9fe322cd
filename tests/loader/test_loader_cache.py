"""Single flight, leases, budget, cancellation, and what is left after a crash."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from epilora.adapters.slice_plan import SlicePlan
from epilora.errors import FailedPreconditionError, ResourceExhaustedError
from epilora.model_spec import ModelSpec
from epilora.placement import ExpertPlacement
from epilora.rpc import make_channel
from epilora.v1 import loader_service_pb2 as pb
from epilora.v1 import types_pb2
from loader_service.cache import BuiltSlices, SliceCache
from loader_service.write_result import WriteResult
from loader_service.writer import BuildProgress, write_slices
from tests.loader.loader_harness import (
    LoaderClient,
    big_adapter,
    build_request,
    loader_settings,
    running_loader,
    wide_model,
)


@pytest.fixture
def model(tmp_path: Path) -> ModelSpec:
    return wide_model(tmp_path / "model")


@pytest.fixture
def request_for(tmp_path: Path, model: ModelSpec) -> pb.BuildSlicesRequest:
    adapter = big_adapter(tmp_path / "adapters" / "a")
    return build_request(adapter, model, ExpertPlacement.make("linear", model, 2))


async def test_a_hundred_calls_are_one_build(tmp_path: Path, request_for: pb.BuildSlicesRequest) -> None:
    async with running_loader(loader_settings(tmp_path, [tmp_path / "adapters"])) as loader:
        results = await asyncio.gather(*(loader.build(request_for) for _ in range(100)))
        state = await loader.cache()
        assert (state.num_builds, state.num_entries, state.num_leases) == (1, 1, 100)
        assert len({result.lease_id for result in results}) == 100
        assert {tuple(piece.digest for piece in result.slices) for result in results} == {
            tuple(piece.digest for piece in results[0].slices)
        }
        for result in results[:-1]:
            assert await loader.release(result.lease_id) == 0
        assert Path(results[-1].slices[0].path).exists()
        assert await loader.release(results[0].lease_id) == 0, "a lease given back twice is one"
        assert await loader.release(results[-1].lease_id) == state.used_bytes
        assert await loader.release("no such lease") == 0
        state = await loader.cache()
        assert (state.used_bytes, state.num_entries, state.num_leases) == (0, 0, 0)


async def test_a_later_call_is_a_hit_and_reads_nothing(tmp_path: Path, request_for: pb.BuildSlicesRequest) -> None:
    async with running_loader(loader_settings(tmp_path, [tmp_path / "adapters"])) as loader:
        first = await loader.build(request_for)
        second = await loader.build(request_for)
        assert (first.report.cache_hit, second.report.cache_hit) == (False, True)
        assert (first.report.bytes_read > 0, second.report.bytes_read) == (True, 0)
        assert first.slices == second.slices
        assert first.lease_id != second.lease_id


async def test_progress_grows_to_the_total(tmp_path: Path, request_for: pb.BuildSlicesRequest) -> None:
    async with running_loader(loader_settings(tmp_path, [tmp_path / "adapters"])) as loader:
        events = [event async for event in loader.stream(request_for)]
    *steps, last = events
    assert last.WhichOneof("event") == "result"
    done = [step.progress.bytes_done for step in steps]
    assert done == sorted(done)
    total = sum(piece.size_bytes for piece in last.result.slices)
    assert {step.progress.bytes_total for step in steps} <= {0, total}
    assert all(value <= total for value in done)


async def test_waiters_share_the_error(tmp_path: Path, model: ModelSpec) -> None:
    adapter = big_adapter(tmp_path / "adapters" / "a")
    weights = adapter / "adapter_model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-4:] = np.float32("nan").tobytes()
    weights.write_bytes(raw)
    request = build_request(adapter, model, ExpertPlacement.make("linear", model, 2))
    async with running_loader(loader_settings(tmp_path, [tmp_path / "adapters"])) as loader:
        errors = await asyncio.gather(*(loader.error(request) for _ in range(5)))
        assert {error.reason for error in errors} == {"NON_FINITE"}
        assert "layers.1.mlp.experts.9.up_proj.lora_B" in errors[0].message
        state = await loader.cache()
        assert (state.num_builds, state.used_bytes, state.num_leases) == (0, 0, 0)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


async def _settled(loader: LoaderClient) -> pb.GetCacheResponse:
    """The cache once nothing is being built or removed, within 10 s."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        state = await loader.cache()
        if state.used_bytes == 0 and state.num_leases == 0:
            return state
        await asyncio.sleep(0.05)
    raise AssertionError(f"still in use: {state}")


async def test_cancelled_waiters(
    tmp_path: Path, request_for: pb.BuildSlicesRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builds wait at a gate, so that it is the calls that end them."""
    gate = threading.Event()

    def gated(plan: SlicePlan, source_fds: Sequence[int], paths: list[Path], progress: BuildProgress) -> WriteResult:
        while not gate.wait(0.01):
            progress.check()
        return write_slices(plan, source_fds, paths, progress)

    monkeypatch.setattr("loader_service.build.write_slices", gated)
    async with running_loader(loader_settings(tmp_path, [tmp_path / "adapters"])) as loader:
        alone = loader.start(request_for)
        assert (await alone.read()).WhichOneof("event") == "progress"
        alone.cancel()
        assert (await _settled(loader)).num_builds == 0, "the last waiter left: nothing is built"
        leaving = [loader.start(request_for) for _ in range(3)]
        staying = asyncio.create_task(loader.build(request_for))
        for call in leaving:
            assert (await call.read()).WhichOneof("event") == "progress"
            call.cancel()
        gate.set()
        result = await staying
        assert all(Path(piece.path).exists() for piece in result.slices)
        assert (await loader.cache()).num_builds == 1
        await loader.release(result.lease_id)
        assert (await _settled(loader)).num_entries == 0


async def test_entries_that_something_else_removed_are_built_anew(
    tmp_path: Path, request_for: pb.BuildSlicesRequest
) -> None:
    async with running_loader(loader_settings(tmp_path, [tmp_path / "adapters"])) as loader:
        first = await loader.build(request_for)
        Path(first.slices[0].path).unlink()
        second = await loader.build(request_for)
        assert not second.report.cache_hit
        assert all(Path(piece.path).exists() for piece in second.slices)
        Path(second.slices[0].path).unlink()
        assert await loader.release(first.lease_id) == 0
        assert await loader.release(second.lease_id) > 0
        assert (await loader.cache()).used_bytes == 0


async def test_budget(tmp_path: Path, model: ModelSpec) -> None:
    placement = ExpertPlacement.make("linear", model, 2)
    small = [big_adapter(tmp_path / "adapters" / name, lora_rank=2, seed=seed) for seed, name in enumerate("ab")]
    settings = loader_settings(tmp_path, [tmp_path / "adapters"], cache_budget_bytes=4 << 20)
    async with running_loader(settings) as loader:
        first = await loader.build(build_request(small[0], model, placement))
        error = await loader.error(build_request(small[1], model, placement))
        assert isinstance(error, ResourceExhaustedError)
        assert error.reason == "CACHE_FULL"
        assert "budget of 4194304 bytes" in error.message
        state = await loader.cache()
        assert (state.num_entries, state.used_bytes) == (1, sum(piece.size_bytes for piece in first.slices))
        await loader.release(first.lease_id)
        assert (await loader.build(build_request(small[1], model, placement))).slices


async def test_idle_entries_stay_within_their_bytes(tmp_path: Path, model: ModelSpec) -> None:
    placement = ExpertPlacement.make("linear", model, 2)
    adapters = [big_adapter(tmp_path / "adapters" / name, lora_rank=2, seed=seed) for seed, name in enumerate("abc")]
    requests = [build_request(adapter, model, placement) for adapter in adapters]
    settings = loader_settings(tmp_path, [tmp_path / "adapters"], cache_idle_bytes=8 << 20, cache_budget_bytes=17 << 19)
    async with running_loader(settings) as loader:
        results = [await loader.build(request) for request in requests[:2]]
        size = sum(piece.size_bytes for piece in results[0].slices)
        assert 2 * size < 8 << 20 < 3 * size, "two idle entries fit, three do not"
        for result in results:
            assert await loader.release(result.lease_id) == 0
        state = await loader.cache()
        assert (state.num_entries, state.num_leases, state.used_bytes) == (2, 0, 2 * size)
        again = await loader.build(requests[0])
        assert again.report.cache_hit
        assert again.slices == results[0].slices
        third = await loader.build(requests[2])
        assert all(Path(piece.path).exists() for piece in again.slices), "an entry in use stays"
        state = await loader.cache()
        assert (state.num_entries, state.num_builds, state.used_bytes) == (2, 3, 2 * size), "the idle one made room"
        await loader.release(again.lease_id)
        await loader.release(third.lease_id)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_the_entry_that_is_cheapest_to_build_for_its_size_goes_first(tmp_path: Path) -> None:
    cache = SliceCache(tmp_path / "cache", 100, idle_bytes=60)
    cache.open()

    def build(name: str, size: int, seconds: float) -> None:
        def write(directory: Path) -> BuiltSlices:
            (directory / "file").write_bytes(name.encode() * size)
            time.sleep(seconds)
            piece = pb.Slice(path=str(directory / "file"), size_bytes=size, digest=name * 32)
            return BuiltSlices(adapter_digest=name, slices=(piece,), report=types_pb2.AdapterLoadReport())

        cache.build(name * 32, size, write, lease=name)

    try:
        build("a", 30, 0.3)
        build("b", 30, 0.02)
        build("c", 30, 0.1)
        assert [cache.release(lease) for lease in "abc"] == [0, 0, 30]
        assert cache.lease("b" * 32, "again") is None
        assert cache.lease("a" * 32, "again") is not None
        assert cache.state().used_bytes == 60
        # a is in use: only c can make room.
        build("d", 60, 0.0)
        assert cache.lease("c" * 32, "x") is None
        with pytest.raises(ResourceExhaustedError):
            build("e", 30, 0.0)
    finally:
        cache.close()


async def test_a_file_changed_in_place_is_another_entry(tmp_path: Path, model: ModelSpec) -> None:
    adapter = big_adapter(tmp_path / "adapters" / "a", lora_rank=2)
    request = build_request(adapter, model, ExpertPlacement.make("linear", model, 2))
    weights = adapter / "adapter_model.safetensors"
    async with running_loader(loader_settings(tmp_path, [tmp_path / "adapters"])) as loader:
        first = await loader.build(request)
        with weights.open("r+b") as stream:
            stream.seek(-4, os.SEEK_END)
            stream.write(np.float32(7).tobytes())
        second = await loader.build(request)
        assert second.adapter_digest != first.adapter_digest
        assert second.slices[1].digest != first.slices[1].digest
        assert not second.report.cache_hit


def test_a_directory_has_one_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loader_service.slice_store._LOCK_TIMEOUT_SECONDS", 0.1)
    first = SliceCache(tmp_path / "cache", 1 << 20)
    first.open()
    with pytest.raises(FailedPreconditionError, match="another loader owns the cache directory"):
        SliceCache(tmp_path / "cache", 1 << 20).open()
    first.close()
    again = SliceCache(tmp_path / "cache", 1 << 20)
    again.open()
    again.close()


class _Process:
    """A loader in a process of its own."""

    def __init__(self, path: Path) -> None:
        self.address = f"unix:{path}/run/loader.sock"
        self._environment = {
            **os.environ,
            "EPILORA_MODEL": str(path),
            "EPILORA_RUN_DIR": str(path / "run"),
            "EPILORA_CACHE_DIR": str(path / "cache"),
            "EPILORA_ADAPTER_ROOTS": f'["{path}/adapters"]',
        }

    def __enter__(self) -> _Process:
        self.popen = subprocess.Popen([sys.executable, "-m", "loader_service"], env=self._environment)
        return self

    def __exit__(self, *_: object) -> None:
        self.popen.kill()
        self.popen.wait(10)

    async def ready(self) -> None:
        """Waits until health is SERVING, 20 s at most."""
        deadline = time.monotonic() + 20
        async with make_channel(self.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                try:
                    request = health_pb2.HealthCheckRequest(service="epilora.v1.LoaderService")
                    reply = await stub.Check(request, timeout=5)
                    if reply.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                except grpc.aio.AioRpcError:
                    assert self.popen.poll() is None, "the loader ended"
                assert time.monotonic() < deadline
                await asyncio.sleep(0.1)


async def test_a_loader_wipes_what_a_killed_one_left(tmp_path: Path, request_for: pb.BuildSlicesRequest) -> None:
    cache = tmp_path / "cache"
    with _Process(tmp_path) as process:
        await process.ready()
        async with make_channel(process.address) as channel:
            result = await LoaderClient(channel).build(request_for)
            first_instance = (await LoaderClient(channel).cache()).instance_id
        process.popen.send_signal(signal.SIGKILL)
        process.popen.wait(10)
    assert Path(result.slices[0].path).exists()
    (cache / f"unfinished-{'0' * 32}").mkdir()
    (cache / "somebody-elses").mkdir()
    with _Process(tmp_path) as process:
        await process.ready()
        assert sorted(path.name for path in cache.iterdir()) == [".lock", "somebody-elses"]
        async with make_channel(process.address) as channel:
            loader = LoaderClient(channel)
            assert await loader.release(result.lease_id) == 0
            assert (await loader.cache()).instance_id != first_instance
            assert (await loader.build(request_for)).slices
        process.popen.terminate()
        assert process.popen.wait(10) == 0
    assert sorted(path.name for path in cache.iterdir()) == [".lock", "somebody-elses"]
    assert not (tmp_path / "run" / "loader.sock").exists()
