"""Puts the gateway together, starts it and stops it."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import structlog

from epilora.rpc import Server, start_server
from epilora.settings import GatewaySettings
from epilora.v1 import (
    adapter_service_pb2_grpc,
    cluster_service_pb2_grpc,
    expert_service_pb2_grpc,
    generation_service_pb2_grpc,
)
from gateway.adapter_table import AdapterTable
from gateway.cluster import Cluster
from gateway.experts import Experts
from gateway.generation import Generator
from gateway.in_flight import InFlight
from gateway.keeper import Keeper
from gateway.lifecycle import Lifecycle
from gateway.metrics import Metrics, StateCollector
from gateway.move_gate import MoveGate
from gateway.ranks import Group
from gateway.rebalance import Rebalancer
from gateway.registry import Registry
from gateway.residency import Loader, Residency
from gateway.restore import Restorer
from gateway.router import Router
from gateway.servicers import (
    ADAPTER_SERVICE,
    SERVICE_NAMES,
    AdapterServicer,
    ClusterServicer,
    ExpertServicer,
    GenerationServicer,
)
from gateway.stopping import stopping_error
from gateway.text import Tokenizer

log = structlog.get_logger(__name__)

ENDED_CALLS_SECONDS = 3.0
"""How long calls that were ended may take to tell their callers."""
LAST_WRITES_SECONDS = 0.5
"""Grace for streams that are still open when nothing is in flight any more: reflection."""


class Gateway:
    """One gateway. `start`, then `drain` or `stop`, once."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._registry = Registry(settings.state_dir)
        self._table = AdapterTable()
        self._in_flight = InFlight()
        self._loader = Loader(settings)
        self._metrics = Metrics()
        self.group = Group(settings, self._in_flight, self._group_changed)
        residency, gate = Residency(settings, self.group), MoveGate()
        self._lifecycle = Lifecycle(
            settings=settings,
            group=self.group,
            loader=self._loader,
            residency=residency,
            registry=self._registry,
            table=self._table,
            gate=gate,
        )
        self._rebalancer = Rebalancer(
            settings=settings,
            group=self.group,
            loader=self._loader,
            residency=residency,
            registry=self._registry,
            table=self._table,
            lifecycle=self._lifecycle,
            gate=gate,
        )
        self._restorer = Restorer(
            group=self.group,
            registry=self._registry,
            table=self._table,
            lifecycle=self._lifecycle,
            rebalancer=self._rebalancer,
        )
        self._keeper = Keeper(
            group=self.group,
            in_flight=self._in_flight,
            lifecycle=self._lifecycle,
            rebalancer=self._rebalancer,
            restorer=self._restorer,
            publish=self._publish,
        )
        router = Router(self.group, self._in_flight)
        self._generator = Generator(
            keeper=self._keeper,
            group=self.group,
            router=router,
            table=self._table,
            in_flight=self._in_flight,
            metrics=self._metrics,
        )
        self._experts = Experts(
            keeper=self._keeper,
            group=self.group,
            router=router,
            table=self._table,
            in_flight=self._in_flight,
            max_messages=settings.max_expert_messages,
        )
        self._cluster = Cluster(group=self.group, keeper=self._keeper, timeout_seconds=settings.probe_timeout_seconds)
        self._metrics.registry.register(
            StateCollector(group=self.group, table=self._table, in_flight=self._in_flight, loader=self._loader)
        )
        self._server: Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.address = ""
        """host:port of the public services, once started."""
        self.metrics_address = ""
        """host:port of the metrics, once started; empty if there are none."""

    def _group_changed(self) -> None:
        self._keeper.group_changed()

    async def _publish(self, serving: bool) -> None:
        assert self._server is not None
        # Without its loader the gateway generates and lists, but can load nothing.
        can_load = serving and self._loader.cache is not None
        await self._server.set_serving(["", *(name for name in SERVICE_NAMES if name != ADAPTER_SERVICE)], serving)
        await self._server.set_serving([ADAPTER_SERVICE], can_load)

    def _register(self, server: Any) -> None:
        adapters = AdapterServicer(self._lifecycle, self._table, self._keeper, self._in_flight)
        adapter_service_pb2_grpc.add_AdapterServiceServicer_to_server(adapters, server)
        generation = GenerationServicer(self._generator, self._in_flight)
        generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(generation, server)
        experts = ExpertServicer(self._experts, self._in_flight)
        expert_service_pb2_grpc.add_ExpertServiceServicer_to_server(experts, server)
        cluster = ClusterServicer(self._cluster, self._rebalancer, self._keeper, self._in_flight)
        cluster_service_pb2_grpc.add_ClusterServiceServicer_to_server(cluster, server)

    async def start(self) -> None:
        """Listens at once, NOT_SERVING until all ranks are up and their adapters restored.

        Raises:
            OSError: an address cannot be bound.
            FailedPreconditionError: the model's tokenizer is broken.
        """
        self._restorer.announce()
        self._server = await start_server(
            self._settings.listen,
            register=self._register,
            service_names=SERVICE_NAMES,
            max_message_bytes=self._settings.max_message_bytes,
            observer=self._metrics.observe,
        )
        self.address = f"{self._settings.listen.rpartition(':')[0]}:{self._server.port}"
        if self._settings.metrics_listen:
            self.metrics_address = self._metrics.listen(self._settings.metrics_listen)
        if self._settings.address_file is not None:
            _write_addresses(self._settings.address_file, self.address, self.metrics_address)
        log.info("listening", address=self.address, metrics=self.metrics_address)
        self._generator.tokenizer = await Tokenizer.load(self._settings.model)
        self._tasks = [
            asyncio.create_task(self._keeper.run()),
            asyncio.create_task(self._loader.look_for_ever(self._keeper.wake)),
        ]
        self.group.start()

    async def drain(self) -> None:
        """Lets what is in flight finish, up to the drain timeout, and ends the rest. From then on the server only tells
        callers that the gateway is stopping. Adapters stay in the ranks."""
        timeout = self._settings.drain_timeout_seconds
        log.info("stopping", num_calls=len(self._in_flight))
        self._keeper.stop()
        self._experts.stop()
        if self._server is not None:
            await self._server.health.enter_graceful_shutdown()
        self._rebalancer.cancel(stopping_error())
        await self._rebalancer.ended()
        await self._lifecycle.stop()
        drained = await self._in_flight.idle(timeout)
        # Calls go on coming while callers hear of the stop: those after this get the same answer.
        self._in_flight.close(
            stopping_error("" if drained else f", and this call had not finished {timeout:g} s later")
        )
        self._table.end_watches(stopping_error())
        await self._in_flight.idle(ENDED_CALLS_SECONDS)
        log.info("stopped")

    async def stop(self) -> None:
        """`drain`, and gives everything back, for a process that goes on.

        One that ends should end right after `drain`: grpc's own stop answers calls that come in meanwhile with
        CANCELLED, while a connection that breaks is UNAVAILABLE to its callers.
        """
        await self.drain()
        if self._server is not None:
            await self._server.server.stop(LAST_WRITES_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.group.stop()
        await self._loader.close()
        await asyncio.to_thread(self._metrics.close)
        self._registry.close()


def _write_addresses(path: Path, listen: str, metrics: str) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps({"listen": listen, "metrics": metrics}))
    os.replace(temporary, path)
