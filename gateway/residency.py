"""The calls to loader and workers that move one adapter's slices; decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import structlog

from epilora.errors import EpiloraError, InternalError, NotFoundError, UnavailableError
from epilora.rpc import error_from, make_channel
from epilora.settings import GatewaySettings
from epilora.v1 import (
    cluster_service_pb2,
    loader_service_pb2,
    loader_service_pb2_grpc,
    types_pb2,
    worker_service_pb2,
)
from gateway.adapter_table import Generation
from gateway.ranks import RETRY_AFTER_SECONDS, Group

log = structlog.get_logger(__name__)

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


class Loader:
    """The node's loader."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self.address = settings.loader_address_resolved()
        self._channel = make_channel(self.address, max_message_bytes=settings.max_message_bytes)
        self._stub: Any = loader_service_pb2_grpc.LoaderServiceStub(self._channel)
        self.cache: loader_service_pb2.GetCacheResponse | None = None
        """Its cache when it was last looked at; None while it does not answer."""

    async def build(
        self, request: loader_service_pb2.BuildSlicesRequest, progress: Progress
    ) -> loader_service_pb2.BuildResult:
        """Builds or finds the slices; the result holds a lease."""
        result: loader_service_pb2.BuildResult | None = None
        try:
            async for response in self._stub.BuildSlices(request):
                if response.HasField("progress"):
                    progress(response.progress.bytes_done, response.progress.bytes_total)
                else:
                    result = response.result
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from error
        if result is None or len(result.slices) != len(request.load_specs):
            raise InternalError("the loader ended a build without one slice per rank", reason="BAD_BUILD_RESULT")
        return result

    async def release(self, lease_id: str) -> None:
        """Gives a lease back."""
        request = loader_service_pb2.ReleaseSlicesRequest(lease_id=lease_id)
        try:
            await self._stub.ReleaseSlices(request, timeout=self._settings.control_timeout_seconds)
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from error

    async def look_for_ever(self, on_change: Callable[[], None]) -> None:
        """Keeps `cache` up to date.

        Args:
            on_change: called when the loader comes or goes.
        """
        while True:
            was_there = self.cache is not None
            try:
                request = loader_service_pb2.GetCacheRequest()
                self.cache = await self._stub.GetCache(request, timeout=self._settings.probe_timeout_seconds)
            except grpc.aio.AioRpcError:
                self.cache = None
            if was_there != (self.cache is not None):
                on_change()
            await asyncio.sleep(self._settings.probe_interval_seconds)

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()

    def _error(self, error: grpc.aio.AioRpcError) -> EpiloraError:
        mapped = error_from(error)
        if isinstance(mapped, UnavailableError) and mapped.reason == "UNAVAILABLE":
            return UnavailableError(
                f"the loader at {self.address} does not answer ({mapped.message}); serving goes on, try the load again",
                reason="LOADER_UNAVAILABLE",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        return mapped


class Residency:
    """Puts adapters into the ranks' memory and takes them out."""

    def __init__(self, settings: GatewaySettings, group: Group) -> None:
        self._timeout = settings.control_timeout_seconds
        self._group = group

    async def stage(
        self, name: str, generation: int, slices: list[loader_service_pb2.Slice], staged: Callable[[int], None]
    ) -> int:
        """Copies every rank's slice to it, all at once; the bytes resident on all ranks together.

        Args:
            staged: called with the bytes of each slice that has arrived.

        Raises:
            EpiloraError: of the first rank that failed, after every rank has answered.
        """

        # Ranks that share their experts copy their parts of one slice.
        sharing = len(self._group.ranks) // len(slices)

        async def stage_one(ep_rank: int, piece: loader_service_pb2.Slice) -> int:
            request = worker_service_pb2.StageAdapterRequest(name=name, generation=generation, slice=piece)
            response = await self._call(ep_rank, "StageAdapter", request, timeout=None)
            staged(piece.tensor_bytes // sharing)
            return int(response.resident_bytes)

        calls = [
            asyncio.ensure_future(stage_one(rank.ep_rank, slices[rank.ep_rank // sharing]))
            for rank in self._group.ranks
        ]
        try:
            await asyncio.wait(calls)
        except asyncio.CancelledError:
            # A rank that still copies would keep its slice after the discard that follows: let it finish first.
            await asyncio.wait(calls, timeout=self._timeout)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            raise
        return sum([call.result() for call in calls])

    async def activate(self, generation: int) -> int:
        """Makes a staged generation visible on every rank at one step; its slot."""
        request = worker_service_pb2.ActivateAdapterRequest(generation=generation)
        response = await self._call(0, "ActivateAdapter", request, timeout=self._timeout)
        return int(response.adapter_slot)

    async def retire(self, generation: int) -> bool:
        """Takes an active generation away on every rank at one step and frees it; False if it was not active."""
        request = worker_service_pb2.RetireAdapterRequest(generation=generation)
        try:
            response = await self._call(0, "RetireAdapter", request, timeout=self._timeout)
        except NotFoundError:
            return False
        return bool(response.step)

    async def discard(self, generation: int) -> None:
        """Frees a generation that was staged only, on every rank."""
        request = worker_service_pb2.DiscardAdapterRequest(generation=generation)
        calls = (
            self._call(rank.ep_rank, "DiscardAdapter", request, timeout=self._timeout) for rank in self._group.ranks
        )
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def prepare_placement(
        self, number: int, placement: cluster_service_pb2.GetPlacementResponse
    ) -> list[worker_service_pb2.PreparePlacementResponse]:
        """Has every rank read what a placement brings to it; the answers by rank.

        Raises:
            EpiloraError: of the first rank that failed.
        """
        request = worker_service_pb2.PreparePlacementRequest(move_number=number, placement=placement)
        calls: list[asyncio.Future[worker_service_pb2.PreparePlacementResponse]] = [
            asyncio.ensure_future(self._call(rank.ep_rank, "PreparePlacement", request, timeout=None))
            for rank in self._group.ranks
        ]
        try:
            return list(await asyncio.gather(*calls))
        finally:
            for call in calls:
                call.cancel()

    async def take_placement(self, number: int) -> int:
        """Has all ranks take up what they prepared; their first step under it."""
        request = worker_service_pb2.TakePlacementRequest(move_number=number)
        response = await self._call(0, "TakePlacement", request, timeout=self._timeout)
        return int(response.step)

    async def abandon_placement(self) -> None:
        """Has every rank drop what it prepared.

        Raises:
            EpiloraError: of the first rank that failed, after all were asked.
        """
        request = worker_service_pb2.AbandonPlacementRequest()
        calls = (
            self._call(rank.ep_rank, "AbandonPlacement", request, timeout=self._timeout) for rank in self._group.ranks
        )
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def _call(self, ep_rank: int, method: str, request: Any, *, timeout: float | None) -> Any:
        rank = self._group.ranks[ep_rank]
        try:
            return await getattr(rank.stub, method)(request, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            raise worker_error(self._group, ep_rank, error) from error


def distinct(load_specs: Sequence[types_pb2.MoEEPLoadSpec]) -> list[types_pb2.MoEEPLoadSpec]:
    """One load spec of each rank of the placement, from those of all ranks in order."""
    return list({spec.ep_rank: spec for spec in load_specs}.values())


def build_request(
    generation: Generation,
    load_specs: Sequence[types_pb2.MoEEPLoadSpec],
    info: worker_service_pb2.GetWorkerInfoResponse,
) -> loader_service_pb2.BuildSlicesRequest:
    """What the loader needs to slice a generation's files.

    Args:
        load_specs: of every rank.
        info: of any rank.
    """
    return loader_service_pb2.BuildSlicesRequest(
        source=generation.source,
        load_specs=load_specs,
        dense_modules=info.dense_modules,
        allow_partial=generation.allow_partial,
        model_type=info.model.model_type,
        layout_hints=generation.layout_hints,
    )


def worker_error(group: Group, ep_rank: int, error: grpc.aio.AioRpcError) -> EpiloraError:
    """The exception for a failed call to a worker; a lost connection also has the rank probed at once."""
    mapped = error_from(error)
    if isinstance(mapped, UnavailableError) and mapped.reason == "UNAVAILABLE":
        group.suspect(ep_rank)
        return UnavailableError(
            f"rank {ep_rank} at {group.ranks[ep_rank].address} was lost ({mapped.message}); "
            "try again when the health service says SERVING",
            reason="RANK_LOST",
            retry_after_seconds=RETRY_AFTER_SECONDS,
            metadata={"ep_rank": ep_rank},
        )
    return mapped
