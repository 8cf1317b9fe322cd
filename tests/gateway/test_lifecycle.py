"""Loads and unloads: all ranks or none, whatever fails and whoever gives up."""

from __future__ import annotations

import asyncio
import json

import grpc
import grpc.aio
import pytest

from epilora.errors import AdapterFormatError, ResourceExhaustedError
from epilora.v1 import adapter_service_pb2, types_pb2
from gateway.servicers import ADAPTER_SERVICE, SERVICE_NAMES
from tests.gateway.conftest import Cluster, refused
from tests.gateway.scripted import SLICE_BYTES, running_loader


async def nothing_resident(cluster: Cluster) -> None:
    """Waits until ranks and loader hold nothing."""
    async with asyncio.timeout(5):
        while cluster.ranks.generations() != [{}, {}] or cluster.loader.leases:
            await asyncio.sleep(0.01)


async def test_load_serves_and_unload_frees(cluster: Cluster) -> None:
    adapter = await cluster.client.load("a")
    assert (adapter.state, adapter.generation, adapter.adapter_slot) == (types_pb2.ADAPTER_STATE_SERVING, 1, 0)
    assert adapter.resident_bytes == 2 * SLICE_BYTES
    assert adapter.report.num_tensors == 4
    assert await cluster.client.tokens("a") == [106, 107, 108, 109]
    assert await cluster.client.tokens() == [6, 7, 8, 9]
    unloaded = await cluster.client.unload("a")
    assert (unloaded.freed_bytes, unloaded.num_requests_cancelled) == (2 * SLICE_BYTES, 0)
    assert cluster.ranks.generations() == [{}, {}]
    assert cluster.loader.leases == set()
    assert await cluster.client.names() == []
    error = await refused(cluster.client.generate("a"))
    assert (error.code, error.reason, error.field) == (
        grpc.StatusCode.NOT_FOUND,
        "ADAPTER_NOT_FOUND",
        "adapter_name",
    )
    state = json.loads((cluster.settings.state_dir / "registry.json").read_text())
    assert state["adapters"] == {}
    assert state["leases"] == []


@pytest.mark.parametrize(
    "method, ep_rank", [("BuildSlices", 0), ("StageAdapter", 0), ("StageAdapter", 1), ("ActivateAdapter", 0)]
)
async def test_failure_at_any_stage_leaves_nothing(cluster: Cluster, method: str, ep_rank: int) -> None:
    fault = ResourceExhaustedError("no room", reason="ADAPTER_MEMORY", metadata={"needed": 5})
    cluster.script.fail(method, fault, ep_rank)
    error = await refused(cluster.client.load("a"))
    assert (error.code, error.reason, error.message) == (fault.code, "ADAPTER_MEMORY", "no room")
    assert error.metadata == {"needed": "5"}
    await nothing_resident(cluster)
    adapter = await cluster.client.get("a")
    assert adapter.state == types_pb2.ADAPTER_STATE_FAILED
    assert (adapter.failure.code, adapter.failure.reason) == (8, "ADAPTER_MEMORY")
    blocked = await refused(cluster.client.generate("a"))
    assert (blocked.code, blocked.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "ADAPTER_NOT_SERVING")
    cluster.script.faults.clear()
    assert (await cluster.client.load("a")).state == types_pb2.ADAPTER_STATE_SERVING


