"""The group of ranks as the gateway sees it: who answers, in which incarnation, with what load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import structlog

from epilora.errors import NotFoundError, UnavailableError
from epilora.rpc import make_channel
from epilora.settings import GatewaySettings
from epilora.v1 import worker_service_pb2, worker_service_pb2_grpc
from gateway.in_flight import InFlight

log = structlog.get_logger(__name__)

GROUP_ID = 0
"""The one group of a gateway."""
MAX_MISSED_PROBES = 2
"""A rank that is there but answers no probe in time this often in a row is lost: less could be a pause of its host."""
RETRY_AFTER_SECONDS = 1.0
LOST_PROBE_SECONDS = 0.1
"""Between two looks at a rank that is not ready: it may be back any moment."""


@dataclass(slots=True)
class Rank:
    """One rank."""

    ep_rank: int
    address: str
    stub: Any
    info: worker_service_pb2.GetWorkerInfoResponse | None = None
    """Its last answer, kept while it is lost."""
    problem: str = "it has not answered yet"
    """Why it is not ready; empty if it is."""
    num_missed: int = 0
    num_in_flight_at_probe: int = 0
    """Calls of ours that its last answer counts."""


class Group:
    """Probes every rank and tells when the group comes, goes, or comes back as another incarnation."""

    def __init__(self, settings: GatewaySettings, in_flight: InFlight, on_change: Callable[[], None]) -> None:
        self._settings = settings
        self._in_flight = in_flight
        self._on_change = on_change
        self._channels = [
            make_channel(settings.worker_address_of(ep_rank), max_message_bytes=settings.max_message_bytes)
            for ep_rank in range(settings.num_ranks)
        ]
        self.ranks = [
            Rank(
                ep_rank=ep_rank,
                address=settings.worker_address_of(ep_rank),
                stub=worker_service_pb2_grpc.WorkerServiceStub(channel),
            )
            for ep_rank, channel in enumerate(self._channels)
        ]
        self._wake = [asyncio.Event() for _ in self.ranks]
        self._tasks: list[asyncio.Task[None]] = []
        self.incarnation: str | None = None
        """group_instance_id while all ranks are ready and agree; None otherwise."""
        self.num_restarts = 0
        """Times the group came up as another incarnation than before."""
        self._last_incarnation: str | None = None

    def start(self) -> None:
        """Begins to probe."""
        self._tasks = [asyncio.create_task(self._probe_for_ever(rank)) for rank in self.ranks]

    async def stop(self) -> None:
        """Ends probing and closes the channels."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels:
            await channel.close()

    def problem(self) -> str:
        """Why the group is not ready; empty if it is."""
        problems = [f"rank {rank.ep_rank} at {rank.address}: {rank.problem}" for rank in self.ranks if rank.problem]
        if not problems and self.incarnation is None:
            problems = ["the ranks do not agree on their incarnation yet"]
        return "; ".join(problems)

    def not_ready(self) -> UnavailableError:
        """The error for callers while the group is not ready."""
        return UnavailableError(
            f"the ranks are not ready: {self.problem() or 'adapters are being restored'}",
            reason="GROUP_NOT_READY",
            retry_after_seconds=RETRY_AFTER_SECONDS,
        )

    def suspect(self, ep_rank: int) -> None:
        """Probes a rank now, since a call to it failed."""
        self._wake[ep_rank].set()

    def infos(self) -> list[worker_service_pb2.GetWorkerInfoResponse]:
        """The last answer of every rank. UnavailableError if one has never answered."""
        infos = [rank.info for rank in self.ranks if rank.info is not None]
        if len(infos) < len(self.ranks):
            raise self.not_ready()
        return infos

    async def refresh(self) -> None:
        """Probes every rank once, now."""
        await asyncio.gather(*(self._probe(rank) for rank in self.ranks))

    async def _probe_for_ever(self, rank: Rank) -> None:
        wake = self._wake[rank.ep_rank]
        while True:
            await self._probe(rank)
            if rank.num_missed:
                continue
            interval = self._settings.probe_interval_seconds
            try:
                async with asyncio.timeout(min(interval, LOST_PROBE_SECONDS) if rank.problem else interval):
                    await wake.wait()
            except TimeoutError:
                pass
            wake.clear()

    async def _probe(self, rank: Rank) -> None:
        timeout = self._settings.probe_timeout_seconds
        num_in_flight = self._in_flight.on_rank(rank.ep_rank)
        try:
            info = await rank.stub.GetWorkerInfo(worker_service_pb2.GetWorkerInfoRequest(), timeout=timeout)
        except grpc.aio.AioRpcError as error:
            self._missed(rank, error)
        else:
            rank.num_missed = 0
            rank.info, rank.num_in_flight_at_probe = info, num_in_flight
            rank.problem = self._misfit(rank, info)
        self._evaluate()

    def _missed(self, rank: Rank, error: grpc.aio.AioRpcError) -> None:
        if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            rank.num_missed += 1
            if rank.num_missed < MAX_MISSED_PROBES:
                return
            rank.num_missed = 0
            rank.problem = f"it did not answer within {self._settings.probe_timeout_seconds:g} s"
        else:
            rank.num_missed = 0
            rank.problem = f"it does not answer ({error.code().name}: {error.details()})"

    def _misfit(self, rank: Rank, info: worker_service_pb2.GetWorkerInfoResponse) -> str:
        spec = info.load_spec
        if not info.rank.ready:
            return "it is not ready"
        # Ranks that share their experts have one load spec.
        sharing = len(self.ranks) // spec.num_ep_ranks if spec.num_ep_ranks else 0
        if sharing * spec.num_ep_ranks != len(self.ranks) or spec.ep_rank != rank.ep_rank // sharing:
            return (
                f"it is rank {spec.ep_rank} of {spec.num_ep_ranks}, expected {rank.ep_rank} of {len(self.ranks)}; "
                "gateway and workers must agree on the number of ranks and their addresses"
            )
        return ""

    def _evaluate(self) -> None:
        # Ranks of one incarnation agree on their placement among themselves; they may change it while they are asked.
        identities = {rank.info.group_instance_id for rank in self.ranks if rank.info is not None and not rank.problem}
        all_ready = all(rank.info is not None and not rank.problem for rank in self.ranks)
        incarnation = next(iter(identities)) if all_ready and len(identities) == 1 else None
        if incarnation != self.incarnation:
            self.incarnation = incarnation
            if incarnation is not None:
                self.num_restarts += self._last_incarnation not in (None, incarnation)
                self._last_incarnation = incarnation
            log.info("group changed", incarnation=incarnation, problem=self.problem())
            self._on_change()


def check_group(group_id: int) -> None:
    """NotFoundError unless it is the one group."""
    if group_id != GROUP_ID:
        raise NotFoundError(
            f"there is no group {group_id}, only group {GROUP_ID}", reason="GROUP_NOT_FOUND", field="group_id"
        )
