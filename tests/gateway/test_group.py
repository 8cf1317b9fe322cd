"""Ranks that are lost and come back, and gateways that do."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from epilora.errors import FailedPreconditionError
from epilora.rpc import make_channel
from epilora.v1 import adapter_service_pb2, cluster_service_pb2, types_pb2
from gateway.app import Gateway
from gateway.servicers import SERVICE_NAMES
from tests.gateway.conftest import NUM_RANKS, Client, Cluster, crash, refused


async def test_lost_rank_ends_calls_and_adapters_come_back(cluster: Cluster) -> None:
    loaded = await cluster.client.load("a")
    cluster.ranks.token_pause = 0.05
    calls = [asyncio.ensure_future(refused(cluster.client.generate("a", 60))) for _ in range(4)]
    await cluster.script.called("GenerateTokens", 4)
    started = time.monotonic()
    await cluster.ranks.kill(1)
    for service in ("", *SERVICE_NAMES):
        await cluster.client.serving(False, service)
    assert time.monotonic() - started < 5
    for error in await asyncio.wait_for(asyncio.gather(*calls), 5):
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "RANK_LOST")
        assert error.retry_after_seconds
    error = await refused(cluster.client.generate())
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "GROUP_NOT_READY")
    assert "rank 1" in error.message
    assert (await refused(cluster.client.load("b"))).code is grpc.StatusCode.UNAVAILABLE
    assert (await cluster.client.get("a")).state == types_pb2.ADAPTER_STATE_LOADING
    memory = await refused(cluster.client.cluster.GetMemory(cluster_service_pb2.GetMemoryRequest()))
    assert (memory.code, memory.reason) == (grpc.StatusCode.UNAVAILABLE, "RANK_LOST")

    await cluster.ranks.restart_all("incarnation-2")
    await cluster.client.serving()
    cluster.ranks.token_pause = 0.0
    restored = await cluster.client.get("a")
    assert (restored.state, restored.generation, restored.digest) == (
        types_pb2.ADAPTER_STATE_SERVING,
        loaded.generation,
        loaded.digest,
    )
    assert await cluster.client.tokens("a") == [106, 107, 108, 109]
    assert len(cluster.loader.leases) == 1


async def test_silent_rank_is_lost_within_five_seconds(cluster: Cluster) -> None:
    gate = cluster.script.hold("GetWorkerInfo", 1)
    started = time.monotonic()
    await cluster.client.serving(False)
    assert time.monotonic() - started < 5
    gate.set()
    await cluster.client.serving()


async def test_rank_that_was_only_silent_keeps_its_adapters(cluster: Cluster) -> None:
    await cluster.client.load("a")
    gate = cluster.script.hold("GetWorkerInfo", 0)
    await cluster.client.serving(False)
    gate.set()
    await cluster.client.serving()
    assert cluster.script.count("StageAdapter") == 2
    assert cluster.script.count("RetireAdapter") == 0
    assert await cluster.client.tokens("a") == [106, 107, 108, 109]


async def test_load_that_the_group_s_loss_cuts_short(cluster: Cluster) -> None:
    gate = cluster.script.hold("BuildSlices")
    loading = asyncio.ensure_future(refused(cluster.client.load("a")))
    await cluster.script.called("BuildSlices")
    await cluster.ranks.restart_all("incarnation-2")
    error = await asyncio.wait_for(loading, 10)
    assert error.code is grpc.StatusCode.UNAVAILABLE
    gate.set()
    await cluster.client.serving()
    assert cluster.ranks.generations() == [{}, {}]
    assert (await cluster.client.load("a")).state == types_pb2.ADAPTER_STATE_SERVING


async def test_load_ends_with_its_group_although_a_rank_says_nothing(cluster: Cluster) -> None:
    """The caller hears of it as soon as it is known; what has arrived on a rank that comes back is gone by then."""
    gates = [cluster.script.hold(method, 1) for method in ("StageAdapter", "GetWorkerInfo")]
    loading = asyncio.ensure_future(refused(cluster.client.load("a")))
    await cluster.script.called("StageAdapter", 2)
    started = time.monotonic()
    error = await loading
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "RANK_LOST")
    assert time.monotonic() - started < cluster.settings.control_timeout_seconds
    for gate in gates:
        gate.set()
    await cluster.client.serving()
    assert cluster.ranks.generations() == [{}, {}]
    assert not cluster.loader.leases
    assert (await cluster.client.load("a")).state == types_pb2.ADAPTER_STATE_SERVING


async def test_unload_while_the_group_is_lost(cluster: Cluster) -> None:
    await cluster.client.load("a")
    await cluster.client.load("b")
    await cluster.ranks.kill(0)
    await cluster.client.serving(False)
    await cluster.client.unload("a")
    await cluster.ranks.restart_all("incarnation-2")
    await cluster.client.serving()
    assert await cluster.client.names() == ["b"]
    assert [len(slots) for slots in cluster.ranks.generations()] == [1, 1]
    assert len(cluster.loader.leases) == 1


async def test_restored_content_that_changed_is_a_new_generation(cluster: Cluster) -> None:
    await cluster.client.load("a")
    cluster.loader.content = "2"
    await cluster.ranks.restart_all("incarnation-2")
    async with asyncio.timeout(10):
        while (await cluster.client.get("a")).generation == 1:
            await asyncio.sleep(0.02)
    await cluster.client.serving()
    adapter = await cluster.client.get("a")
    assert (adapter.generation, adapter.digest) == (2, "/a/a2")
    assert "changed" in adapter.report.warnings[0]
    assert list(cluster.ranks.generations()[0]) == [2]


async def test_adapter_that_cannot_be_restored_keeps_no_one_else_from_serving(cluster: Cluster) -> None:
    await cluster.client.load("a")
    cluster.script.fail("BuildSlices", FailedPreconditionError("gone", reason="GONE"))
    await cluster.ranks.restart_all("incarnation-2")
    async with asyncio.timeout(10):
        while (await cluster.client.get("a")).state != types_pb2.ADAPTER_STATE_FAILED:
            await asyncio.sleep(0.02)
    await cluster.client.serving()
    assert (await cluster.client.get("a")).failure.reason == "GONE"
    assert await cluster.client.tokens() == [6, 7, 8, 9]
    cluster.script.faults.clear()
    await cluster.ranks.restart_all("incarnation-3")
    async with asyncio.timeout(10):
        while (await cluster.client.get("a")).state != types_pb2.ADAPTER_STATE_SERVING:
            await asyncio.sleep(0.02)


async def test_restarted_gateway_adopts_what_the_ranks_hold(cluster: Cluster) -> None:
    before = await cluster.client.load("a")
    cluster.ranks.slots = [{**slots, 77: 5} for slots in cluster.ranks.slots]
    cluster.ranks.names[77] = "stranger"
    await cluster.restart_gateway()
    await cluster.client.serving()
    after = await cluster.client.get("a")
    assert (after.generation, after.adapter_slot, after.digest, after.report, after.resident_bytes) == (
        before.generation,
        before.adapter_slot,
        before.digest,
        before.report,
        before.resident_bytes,
    )
    assert after.serving_since == before.serving_since
    assert cluster.script.count("StageAdapter") == 2
    assert cluster.ranks.generations() == [{1: 0}, {1: 0}]
    assert await cluster.client.tokens("a") == [106, 107, 108, 109]
    assert (await cluster.client.load("b")).generation > 1
    await cluster.client.unload("a")
    assert len(cluster.loader.leases) == 1


async def test_killed_gateway_leaves_nothing_of_the_load_it_was_doing(cluster: Cluster) -> None:
    await cluster.client.load("a")
    await cluster.gateway.stop()
    address_file = cluster.settings.run_dir / "addresses.json"
    settings = cluster.settings.model_copy(update={"address_file": address_file})
    fields = settings.model_dump(mode="json", exclude_defaults=True)
    environment = {**os.environ, **{f"EPILORA_{key.upper()}": str(value) for key, value in fields.items()}}

    async def start() -> tuple[asyncio.subprocess.Process, Client]:
        address_file.unlink(missing_ok=True)
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "gateway", env=environment)
        async with asyncio.timeout(20):
            while not address_file.exists():
                await asyncio.sleep(0.05)
        client = Client(make_channel(json.loads(address_file.read_text())["listen"]))
        await client.serving()
        return process, client

    process, client = await start()
    cluster.script.hold("StageAdapter", 1)
    loading = asyncio.ensure_future(refused(client.load("b")))
    await cluster.script.called("StageAdapter", 4)
    assert len(cluster.loader.leases) == 2
    process.kill()
    await process.wait()
    assert (await loading).code is grpc.StatusCode.UNAVAILABLE
    await client.channel.close()
    cluster.script.gates.pop(("StageAdapter", 1)).set()
    process, client = await start()
    assert await client.names() == ["a"]
    async with asyncio.timeout(5):
        while len(cluster.loader.leases) != 1:
            await asyncio.sleep(0.02)
    assert list(cluster.ranks.generations()[0]) == [1]
    assert (await client.load("c")).generation == 3
    process.terminate()
    assert await asyncio.wait_for(process.wait(), 10) == 0
    await client.channel.close()
    cluster.gateway = Gateway(cluster.settings)
    await cluster.gateway.start()


async def test_adapters_are_loading_until_a_new_gateway_has_restored_them(cluster: Cluster) -> None:
    """Nothing says that they are not there; one that is unloaded meanwhile is gone from the ranks, too."""
    loaded = [await cluster.client.load(name) for name in ("a", "b")]
    gates = [cluster.script.hold("GetWorkerInfo", ep_rank) for ep_rank in range(NUM_RANKS)]
    await cluster.restart_gateway()
    client = cluster.client
    assert await client.names() == ["a", "b"]
    waiting = await client.get("a")
    assert (waiting.state, waiting.generation) == (types_pb2.ADAPTER_STATE_LOADING, loaded[0].generation)
    watch = client.adapters.WatchAdapter(adapter_service_pb2.WatchAdapterRequest(name="a"), timeout=10)
    assert (await watch.read()).adapter.state == types_pb2.ADAPTER_STATE_LOADING
    assert (await refused(client.generate("a"))).reason == "GROUP_NOT_READY"
    assert (await refused(client.load("a"))).reason == "GROUP_NOT_READY"
    await client.unload("b")
    assert await client.names() == ["a"]
    assert (await refused(client.get("b"))).reason == "ADAPTER_NOT_FOUND"
    assert [list(held) for held in cluster.ranks.generations()] == [[loaded[0].generation]] * NUM_RANKS

    for gate in gates:
        gate.set()
    while (response := await watch.read()).adapter.state != types_pb2.ADAPTER_STATE_SERVING:
        assert response.adapter.state == types_pb2.ADAPTER_STATE_LOADING
    watch.cancel()
    await client.serving()
    assert await client.tokens("a") == [106, 107, 108, 109]
    assert await client.names() == ["a"]
    assert len(cluster.loader.leases) == 1


async def test_registry_is_owned_once_and_never_silently_empty(cluster: Cluster) -> None:
    with pytest.raises(FailedPreconditionError, match="another gateway") as caught:
        Gateway(cluster.settings)
    assert caught.value.reason == "REGISTRY_IN_USE"
    await cluster.client.load("a")
    path = cluster.settings.state_dir / "registry.json"
    good = path.read_text()
    other = cluster.settings.model_copy(update={"state_dir": cluster.settings.state_dir / "other"})
    other.state_dir.mkdir()
    for bad in ("", good[:-20], "[]", good.replace('"version": 1', '"version": 9'), '{"adapters": {"a": 1}}'):
        (other.state_dir / "registry.json").write_text(bad)
        with pytest.raises(FailedPreconditionError) as caught:
            Gateway(other)
        assert caught.value.reason == "REGISTRY_CORRUPT"
    assert json.loads(good)["adapters"]["a"]["source"] == "/a/a"


async def test_topology_placement_and_routing(cluster: Cluster) -> None:
    topology = await cluster.client.cluster.GetTopology(cluster_service_pb2.GetTopologyRequest())
    [group] = topology.groups
    assert (group.ready, group.model.model_type, group.placement_id) == (True, "qwen3_moe", "placement-1")
    assert [(rank.ep_rank, rank.ready, rank.pid) for rank in group.ranks] == [(0, True, 1), (1, True, 2)]
    placement = await cluster.client.cluster.GetPlacement(cluster_service_pb2.GetPlacementRequest())
    assert placement.placement_id == "placement-1"
    missing = cluster_service_pb2.GetPlacementRequest(group_id=3)
    assert (await refused(cluster.client.cluster.GetPlacement(missing))).code is grpc.StatusCode.NOT_FOUND
    cluster.ranks.token_pause = 0.05
    calls = [cluster.client.generate(max_tokens=10) for _ in range(6)]
    ranks = [(await call.read()).ep_rank for call in calls]
    assert sorted(ranks) == [0, 0, 0, 1, 1, 1]
    for call in calls:
        call.cancel()


async def test_stop_finishes_calls_and_ends_watchers(cluster: Cluster) -> None:
    await cluster.client.load("a")
    from grpc_health.v1 import health_pb2

    health = cluster.client.health.Watch(health_pb2.HealthCheckRequest())
    first = await health.read()
    assert first.status == health_pb2.HealthCheckResponse.SERVING
    watch = cluster.client.adapters.WatchAdapter(adapter_service_pb2.WatchAdapterRequest(name="a"))
    await watch.read()
    reflection = reflection_pb2_grpc.ServerReflectionStub(cluster.client.channel).ServerReflectionInfo()
    await reflection.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    await reflection.read()
    cluster.ranks.token_pause = 0.02
    generating = asyncio.ensure_future(cluster.client.tokens("a", 20))
    await cluster.script.called("GenerateTokens")
    started = time.monotonic()
    # Not `stop`, which would end what the drain has left open: the process ends right after its drain.
    draining = asyncio.ensure_future(cluster.gateway.drain())
    assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    late = await refused(cluster.client.generate())
    assert late.reason == "SHUTTING_DOWN"
    assert not watch.done()
    assert len(await generating) == 20
    await draining
    ended = await asyncio.wait_for(refused(asyncio.ensure_future(watch.read())), 1)
    assert (ended.code, ended.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
    assert ended.retry_after_seconds
    later = cluster.client.adapters.WatchAdapter(adapter_service_pb2.WatchAdapterRequest(name="a"))
    assert (await refused(later)).reason == "SHUTTING_DOWN"
    assert time.monotonic() - started < 3
    await crash(cluster.gateway)
    assert list(cluster.ranks.generations()[0]) == [1]
    cluster.gateway = Gateway(cluster.settings)
    await cluster.gateway.start()


async def test_one_health_watcher_leaving_does_not_blind_the_other(cluster: Cluster) -> None:
    from grpc_health.v1 import health_pb2

    one, two = (cluster.client.health.Watch(health_pb2.HealthCheckRequest()) for _ in range(2))
    await one.read()
    await two.read()
    one.cancel()
    await asyncio.sleep(0.1)
    await cluster.ranks.kill(1)
    observed = await asyncio.wait_for(two.read(), 5)
    assert observed.status == health_pb2.HealthCheckResponse.NOT_SERVING
    await cluster.ranks.restart_all("incarnation-2")