@pytest.mark.parametrize("method, ep_rank", [("BuildSlices", 0), ("StageAdapter", 1), ("ActivateAdapter", 0)])
async def test_failed_reload_keeps_the_old_generation(cluster: Cluster, method: str, ep_rank: int) -> None:
    await cluster.client.load("a")
    before = cluster.ranks.generations()
    cluster.script.fail(method, AdapterFormatError("broken", reason="BAD_ADAPTER", field="source"), ep_rank)
    error = await refused(cluster.client.load("a"))
    assert (error.code, error.reason, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_ADAPTER", "source")
    assert cluster.ranks.generations() == before
    assert len(cluster.loader.leases) == 1
    assert (await cluster.client.get("a")).generation == 1
    assert await cluster.client.tokens("a") == [106, 107, 108, 109]


async def test_failed_name_can_be_forgotten_and_does_not_survive_a_restart(cluster: Cluster) -> None:
    cluster.script.fail("BuildSlices", AdapterFormatError("broken", reason="BAD_ADAPTER"))
    await refused(cluster.client.load("a"))
    await refused(cluster.client.load("b"))
    assert await cluster.client.names() == ["a", "b"]
    assert (await cluster.client.unload("a")).freed_bytes == 0
    assert await cluster.client.names() == ["b"]
    await cluster.restart_gateway()
    await cluster.client.serving()
    assert await cluster.client.names() == []


async def test_the_record_has_the_revision_that_was_loaded(cluster: Cluster) -> None:
    cluster.loader.pinned_source = "hf://org/repo@0123"
    adapter = await cluster.client.load("a", source="hf://org/repo")
    assert adapter.source == "hf://org/repo@0123"
    cluster.loader.pinned_source = ""
    await cluster.restart_gateway()
    await cluster.client.serving()
    assert (await cluster.client.get("a")).source == "hf://org/repo@0123"


async def test_what_is_under_way_is_said_in_words(cluster: Cluster) -> None:
    await cluster.client.load("a")
    gate = cluster.script.hold("RetireAdapter")
    unloading = asyncio.ensure_future(cluster.client.unload("a"))
    await cluster.script.called("RetireAdapter")
    error = await refused(cluster.client.load("a"))
    assert error.message.startswith("an unload of adapter 'a' is under way; try the load again")
    gate.set()
    await unloading


async def test_only_one_change_of_a_name_at_a_time(cluster: Cluster) -> None:
    gate = cluster.script.hold("BuildSlices")
    loading = asyncio.ensure_future(cluster.client.load("a"))
    await cluster.script.called("BuildSlices")
    for call in (cluster.client.load("a"), cluster.client.unload("a")):
        error = await refused(call)
        assert (error.code, error.reason) == (grpc.StatusCode.ABORTED, "ADAPTER_BUSY")
    del cluster.script.gates["BuildSlices", 0]
    other = await cluster.client.load("b")
    assert other.state == types_pb2.ADAPTER_STATE_SERVING
    gate.set()
    assert (await loading).state == types_pb2.ADAPTER_STATE_SERVING


@pytest.mark.parametrize("method, ep_rank", [("BuildSlices", 0), ("StageAdapter", 0), ("StageAdapter", 1)])
async def test_cancelled_load_rolls_back(cluster: Cluster, method: str, ep_rank: int) -> None:
    gate = cluster.script.hold(method, ep_rank)
    loading = cluster.client.adapters.LoadAdapter(adapter_service_pb2.LoadAdapterRequest(name="a", source="/a"))
    await cluster.script.called(method, 2 if method == "StageAdapter" else 1)
    loading.cancel()
    await asyncio.sleep(0.1)
    gate.set()
    await nothing_resident(cluster)
    async with asyncio.timeout(5):
        while (await cluster.client.get("a")).state != types_pb2.ADAPTER_STATE_FAILED:
            await asyncio.sleep(0.01)
    assert (await cluster.client.get("a")).failure.reason == "LOAD_CANCELLED"


async def test_load_cancelled_during_activation_completes(cluster: Cluster) -> None:
    gate = cluster.script.hold("ActivateAdapter")
    loading = cluster.client.adapters.LoadAdapter(adapter_service_pb2.LoadAdapterRequest(name="a", source="/a"))
    await cluster.script.called("ActivateAdapter")
    loading.cancel()
    await asyncio.sleep(0.1)
    gate.set()
    async with asyncio.timeout(5):
        while (await cluster.client.get("a")).state != types_pb2.ADAPTER_STATE_SERVING:
            await asyncio.sleep(0.01)
    assert await cluster.client.tokens("a") == [106, 107, 108, 109]


async def test_deadline_in_mid_load_rolls_back(cluster: Cluster) -> None:
    gate = cluster.script.hold("BuildSlices")
    error = await refused(cluster.client.load("a", timeout=0.3))
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    gate.set()
    await nothing_resident(cluster)


async def test_reload_switches_generations_without_mixing(cluster: Cluster) -> None:
    await cluster.client.load("a")
    cluster.ranks.token_pause = 0.02
    old = asyncio.ensure_future(cluster.client.tokens("a", 30))
    await cluster.script.called("GenerateTokens")
    assert (await cluster.client.load("a")).generation == 2
    cluster.ranks.token_pause = 0.0
    assert await cluster.client.tokens("a") == [206, 207, 208, 209]
    assert sorted(cluster.ranks.generations()[0]) == [1, 2]
    assert await old == [106 + i for i in range(30)]
    async with asyncio.timeout(5):
        while sorted(cluster.ranks.generations()[0]) != [2] or len(cluster.loader.leases) != 1:
            await asyncio.sleep(0.01)


async def test_unload_drains_then_cancels(cluster: Cluster) -> None:
    await cluster.client.load("a")
    cluster.ranks.token_pause = 0.05
    long = asyncio.ensure_future(refused(cluster.client.generate("a", 60)))
    short = asyncio.ensure_future(cluster.client.tokens("a", 3))
    await cluster.script.called("GenerateTokens", 2)
    unloading = asyncio.ensure_future(cluster.client.unload("a", 0.5))
    await asyncio.sleep(0.05)
    assert (await cluster.client.get("a")).state == types_pb2.ADAPTER_STATE_DRAINING
    late = await refused(cluster.client.generate("a"))
    assert (late.reason, late.metadata["state"]) == ("ADAPTER_NOT_SERVING", "DRAINING")
    assert (await unloading).num_requests_cancelled == 1
    assert await short == [106, 107, 108]
    error = await long
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "ADAPTER_DRAINED")
    await nothing_resident(cluster)


