"""A running loader: cache, builds and gRPC server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio
import structlog

from epilora.rpc import Server, start_server
from epilora.settings import LoaderSettings
from epilora.v1 import loader_service_pb2, loader_service_pb2_grpc
from loader_service.builder import SliceBuilds
from loader_service.cache import SliceCache
from loader_service.servicer import LoaderServicer

log = structlog.get_logger(__name__)

SERVICE_NAME = loader_service_pb2.DESCRIPTOR.services_by_name["LoaderService"].full_name
_STOP_GRACE_SECONDS = 2.0


class LoaderServer:
    """Start it, then stop it."""

    def __init__(self, settings: LoaderSettings) -> None:
        self._settings = settings
        self._cache = SliceCache(settings.cache_dir, settings.cache_budget_bytes, idle_bytes=settings.cache_idle_bytes)
        self.builds = SliceBuilds(settings, self._cache)
        self._server: Server | None = None

    async def start(self) -> None:
        """Takes the cache directory, listens, and turns SERVING.

        Raises:
            FailedPreconditionError: reason CACHE_IN_USE.
            OSError: the address or the cache directory cannot be used.
        """
        address = self._settings.loader_listen_resolved()
        if address.startswith("unix:"):
            Path(address.removeprefix("unix:")).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        await asyncio.to_thread(self._cache.open)
        try:
            self._server = await start_server(
                address,
                register=self._register,
                service_names=[SERVICE_NAME],
                max_message_bytes=self._settings.max_message_bytes,
            )
        except BaseException:
            self._cache.close()
            raise
        await self._server.set_serving(["", SERVICE_NAME], True)
        log.info("ready", address=address, cache_dir=str(self._settings.cache_dir))

    def _register(self, server: grpc.aio.Server) -> None:
        servicer = LoaderServicer(self.builds)
        loader_service_pb2_grpc.add_LoaderServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]

    async def stop(self) -> None:
        """Ends calls and builds and removes the cache: the slices on it are of no use without a loader."""
        if self._server is not None:
            await self._server.health.enter_graceful_shutdown()
            await self._server.server.stop(_STOP_GRACE_SECONDS)
        await self.builds.close()
        await asyncio.to_thread(self._cache.close)
