"""LoaderService over gRPC: decode, call, encode."""

from __future__ import annotations

from typing import Any

from epilora.v1 import loader_service_pb2, loader_service_pb2_grpc
from loader_service.builder import SliceBuilds
from loader_service.request import BuildRequest

_PROGRESS_INTERVAL_SECONDS = 0.1


class LoaderServicer(loader_service_pb2_grpc.LoaderServiceServicer):
    """See protos/epilora/v1/loader_service.proto."""

    def __init__(self, builds: SliceBuilds) -> None:
        self._builds = builds

    async def BuildSlices(self, request: loader_service_pb2.BuildSlicesRequest, context: Any) -> None:  # noqa: N802
        """Writes to the context instead of yielding, so that the lease is kept only once the result has gone out."""
        async with self._builds.ticket(BuildRequest.from_proto(request)) as ticket:
            while (built := await ticket.wait(_PROGRESS_INTERVAL_SECONDS)) is None:
                progress = loader_service_pb2.BuildProgress(
                    bytes_done=ticket.progress.bytes_done, bytes_total=ticket.progress.bytes_total
                )
                await context.write(loader_service_pb2.BuildSlicesResponse(progress=progress))
            result = loader_service_pb2.BuildResult(
                lease_id=ticket.lease_id,
                adapter_digest=built.adapter_digest,
                slices=built.slices,
                report=ticket.report(built),
                pinned_source=ticket.pinned_source,
            )
            await context.write(loader_service_pb2.BuildSlicesResponse(result=result))
            ticket.keep()

    async def ReleaseSlices(  # noqa: N802
        self, request: loader_service_pb2.ReleaseSlicesRequest, context: Any
    ) -> loader_service_pb2.ReleaseSlicesResponse:
        freed_bytes = await self._builds.release(request.lease_id)
        return loader_service_pb2.ReleaseSlicesResponse(freed_bytes=freed_bytes)

    async def GetCache(  # noqa: N802
        self, request: loader_service_pb2.GetCacheRequest, context: Any
    ) -> loader_service_pb2.GetCacheResponse:
        state, redis = self._builds.state(), self._builds.redis_counters()
        return loader_service_pb2.GetCacheResponse(
            num_entries=state.num_entries,
            used_bytes=state.used_bytes,
            budget_bytes=state.budget_bytes,
            num_builds=state.num_builds,
            num_leases=state.num_leases,
            instance_id=self._builds.instance_id,
            num_redis_pulls=redis.num_pulled,
            num_redis_pushes=redis.num_pushed,
            num_redis_losses=redis.num_lost,
            num_redis_errors=redis.num_errors,
        )

    async def VerifyCache(  # noqa: N802
        self, request: loader_service_pb2.VerifyCacheRequest, context: Any
    ) -> loader_service_pb2.VerifyCacheResponse:
        found = await self._builds.verify()
        return loader_service_pb2.VerifyCacheResponse(
            num_slices=found.num_slices, num_bytes=found.num_bytes, damaged_paths=found.damaged_paths
        )