async def test_stale_placement_is_built_again(cluster: Cluster) -> None:
    cluster.loader.placement_id = "placement-0"
    assert (await cluster.client.load("a")).state == types_pb2.ADAPTER_STATE_SERVING
    assert cluster.script.count("BuildSlices") == 2
    assert len(cluster.loader.leases) == 1


async def test_stale_placement_twice_is_refused(cluster: Cluster) -> None:
    original = cluster.loader.BuildSlices

    async def stale(request: object, context: object) -> None:
        cluster.loader.placement_id = "placement-0"
        await original(request, context)

    cluster.loader.BuildSlices = stale  # type: ignore[method-assign]
    await cluster.loader_server.server.stop(0)
    from tests.gateway.scripted import loader_service_pb2_grpc, start_server

    server = await start_server(
        f"unix:{cluster.settings.run_dir}/loader.sock",
        register=lambda s: loader_service_pb2_grpc.add_LoaderServiceServicer_to_server(cluster.loader, s),
        service_names=[],
    )
    async with asyncio.timeout(5):
        while (error := await refused(cluster.client.load("a"))).reason == "LOADER_UNAVAILABLE":
            await asyncio.sleep(0.05)
    assert error.reason == "STALE_PLACEMENT"
    await nothing_resident(cluster)
    await server.server.stop(0)


async def test_lost_loader_refuses_loads_and_serving_goes_on(cluster: Cluster) -> None:
    await cluster.client.load("a")
    await cluster.loader_server.server.stop(0)
    error = await refused(cluster.client.load("b"))
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "LOADER_UNAVAILABLE")
    assert error.retry_after_seconds
    assert await cluster.client.tokens("a") == [106, 107, 108, 109]
    await cluster.client.serving(False, ADAPTER_SERVICE)
    for service in {"", *SERVICE_NAMES} - {ADAPTER_SERVICE}:
        await cluster.client.serving(True, service)
    async with running_loader(cluster.settings.run_dir, cluster.script):
        await cluster.client.serving(True, ADAPTER_SERVICE)


async def test_watch_sees_every_state(cluster: Cluster) -> None:
    gate = cluster.script.hold("BuildSlices")
    missing = cluster.client.adapters.WatchAdapter(adapter_service_pb2.WatchAdapterRequest(name="a"))
    assert (await refused(missing)).code is grpc.StatusCode.NOT_FOUND
    loading = asyncio.ensure_future(cluster.client.load("a"))
    await cluster.script.called("BuildSlices")
    seen = []

    async def watch() -> None:
        async for observation in cluster.client.adapters.WatchAdapter(
            adapter_service_pb2.WatchAdapterRequest(name="a")
        ):
            seen.append((observation.adapter.state, observation.bytes_done, observation.bytes_total))

    watching = asyncio.ensure_future(watch())
    await asyncio.sleep(0.1)
    gate.set()
    await loading
    await cluster.client.unload("a")
    await asyncio.wait_for(watching, 5)
    states = [state for state, _, _ in seen]
    assert list(dict.fromkeys(states)) == [
        types_pb2.ADAPTER_STATE_LOADING,
        types_pb2.ADAPTER_STATE_STAGED,
        types_pb2.ADAPTER_STATE_SERVING,
        types_pb2.ADAPTER_STATE_DRAINING,
        types_pb2.ADAPTER_STATE_UNLOADED,
    ]
    assert seen[0][1:] == (SLICE_BYTES, 4 * SLICE_BYTES)
    staged = next(observation for observation in seen if observation[0] == types_pb2.ADAPTER_STATE_STAGED)
    assert staged[1:] == (4 * SLICE_BYTES, 4 * SLICE_BYTES)


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "-a", "a" * 129, "a b", "ä", "a\n"])
async def test_bad_names(cluster: Cluster, name: str) -> None:
    error = await refused(
        cluster.client.adapters.LoadAdapter(adapter_service_pb2.LoadAdapterRequest(name=name, source="/a"))
    )
    assert (error.code, error.reason, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_ADAPTER_NAME", "name")
    assert cluster.script.count("BuildSlices") == 0


async def test_paging(cluster: Cluster) -> None:
    names = [f"a{index}" for index in range(5)]
    for name in reversed(names):
        await cluster.client.load(name)
    seen, token = [], ""
    for _ in range(3):
        response = await cluster.client.adapters.ListAdapters(
            adapter_service_pb2.ListAdaptersRequest(page_size=2, page_token=token)
        )
        seen.append([adapter.name for adapter in response.adapters])
        token = response.next_page_token
    assert seen == [names[:2], names[2:4], names[4:]]
    assert token == ""
    for bad in (
        adapter_service_pb2.ListAdaptersRequest(page_size=-1),
        adapter_service_pb2.ListAdaptersRequest(state=77),
        adapter_service_pb2.ListAdaptersRequest(page_token="nonsense!"),
    ):
        assert (await refused(cluster.client.adapters.ListAdapters(bad))).code is grpc.StatusCode.INVALID_ARGUMENT
