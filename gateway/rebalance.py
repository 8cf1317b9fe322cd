"""Moves a serving group to another placement: every rank or none, beside traffic.

Prepare on every rank (base weights, the long part) -> BuildSlices of every resident adapter for the new load specs ->
StageAdapter beside the slices in use -> TakePlacement on ep_rank 0, which all ranks follow at one step. Until then a
failure, a cancellation or a deadline drops what was prepared; from then on it runs to its end.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import structlog

from epilora.balance import balanced_placement, spread
from epilora.errors import (
    AbortedError,
    DeadlineExceededError,
    EpiloraError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)
from epilora.placement import ExpertPlacement, check_table
from epilora.settings import GatewaySettings
from epilora.v1 import cluster_service_pb2, types_pb2
from gateway.adapter_table import DRAINING, AdapterTable, Generation
from gateway.expert_rows import rows_by_expert
from gateway.lifecycle import Lifecycle, to_the_end
from gateway.move_gate import MoveGate
from gateway.ranks import RETRY_AFTER_SECONDS, Group, check_group
from gateway.registry import Registry
from gateway.residency import Loader, Residency, build_request, distinct

log = structlog.get_logger(__name__)

_GONE_POLL_SECONDS = 0.05


@dataclass(slots=True, eq=False)
class _Move:
    """One rebalance.

    Attributes:
        number: of the move, for the ranks.
        leases: of each adapter's slices for the new placement.
        resident_bytes: of each adapter under the new placement, all ranks.
    """

    placement: ExpertPlacement
    number: int = field(default_factory=time.time_ns)
    load_specs: list[types_pb2.MoEEPLoadSpec] = field(default_factory=list)
    num_experts_read: int = 0
    leases: dict[Generation, str] = field(default_factory=dict)
    resident_bytes: dict[Generation, int] = field(default_factory=dict)


class Rebalancer:
    """See the module. One rebalance at a time."""

    def __init__(
        self,
        *,
        settings: GatewaySettings,
        group: Group,
        loader: Loader,
        residency: Residency,
        registry: Registry,
        table: AdapterTable,
        lifecycle: Lifecycle,
        gate: MoveGate,
    ) -> None:
        self._settings = settings
        self._group = group
        self._loader = loader
        self._residency = residency
        self._registry = registry
        self._table = table
        self._lifecycle = lifecycle
        self._gate = gate
        self._task: asyncio.Task[cluster_service_pb2.RebalanceResponse] | None = None
        self._cut_short: EpiloraError | None = None

    async def rebalance(
        self, request: cluster_service_pb2.RebalanceRequest, incarnation: str
    ) -> cluster_service_pb2.RebalanceResponse:
        """Moves the experts.

        Args:
            request: where to.
            incarnation: of the group as it serves now.

        Raises:
            EpiloraError: see ClusterService.Rebalance.
        """
        check_group(request.group_id)
        if self._task is not None:
            raise AbortedError(
                "another rebalance is under way; try again when it has ended",
                reason="REBALANCE_BUSY",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        self._cut_short = None
        task = self._task = asyncio.create_task(self._rebalance(request, incarnation))
        task.add_done_callback(self._ended)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task])
            if self._cut_short is not None:
                raise self._cut_short from None
            raise

    def cancel(self, error: EpiloraError) -> None:
        """Ends the rebalance under way with an error, unless the ranks are taking the placement up already."""
        if self._task is not None:
            self._cut_short = error
            self._task.cancel()

    async def ended(self) -> None:
        """Waits for the rebalance under way."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def abandon(self) -> None:
        """Drops what a gateway before this one left prepared in the ranks.

        Raises:
            EpiloraError: a rank is away, or is taking it up.
        """
        await self._residency.abandon_placement()

    def _ended(self, task: asyncio.Task[cluster_service_pb2.RebalanceResponse]) -> None:
        self._task = None
        if not task.cancelled():
            task.exception()

    async def _rebalance(
        self, request: cluster_service_pb2.RebalanceRequest, incarnation: str
    ) -> cluster_service_pb2.RebalanceResponse:
        infos = self._group.infos()
        running = ExpertPlacement.from_proto(infos[0].placement)
        load = rows_by_expert(infos)
        placement = _placement_of(request, running, load)
        response = cluster_service_pb2.RebalanceResponse(
            placement_id=placement.placement_id,
            previous_placement_id=running.placement_id,
            spread_before=spread(running, load),
            spread_planned=spread(placement, load),
        )
        if placement == running:
            return response
        move = _Move(placement=placement)
        log.info("rebalance begins", placement_id=placement.placement_id, move=move.number)
        try:
            step = await self._move(move, incarnation)
        except BaseException as error:
            log.warning("rebalance failed", move=move.number, why=str(error) or type(error).__name__)
            raise
        response.step, response.num_experts_read = step, move.num_experts_read
        response.num_adapters = len(move.leases)
        log.info("rebalanced", placement_id=placement.placement_id, move=move.number, step=step)
        return response

    async def _move(self, move: _Move, incarnation: str) -> int:
        """The first step under the new placement; or nothing has changed."""
        limit = self._settings.rebalance_timeout_seconds
        begun = time.monotonic()
        try:
            async with asyncio.timeout(limit):
                # Of a rebalance that ended badly.
                await self._residency.abandon_placement()
                prepared = await self._residency.prepare_placement(move.number, move.placement.to_proto())
            move.load_specs = distinct([answer.load_spec for answer in prepared])
            move.num_experts_read = sum(answer.num_experts_read for answer in prepared)
            async with asyncio.timeout(limit - (time.monotonic() - begun)) as deadline, self._gate.move():
                await self._move_adapters(move)
                self._check_same(incarnation)
                deadline.reschedule(None)
                return await to_the_end(self._take(move))
        except TimeoutError as error:
            await to_the_end(self._undo(move))
            raise DeadlineExceededError(
                f"the placement was not prepared within {limit:g} s; the one before stays; raise"
                " EPILORA_REBALANCE_TIMEOUT_SECONDS",
                reason="REBALANCE_TIMEOUT",
            ) from error
        except BaseException:
            await to_the_end(self._undo(move))
            raise

    async def _move_adapters(self, move: _Move) -> None:
        """Brings every resident adapter's new slices to every rank."""
        generations: list[Generation] = []
        for entry in self._table.entries():
            generations += [entry.current] if entry.current is not None else []
            generations += entry.retiring
        for generation in sorted(generations, key=lambda generation: generation.number):
            if not generation.may_be_active:
                continue
            try:
                await self._move_adapter(generation, move)
            except EpiloraError:
                if generation.state == DRAINING:
                    # It is going away, maybe because its files are others now.
                    await _until_gone(generation)
                elif generation.may_be_active:
                    raise

    async def _move_adapter(self, generation: Generation, move: _Move) -> None:
        request = build_request(generation, move.load_specs, self._group.infos()[0])
        try:
            result = await self._loader.build(request, lambda done, total: None)
        except (NotFoundError, InvalidArgumentError, PermissionDeniedError) as error:
            raise _source_changed(generation, error.message) from error
        move.leases[generation] = result.lease_id
        await self._registry.add_lease(result.lease_id)
        if result.adapter_digest != generation.digest:
            raise _source_changed(generation, "its content is another now")
        move.resident_bytes[generation] = await self._residency.stage(
            generation.name, generation.number, list(result.slices), lambda num_bytes: None
        )

    def _check_same(self, incarnation: str) -> None:
        if self._group.incarnation != incarnation:
            raise self._group.not_ready()

    async def _take(self, move: _Move) -> int:
        try:
            step = await self._residency.take_placement(move.number)
        except EpiloraError:
            # Whether it was taken up is known to the ranks alone.
            await self._group.refresh()
            if any(info.placement.placement_id != move.placement.placement_id for info in self._group.infos()):
                raise
            step = max(info.rank.num_steps for info in self._group.infos())
        for generation, lease_id in move.leases.items():
            await self._adopt(generation, lease_id, move.resident_bytes.get(generation, 0))
        await self._group.refresh()
        return step

    async def _adopt(self, generation: Generation, lease_id: str, resident_bytes: int) -> None:
        """The generation's slices are the new ones; the lease of those before goes back."""
        if not generation.may_be_active:
            await self._lifecycle.removal.release(lease_id)
            return
        old, generation.lease_id = generation.lease_id, lease_id
        generation.resident_bytes = resident_bytes
        registered = self._registry.get(generation.name)
        if registered is not None and registered.generation == generation.number:
            await self._registry.put(registered.model_copy(update={"lease_id": lease_id}))
        await self._lifecycle.removal.release(old)

    async def _undo(self, move: _Move) -> None:
        """Drops what was prepared. Ranks that are away hold nothing once they are back."""
        try:
            await self._residency.abandon_placement()
        except UnavailableError:
            pass
        except EpiloraError as error:
            log.error("cannot abandon a placement", move=move.number, why=str(error))
        for lease_id in move.leases.values():
            await self._lifecycle.removal.release(lease_id)


