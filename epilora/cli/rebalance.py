"""`epilora rebalance`."""

from __future__ import annotations

from typing import Annotated

import typer

from epilora.cli.client import DEFAULT_ADDRESS, Address, Timeout, connected
from epilora.cli.output import console
from epilora.placement import ExpertPlacement
from epilora.v1 import cluster_service_pb2, cluster_service_pb2_grpc

_READ_TIMEOUT_SECONDS = 10.0


def rebalance(
    placement: Annotated[
        str | None,
        typer.Option(help="linear, round_robin, or a JSON file. Without it, experts go by the rows counted."),
    ] = None,
    redundant: Annotated[
        int, typer.Option(min=0, help="Without --placement: further copies of busy experts in each layer.")
    ] = 0,
    address: Address = DEFAULT_ADDRESS,
    timeout: Timeout = 1800.0,
) -> None:
    """Moves the experts of a running service to another placement, beside traffic."""
    if placement and redundant:
        raise typer.BadParameter("--redundant chooses busy experts; give it or --placement, not both")
    request = cluster_service_pb2.RebalanceRequest(num_redundant_experts=redundant)
    with connected(address) as channel:
        stub = cluster_service_pb2_grpc.ClusterServiceStub(channel)
        if placement:
            answer = stub.GetPlacement(cluster_service_pb2.GetPlacementRequest(), timeout=_READ_TIMEOUT_SECONDS)
            request.layers.extend(_like(ExpertPlacement.from_proto(answer), placement).to_proto().layers)
        done = stub.Rebalance(request, timeout=timeout)
    if done.placement_id == done.previous_placement_id:
        console.print(f"placement {done.placement_id[:12]} runs already; nothing was moved")
        return
    console.print(
        f"placement {done.previous_placement_id[:12]} before step {done.step}, {done.placement_id[:12]} from then on:"
        f" {done.num_experts_read} experts read, {done.num_adapters} adapters moved along"
    )
    console.print(
        f"rows of the busiest rank over the mean: before {done.spread_before:.2f}, planned {done.spread_planned:.2f}"
    )


def _like(running: ExpertPlacement, strategy_or_path: str) -> ExpertPlacement:
    """A placement of the experts and ranks of another one."""
    num_experts = {layer: len(running.num_copies(layer)) for layer in running.layers}
    return ExpertPlacement.of_experts(strategy_or_path, num_experts, running.num_ranks)
