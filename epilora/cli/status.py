"""`epilora status`."""

from __future__ import annotations

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.text import Text

from epilora.cli.adapters import print_adapters
from epilora.cli.client import DEFAULT_ADDRESS, Address, Timeout, connected, rpc_error
from epilora.cli.output import EXIT_UNAVAILABLE, console, error_console, format_bytes, plain
from epilora.cli.tables import print_table
from epilora.v1 import (
    adapter_service_pb2,
    adapter_service_pb2_grpc,
    cluster_service_pb2,
    cluster_service_pb2_grpc,
)

_ADAPTER_SERVICE = adapter_service_pb2.DESCRIPTOR.services_by_name["AdapterService"].full_name


def status(address: Address = DEFAULT_ADDRESS, timeout: Timeout = 10.0) -> None:
    """Shows ranks, memory and adapters. Exit code 3 unless the service is SERVING."""
    with connected(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        check = health.Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        loads = health.Check(health_pb2.HealthCheckRequest(service=_ADAPTER_SERVICE), timeout=timeout)
        cluster = cluster_service_pb2_grpc.ClusterServiceStub(channel)
        topology = cluster.GetTopology(cluster_service_pb2.GetTopologyRequest(), timeout=timeout)
        listing = adapter_service_pb2_grpc.AdapterServiceStub(channel).ListAdapters(
            adapter_service_pb2.ListAdaptersRequest(page_size=1000), timeout=timeout
        )
        memory = _memory(cluster, address, timeout)
    serving = check.status == health_pb2.HealthCheckResponse.SERVING
    state = ("SERVING", "green") if serving else ("NOT SERVING", "red")
    console.print(Text.assemble(plain(f"{address}: "), state))
    if serving and loads.status != health_pb2.HealthCheckResponse.SERVING:
        console.print(Text("adapters cannot be loaded: the loader is away", style="yellow"))
    for group in topology.groups:
        if group.HasField("model"):
            console.print(plain(_model_line(group)))
        _print_ranks(group)
    if memory:
        _print_memory(memory)
    print_adapters(listing.adapters)
    if not serving:
        raise typer.Exit(EXIT_UNAVAILABLE)


def _memory(
    stub: cluster_service_pb2_grpc.ClusterServiceStub, address: str, timeout: float
) -> list[cluster_service_pb2.RankMemory]:
    """Memory of every rank; empty, and said so, while a rank is lost."""
    try:
        response = stub.GetMemory(cluster_service_pb2.GetMemoryRequest(), timeout=timeout)
    except grpc.RpcError as error:
        error_console.print(plain(f"memory: {rpc_error(error, address).message}", "yellow"))
        return []
    return list(response.ranks)


def _model_line(group: cluster_service_pb2.Group) -> str:
    model = group.model
    return (
        f"{model.name} ({model.model_type}): {len(model.moe_layers)} of {model.num_layers} layers with "
        f"{model.num_experts} experts, {model.num_experts_per_token} per token; placement {group.placement_id[:12]}"
    )


def _print_ranks(group: cluster_service_pb2.Group) -> None:
    rows = [
        (
            str(rank.ep_rank),
            Text("yes", style="green") if rank.ready else Text("no", style="red"),
            plain(rank.device),
            str(rank.pid),
            str(rank.num_steps),
            str(rank.num_running_requests),
            str(rank.num_queued_requests),
        )
        for rank in group.ranks
    ]
    print_table(("rank", "ready", "device", "pid", "steps", "running", "queued"), rows)


def _print_memory(ranks: list[cluster_service_pb2.RankMemory]) -> None:
    with_states = any(rank.state_cache_bytes for rank in ranks)
    states = ["states"] if with_states else []
    rows = []
    for rank in ranks:
        sizes = [rank.base_expert_bytes, rank.base_dense_bytes, rank.kv_cache_bytes]
        sizes += [rank.state_cache_bytes] * with_states + [rank.adapter_bytes]
        rows.append((str(rank.ep_rank), *map(format_bytes, sizes), str(len(rank.adapters))))
    print_table(("rank", "experts", "other weights", "kv cache", *states, "adapters", "resident adapters"), rows)
