"""A real gateway in this process, on scripted ranks and a scripted loader."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from epilora.errors import EpiloraError
from epilora.rpc import error_from, make_channel
from epilora.settings import GatewaySettings
from epilora.v1 import (
    adapter_service_pb2,
    adapter_service_pb2_grpc,
    cluster_service_pb2_grpc,
    expert_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
    types_pb2,
)
from gateway.app import Gateway
from tests.gateway.scripted import Ranks, Script, ScriptedLoader, running_loader

NUM_RANKS = 2


@dataclass
class Client:
    """Stubs of one gateway."""

    channel: grpc.aio.Channel
    adapters: Any = field(init=False)
    generation: Any = field(init=False)
    experts: Any = field(init=False)
    cluster: Any = field(init=False)
    health: Any = field(init=False)

    def __post_init__(self) -> None:
        self.adapters = adapter_service_pb2_grpc.AdapterServiceStub(self.channel)
        self.generation = generation_service_pb2_grpc.GenerationServiceStub(self.channel)
        self.experts = expert_service_pb2_grpc.ExpertServiceStub(self.channel)
        self.cluster = cluster_service_pb2_grpc.ClusterServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    async def serving(self, expected: bool = True, service: str = "") -> None:
        """Waits for a health status."""
        wanted = health_pb2.HealthCheckResponse.SERVING if expected else health_pb2.HealthCheckResponse.NOT_SERVING
        async with asyncio.timeout(10):
            while True:
                # A channel to a gateway that was started again may still be waiting to connect anew.
                response = await self.health.Check(health_pb2.HealthCheckRequest(service=service), wait_for_ready=True)
                if response.status == wanted:
                    return
                await asyncio.sleep(0.01)

    async def load(self, name: str, source: str | None = None, **options: Any) -> types_pb2.Adapter:
        request = adapter_service_pb2.LoadAdapterRequest(name=name, source=source or f"/a/{name}")
        return (await self.adapters.LoadAdapter(request, **options)).adapter

    async def unload(self, name: str, drain_seconds: float | None = None) -> adapter_service_pb2.UnloadAdapterResponse:
        request = adapter_service_pb2.UnloadAdapterRequest(name=name)
        if drain_seconds is not None:
            request.drain_timeout.FromMilliseconds(int(drain_seconds * 1000))
        return await self.adapters.UnloadAdapter(request)

    async def get(self, name: str) -> types_pb2.Adapter:
        return (await self.adapters.GetAdapter(adapter_service_pb2.GetAdapterRequest(name=name))).adapter

    async def names(self) -> list[str]:
        response = await self.adapters.ListAdapters(adapter_service_pb2.ListAdaptersRequest())
        return [adapter.name for adapter in response.adapters]

    def generate(self, adapter: str = "", max_tokens: int = 4, **options: Any) -> Any:
        request = generation_service_pb2.GenerateRequest(
            token_ids=generation_service_pb2.TokenIds(ids=[5]),
            adapter_name=adapter,
            stop=generation_service_pb2.StopOptions(max_tokens=max_tokens),
        )
        return self.generation.Generate(request, **options)

    async def tokens(self, adapter: str = "", max_tokens: int = 4) -> list[int]:
        return [t async for response in self.generate(adapter, max_tokens) for t in response.token_ids]


@dataclass
class Cluster:
    """Everything a test needs."""

    settings: GatewaySettings
    script: Script
    ranks: Ranks
    loader: ScriptedLoader
    loader_server: Any
    gateway: Gateway
    client: Client

    async def restart_gateway(self) -> None:
        """What a crash and a new start do: nothing is told to ranks or loader."""
        await self.client.channel.close()
        await crash(self.gateway)
        self.gateway = Gateway(self.settings)
        await self.gateway.start()
        self.client = Client(make_channel(self.gateway.address))


async def crash(gateway: Gateway) -> None:
    """Ends a gateway without any of its orderly stop."""
    assert gateway._server is not None
    for task in gateway._tasks:
        task.cancel()
    await gateway.group.stop()
    await gateway._server.server.stop(0)
    gateway._metrics.close()
    gateway._registry.close()


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short, since paths of Unix sockets are limited."""
    with tempfile.TemporaryDirectory(prefix="epl") as directory:
        yield Path(directory)


@pytest.fixture
def settings(run_dir: Path, tmp_path: Path) -> GatewaySettings:
    return GatewaySettings(
        model=tmp_path,
        num_ranks=NUM_RANKS,
        run_dir=run_dir,
        state_dir=tmp_path / "state",
        listen="127.0.0.1:0",
        metrics_listen="",
        probe_interval_seconds=0.05,
        probe_timeout_seconds=0.5,
        drain_timeout_seconds=5.0,
        load_timeout_seconds=10.0,
        control_timeout_seconds=3.0,
        rebalance_timeout_seconds=10.0,
    )


@pytest_asyncio.fixture
async def cluster(settings: GatewaySettings, run_dir: Path) -> AsyncIterator[Cluster]:
    script = Script()
    ranks = Ranks(NUM_RANKS, run_dir, script)
    for ep_rank in range(NUM_RANKS):
        await ranks.start(ep_rank)
    async with running_loader(run_dir, script) as (loader, loader_server):
        gateway = Gateway(settings)
        await gateway.start()
        client = Client(make_channel(gateway.address))
        made = Cluster(settings, script, ranks, loader, loader_server, gateway, client)
        await client.serving()
        yield made
        for gate in script.gates.values():
            gate.set()
        script.faults.clear()
        await made.client.channel.close()
        await made.gateway.stop()
        for ep_rank in range(NUM_RANKS):
            await ranks.kill(ep_rank)


async def refused(call: Any) -> EpiloraError:
    """The error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (_drain(call) if hasattr(call, "__aiter__") else call)
    return error_from(caught.value)


async def _drain(call: Any) -> None:
    async for _ in call:
        pass
