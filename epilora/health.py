"""grpc.health.v1 with watchers that do not disturb each other and that end when the server stops."""

from __future__ import annotations

import asyncio
from typing import Any

from grpc_health.v1 import health, health_pb2


class HealthServicer(health.aio.HealthServicer):  # type: ignore[misc]
    """The library's servicer with its own Watch.

    The library keeps one condition per service and drops it when any watcher leaves, so that the
    others hear nothing more; and its watchers stay open for ever, which makes a graceful stop of
    the server wait its whole grace.
    """

    def __init__(self) -> None:
        super().__init__()
        self._changed: set[asyncio.Event] = set()

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:  # noqa: N802
        """Sends the status now and at every change, until the caller leaves or the server stops."""
        changed = asyncio.Event()
        self._changed.add(changed)
        unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        last = None
        try:
            while True:
                changed.clear()
                status = self._server_status.get(request.service, unknown)
                if status != last:
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                    last = status
                elif self._gracefully_shutting_down:
                    return
                else:
                    await changed.wait()
        finally:
            self._changed.discard(changed)

    async def _set(self, service: str, status: int) -> None:
        self._server_status[service] = status
        for changed in self._changed:
            changed.set()
