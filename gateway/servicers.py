"""The public services: decode, call, encode. What they do is in the classes they call."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from epilora.errors import InvalidArgumentError
from epilora.v1 import (
    adapter_service_pb2,
    adapter_service_pb2_grpc,
    cluster_service_pb2,
    cluster_service_pb2_grpc,
    expert_service_pb2,
    expert_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
)
from gateway.adapter_table import AdapterTable
from gateway.cluster import Cluster
from gateway.experts import Experts
from gateway.generation import Generator
from gateway.in_flight import InFlight
from gateway.keeper import Keeper
from gateway.lifecycle import Lifecycle
from gateway.listing import list_adapters
from gateway.rebalance import Rebalancer

ADAPTER_SERVICE = "epilora.v1.AdapterService"
SERVICE_NAMES = (
    ADAPTER_SERVICE,
    "epilora.v1.GenerationService",
    "epilora.v1.ExpertService",
    "epilora.v1.ClusterService",
)


async def _send(responses: AsyncGenerator[Any, None], context: Any) -> None:
    # Written here, not yielded to the server: a cancelled call then closes the iterator at once.
    async with aclosing(responses) as open_responses:
        async for response in open_responses:
            await context.write(response)


class AdapterServicer(adapter_service_pb2_grpc.AdapterServiceServicer):
    """AdapterService."""

    def __init__(self, lifecycle: Lifecycle, table: AdapterTable, keeper: Keeper, in_flight: InFlight) -> None:
        self._lifecycle = lifecycle
        self._table = table
        self._keeper = keeper
        self._in_flight = in_flight

    async def LoadAdapter(  # noqa: N802
        self, request: adapter_service_pb2.LoadAdapterRequest, context: Any
    ) -> adapter_service_pb2.LoadAdapterResponse:
        self._in_flight.until_answered(context)
        adapter = await self._lifecycle.load(
            request.name,
            request.source,
            allow_partial=request.allow_partial,
            layout_hints=request.layout_hints,
            incarnation=self._keeper.serving,
        )
        return adapter_service_pb2.LoadAdapterResponse(adapter=adapter)

    async def UnloadAdapter(  # noqa: N802
        self, request: adapter_service_pb2.UnloadAdapterRequest, context: Any
    ) -> adapter_service_pb2.UnloadAdapterResponse:
        self._in_flight.until_answered(context)
        freed, cancelled = await self._lifecycle.unload(request.name, _drain_timeout(request))
        return adapter_service_pb2.UnloadAdapterResponse(freed_bytes=freed, num_requests_cancelled=cancelled)

    async def GetAdapter(  # noqa: N802
        self, request: adapter_service_pb2.GetAdapterRequest, context: Any
    ) -> adapter_service_pb2.GetAdapterResponse:
        return adapter_service_pb2.GetAdapterResponse(adapter=self._table.get(request.name).to_proto())

    async def ListAdapters(  # noqa: N802
        self, request: adapter_service_pb2.ListAdaptersRequest, context: Any
    ) -> adapter_service_pb2.ListAdaptersResponse:
        return list_adapters(self._table, request)

    async def WatchAdapter(  # noqa: N802
        self, request: adapter_service_pb2.WatchAdapterRequest, context: Any
    ) -> None:
        self._in_flight.follows(context)
        await _send(self._table.watch(request.name), context)


def _drain_timeout(request: adapter_service_pb2.UnloadAdapterRequest) -> float | None:
    if not request.HasField("drain_timeout"):
        return None
    seconds = request.drain_timeout.seconds + request.drain_timeout.nanos / 1e9
    if seconds < 0:
        message = f"drain_timeout is {seconds:g} s, expected 0 or more"
        raise InvalidArgumentError(message, reason="BAD_DRAIN_TIMEOUT", field="drain_timeout")
    return seconds


class GenerationServicer(generation_service_pb2_grpc.GenerationServiceServicer):
    """GenerationService."""

    def __init__(self, generator: Generator, in_flight: InFlight) -> None:
        self._generator = generator
        self._in_flight = in_flight

    async def Generate(  # noqa: N802
        self, request: generation_service_pb2.GenerateRequest, context: Any
    ) -> None:
        self._in_flight.until_answered(context)
        await _send(self._generator.generate(request, timeout_seconds=context.time_remaining()), context)


class ExpertServicer(expert_service_pb2_grpc.ExpertServiceServicer):
    """ExpertService."""

    def __init__(self, experts: Experts, in_flight: InFlight) -> None:
        self._experts = experts
        self._in_flight = in_flight

    async def Forward(  # noqa: N802
        self, request_iterator: AsyncIterator[expert_service_pb2.ForwardRequest], context: Any
    ) -> None:
        self._in_flight.until_answered(context)
        await _send(self._experts.forward(request_iterator, timeout_seconds=context.time_remaining()), context)


class ClusterServicer(cluster_service_pb2_grpc.ClusterServiceServicer):
    """ClusterService."""

    def __init__(self, cluster: Cluster, rebalancer: Rebalancer, keeper: Keeper, in_flight: InFlight) -> None:
        self._cluster = cluster
        self._rebalancer = rebalancer
        self._keeper = keeper
        self._in_flight = in_flight

    async def GetTopology(  # noqa: N802
        self, request: cluster_service_pb2.GetTopologyRequest, context: Any
    ) -> cluster_service_pb2.GetTopologyResponse:
        return self._cluster.topology()

    async def GetPlacement(  # noqa: N802
        self, request: cluster_service_pb2.GetPlacementRequest, context: Any
    ) -> cluster_service_pb2.GetPlacementResponse:
        return self._cluster.placement(request.group_id)

    async def GetExpertLoad(  # noqa: N802
        self, request: cluster_service_pb2.GetExpertLoadRequest, context: Any
    ) -> cluster_service_pb2.GetExpertLoadResponse:
        return await self._cluster.expert_load(request.group_id, by_adapter=request.by_adapter)

    async def GetMemory(  # noqa: N802
        self, request: cluster_service_pb2.GetMemoryRequest, context: Any
    ) -> cluster_service_pb2.GetMemoryResponse:
        return await self._cluster.memory(request.group_id)

    async def Rebalance(  # noqa: N802
        self, request: cluster_service_pb2.RebalanceRequest, context: Any
    ) -> cluster_service_pb2.RebalanceResponse:
        self._in_flight.until_answered(context)
        return await self._rebalancer.rebalance(request, self._keeper.require_serving())
