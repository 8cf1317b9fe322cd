"""What ClusterService tells: the group, its placement, its memory."""

from __future__ import annotations

import asyncio

import grpc.aio

from epilora.placement import ExpertPlacement
from epilora.v1 import cluster_service_pb2, worker_service_pb2
from gateway.expert_rows import adapter_loads, check_one_placement, layer_loads
from gateway.keeper import Keeper
from gateway.ranks import GROUP_ID, Group, Rank, check_group
from gateway.residency import worker_error


class Cluster:
    """Answers ClusterService for the one group of this gateway."""

    def __init__(self, *, group: Group, keeper: Keeper, timeout_seconds: float) -> None:
        self._group = group
        self._keeper = keeper
        self._timeout_seconds = timeout_seconds

    def topology(self) -> cluster_service_pb2.GetTopologyResponse:
        """The group as it was last seen."""
        group = cluster_service_pb2.Group(
            group_id=GROUP_ID, ranks=map(_rank_info, self._group.ranks), ready=self._keeper.serving is not None
        )
        known = next((rank.info for rank in self._group.ranks if rank.info is not None), None)
        if known is not None:
            group.model.CopyFrom(known.model)
            group.placement_id = known.placement.placement_id
        return cluster_service_pb2.GetTopologyResponse(groups=[group])

    def placement(self, group_id: int) -> cluster_service_pb2.GetPlacementResponse:
        """Which rank holds which experts."""
        check_group(group_id)
        return self._group.infos()[0].placement

    async def expert_load(self, group_id: int, *, by_adapter: bool) -> cluster_service_pb2.GetExpertLoadResponse:
        """Rows of every expert, as the ranks reported them last; those of each adapter, as they report them now."""
        check_group(group_id)
        adapters: list[cluster_service_pb2.AdapterExpertLoad] = []
        infos = self._group.infos()
        if by_adapter:
            answers = await asyncio.gather(*(self._adapter_load_of(rank) for rank in self._group.ranks))
            infos = self._group.infos()
            check_one_placement([each.placement_id for each in answers] + [infos[0].placement.placement_id])
            adapters = adapter_loads(ExpertPlacement.from_proto(infos[0].placement), answers)
        check_one_placement([info.placement.placement_id for info in infos])
        placement = ExpertPlacement.from_proto(infos[0].placement)
        return cluster_service_pb2.GetExpertLoadResponse(
            placement_id=placement.placement_id,
            layers=layer_loads(placement, [info.expert_load for info in infos]),
            adapters=adapters,
        )

    async def _adapter_load_of(self, rank: Rank) -> worker_service_pb2.GetAdapterLoadResponse:
        try:
            request = worker_service_pb2.GetAdapterLoadRequest()
            return await rank.stub.GetAdapterLoad(request, timeout=self._timeout_seconds)  # type: ignore[no-any-return]
        except grpc.aio.AioRpcError as error:
            raise worker_error(self._group, rank.ep_rank, error) from error

    async def memory(self, group_id: int) -> cluster_service_pb2.GetMemoryResponse:
        """Asks every rank now."""
        check_group(group_id)
        ranks = await asyncio.gather(*(self._memory_of(rank) for rank in self._group.ranks))
        return cluster_service_pb2.GetMemoryResponse(ranks=ranks)

    async def _memory_of(self, rank: Rank) -> cluster_service_pb2.RankMemory:
        try:
            request = worker_service_pb2.GetWorkerInfoRequest()
            info = await rank.stub.GetWorkerInfo(request, timeout=self._timeout_seconds)
        except grpc.aio.AioRpcError as error:
            raise worker_error(self._group, rank.ep_rank, error) from error
        return info.memory  # type: ignore[no-any-return]


def _rank_info(rank: Rank) -> cluster_service_pb2.RankInfo:
    info = cluster_service_pb2.RankInfo(ep_rank=rank.ep_rank)
    if rank.info is not None:
        info.CopyFrom(rank.info.rank)
    info.address = rank.address
    info.ready = not rank.problem
    return info