def _placement_of(
    request: cluster_service_pb2.RebalanceRequest, running: ExpertPlacement, load: dict[int, list[int]]
) -> ExpertPlacement:
    """The placement that a request names, or asks to be made from the rows."""
    if not request.layers:
        return balanced_placement(
            load, num_ranks=running.num_ranks, num_redundant_experts=request.num_redundant_experts
        )
    if request.num_redundant_experts:
        raise InvalidArgumentError(
            "num_redundant_experts goes with a placement made from the rows, but layers are given",
            reason="BAD_PLACEMENT",
            field="num_redundant_experts",
        )
    tables = {layer.layer: tuple(tuple(experts.experts) for experts in layer.ranks) for layer in request.layers}
    if len(tables) != len(request.layers) or tuple(sorted(tables)) != running.layers:
        raise InvalidArgumentError(
            f"layers are {[layer.layer for layer in request.layers][:16]}, expected one entry for each of the MoE"
            f" layers {list(running.layers)[:16]}",
            reason="BAD_PLACEMENT",
            field="layers",
        )
    for layer, ranks in tables.items():
        check_table(ranks, len(running.num_copies(layer)), running.num_ranks, where=f"layer {layer}")
    return ExpertPlacement(strategy="explicit", num_ranks=running.num_ranks, tables=tables)


def _source_changed(generation: Generation, why: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"adapter {generation.name!r} cannot be sliced anew from {generation.source}: {why}; reload or unload it, then"
        " rebalance",
        reason="ADAPTER_SOURCE_CHANGED",
        metadata={"adapter": generation.name, "generation": generation.number},
    )


async def _until_gone(generation: Generation) -> None:
    """The rebalance's deadline ends the wait."""
    while generation.may_be_active:
        await asyncio.sleep(_GONE_POLL_SECONDS)
