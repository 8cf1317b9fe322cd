"""Moves to another placement: all ranks and adapters or nothing, whatever fails and whoever gives up."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from epilora.errors import FailedPreconditionError, ResourceExhaustedError
from epilora.placement import ExpertPlacement
from epilora.v1 import cluster_service_pb2, types_pb2
from tests.gateway.conftest import Cluster, refused
from tests.gateway.scripted import MOVED_BYTES, SLICE_BYTES

LINEAR = ExpertPlacement.of_experts("linear", {0: 3, 2: 3}, 2)
MOVED = ExpertPlacement(strategy="explicit", num_ranks=2, tables=dict.fromkeys(LINEAR.layers, ((2, 0), (1, 0))))


@pytest_asyncio.fixture
async def placed(cluster: Cluster) -> Cluster:
    """A group with a placement that can be changed, and two adapters."""
    cluster.ranks.place(LINEAR)
    async with asyncio.timeout(5):
        while await running(cluster) != LINEAR.placement_id:
            await asyncio.sleep(0.01)
    for name in ("a", "b"):
        await cluster.client.load(name)
    return cluster


async def running(cluster: Cluster) -> str:
    request = cluster_service_pb2.GetPlacementRequest()
    return (await cluster.client.cluster.GetPlacement(request)).placement_id


def rebalance(cluster: Cluster, placement: ExpertPlacement | None = MOVED, **options: Any) -> Any:
    request = cluster_service_pb2.RebalanceRequest(num_redundant_experts=0 if placement else 1)
    if placement is not None:
        request.layers.extend(placement.to_proto().layers)
    return cluster.client.cluster.Rebalance(request, **options)


async def stays(cluster: Cluster) -> None:
    """Everything is as before: placement, leases, adapters; and nothing is prepared."""
    async with asyncio.timeout(5):
        while cluster.ranks.prepared != [None, None] or len(cluster.loader.leases) != 2:
            await asyncio.sleep(0.01)
    assert cluster.ranks.placement == LINEAR
    assert cluster.ranks.moved == [set(), set()]
    assert await cluster.client.tokens("a") == [106, 107, 108, 109]
    assert (await cluster.client.get("b")).resident_bytes == 2 * SLICE_BYTES
    # And it can be tried again.
    cluster.script.faults.clear()
    for gate in cluster.script.gates.values():
        gate.set()
    async with asyncio.timeout(5):
        while (answer := await unless_busy(cluster)) is None:
            await asyncio.sleep(0.01)
    assert answer.placement_id == MOVED.placement_id


async def unless_busy(cluster: Cluster) -> cluster_service_pb2.RebalanceResponse | None:
    """A caller that gave up may be back before all is undone."""
    try:
        return await rebalance(cluster)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.ABORTED:
            raise
        return None


async def test_everything_moves(placed: Cluster) -> None:
    leases = set(placed.loader.leases)
    answer = await rebalance(placed)
    assert (answer.previous_placement_id, answer.placement_id) == (LINEAR.placement_id, MOVED.placement_id)
    assert (answer.step, answer.num_experts_read, answer.num_adapters) == (9, 6, 2)
    # Before: ranks have 11 rows and 1. After: expert 0 is halved, so 6 and 6.
    assert answer.spread_before == pytest.approx(11 / 6)
    assert answer.spread_planned == pytest.approx(1.0)
    assert await running(placed) == MOVED.placement_id
    assert len(placed.loader.leases) == 2
    assert not placed.loader.leases & leases
    state = json.loads((placed.settings.state_dir / "registry.json").read_text())
    assert {entry["lease_id"] for entry in state["adapters"].values()} == placed.loader.leases == set(state["leases"])
    assert (await placed.client.get("a")).resident_bytes == 2 * MOVED_BYTES
    # Loads and unloads go on under the new placement.
    assert (await placed.client.load("c")).state == types_pb2.ADAPTER_STATE_SERVING
    for name in ("a", "b", "c"):
        await placed.client.unload(name)
    assert placed.loader.leases == set()
    assert placed.ranks.generations() == [{}, {}]


async def test_without_layers_the_rows_decide(placed: Cluster) -> None:
    answer = await rebalance(placed, None)
    assert placed.ranks.placement is not None
    assert placed.ranks.placement.num_copies(0).tolist() == [2, 1, 1]
    assert answer.spread_planned == pytest.approx(1.0)
    assert answer.placement_id == placed.ranks.placement_id


async def test_the_placement_that_runs_is_no_work(placed: Cluster) -> None:
    answer = await rebalance(placed, LINEAR)
    assert (answer.placement_id, answer.step) == (LINEAR.placement_id, 0)
    assert placed.script.count("PreparePlacement") == 0


@pytest.mark.parametrize(
    "method, ep_rank",
    [
        ("PreparePlacement", 0),
        ("PreparePlacement", 1),
        ("BuildSlices", 0),
        ("StageAdapter", 0),
        ("StageAdapter", 1),
        ("TakePlacement", 0),
    ],
)
async def test_failure_at_any_stage_leaves_the_old_placement(placed: Cluster, method: str, ep_rank: int) -> None:
    placed.script.fail(method, ResourceExhaustedError("no room", reason="FULL"), ep_rank)
    error = await refused(rebalance(placed))
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "FULL")
    await stays(placed)


@pytest.mark.parametrize("method", ["PreparePlacement", "BuildSlices", "StageAdapter"])
@pytest.mark.parametrize("how", ["cancelled", "deadline"])
async def test_a_caller_that_gives_up_leaves_the_old_placement(placed: Cluster, method: str, how: str) -> None:
    gate = placed.script.hold(method, 1 if method != "BuildSlices" else 0)
    seen = placed.script.count(method)
    call = rebalance(placed, timeout=0.4 if how == "deadline" else None)
    if how == "cancelled":
        await placed.script.called(method, seen + 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    else:
        assert (await refused(call)).code is grpc.StatusCode.DEADLINE_EXCEEDED
    if method == "StageAdapter":
        # A rank that still copies is let finish first, up to the control timeout.
        gate.set()
    await stays(placed)


async def test_the_gateways_own_deadline(placed: Cluster) -> None:
    placed.settings = placed.settings.model_copy(update={"rebalance_timeout_seconds": 0.3})
    await placed.restart_gateway()
    await placed.client.serving()
    placed.script.hold("PreparePlacement")
    error = await refused(rebalance(placed))
    assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "REBALANCE_TIMEOUT")
    await stays(placed)


async def test_lost_rank_in_the_middle(placed: Cluster) -> None:
    placed.script.hold("PreparePlacement", 1)
    call = rebalance(placed)
    await placed.script.called("PreparePlacement", 2)
    await placed.ranks.kill(1)
    error = await refused(call)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "RANK_LOST")
    placed.script.gates.clear()
    await placed.ranks.restart_all("incarnation-2")
    await placed.client.serving()
    await stays(placed)


async def test_answer_lost_after_the_ranks_took_it_up(placed: Cluster) -> None:
    """The ranks say which placement runs, not the call that failed."""
    original = type(placed.ranks).place

    def place(placement: ExpertPlacement) -> None:
        original(placed.ranks, placement)
        raise FailedPreconditionError("the answer got lost", reason="LOST")

    placed.ranks.place = place  # type: ignore[method-assign]
    answer = await rebalance(placed)
    assert answer.placement_id == MOVED.placement_id == await running(placed)
    assert len(placed.loader.leases) == 2
    assert (await placed.client.get("a")).resident_bytes == 2 * MOVED_BYTES


async def test_one_at_a_time_and_loads_wait(placed: Cluster) -> None:
    gate = placed.script.hold("StageAdapter", 1)
    seen = placed.script.count("StageAdapter")
    first = asyncio.ensure_future(rebalance(placed))
    await placed.script.called("StageAdapter", seen + 1)
    assert (await refused(rebalance(placed))).reason == "REBALANCE_BUSY"
    load = asyncio.ensure_future(placed.client.load("c"))
    assert await placed.client.tokens("a") == [106, 107, 108, 109]
    assert not load.done()
    gate.set()
    await first
    assert (await load).state == types_pb2.ADAPTER_STATE_SERVING


async def test_files_that_changed_are_named(placed: Cluster) -> None:
    placed.loader.content = "2"
    error = await refused(rebalance(placed))
    assert (error.reason, error.metadata["adapter"]) == ("ADAPTER_SOURCE_CHANGED", "a")
    placed.loader.content = "1"
    await stays(placed)


async def test_an_adapter_that_is_going_away_is_waited_for(placed: Cluster) -> None:
    """Its files may be others by now; the rest moves when it is gone."""
    placed.ranks.token_pause = 0.02
    long = asyncio.ensure_future(placed.client.tokens("a", 20))
    await placed.script.called("GenerateTokens")
    unloading = asyncio.ensure_future(placed.client.unload("a"))
    await asyncio.sleep(0.05)
    assert (await placed.client.get("a")).state == types_pb2.ADAPTER_STATE_DRAINING
    placed.script.fail("StageAdapter", ResourceExhaustedError("no room", reason="FULL"), 1)
    moving = asyncio.ensure_future(rebalance(placed))
    await placed.script.called("BuildSlices", 3)
    await asyncio.sleep(0.05)
    placed.script.faults.clear()
    assert len(await long) == 20
    await unloading
    assert (await moving).placement_id == MOVED.placement_id
    assert len(placed.loader.leases) == 1


async def test_a_new_gateway_drops_what_the_one_before_left(placed: Cluster) -> None:
    placed.script.hold("StageAdapter", 1)
    seen = placed.script.count("StageAdapter")
    call = rebalance(placed)
    await placed.script.called("StageAdapter", seen + 1)
    await placed.restart_gateway()
    call.cancel()
    placed.script.gates["StageAdapter", 1].set()
    await placed.client.serving()
    await stays(placed)


@pytest.mark.parametrize(
    "tables",
    [
        {0: ((0, 1), (2,))},
        {0: ((0, 1), (2,)), 2: ((0, 1), (1,))},
        {0: ((0, 1), (2,)), 2: ((0, 1), (2, 3))},
        {0: ((0, 1, 2),), 2: ((0, 1, 2),)},
    ],
    ids=["layer missing", "expert nowhere", "no such expert", "ranks missing"],
)
async def test_bad_placements(placed: Cluster, tables: dict[int, Any]) -> None:
    request = cluster_service_pb2.RebalanceRequest()
    for layer, ranks in tables.items():
        request.layers.add(layer=layer, ranks=[cluster_service_pb2.LocalExperts(experts=rank) for rank in ranks])
    error = await refused(placed.client.cluster.Rebalance(request))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_PLACEMENT")
    assert placed.script.count("PreparePlacement") == 0
