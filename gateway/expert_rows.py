"""Rows of logical experts, from what the ranks count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from epilora.balance import logical_load
from epilora.errors import UnavailableError
from epilora.placement import ExpertPlacement
from epilora.v1 import cluster_service_pb2, worker_service_pb2
from gateway.ranks import RETRY_AFTER_SECONDS

LocalLayers = Iterable[worker_service_pb2.LocalExpertLoad]
"""Of one rank."""


def rows_by_expert(infos: Sequence[worker_service_pb2.GetWorkerInfoResponse]) -> dict[int, list[int]]:
    """Rows of each logical expert, by layer, as the ranks reported them last.

    Raises:
        UnavailableError: the ranks were asked while they took another placement up.
    """
    check_one_placement([info.placement.placement_id for info in infos])
    return _rows(ExpertPlacement.from_proto(infos[0].placement), [info.expert_load for info in infos])


def layer_loads(
    placement: ExpertPlacement, by_rank: Sequence[LocalLayers]
) -> list[cluster_service_pb2.LayerExpertLoad]:
    """The messages of what every rank counted under a placement."""
    of_ranks = [{entry.layer: sum(entry.num_rows) for entry in layers} for layers in by_rank]
    return [
        cluster_service_pb2.LayerExpertLoad(
            layer=layer, expert_rows=expert_rows, rank_rows=[rank[layer] for rank in of_ranks]
        )
        for layer, expert_rows in _rows(placement, by_rank).items()
    ]


def adapter_loads(
    placement: ExpertPlacement, answers: Sequence[worker_service_pb2.GetAdapterLoadResponse]
) -> list[cluster_service_pb2.AdapterExpertLoad]:
    """The messages of the adapters that every rank has active, in order of name."""
    ranks = [{adapter.generation: adapter for adapter in answer.adapters} for answer in answers]
    everywhere = set(ranks[0]).intersection(*ranks)
    return [
        cluster_service_pb2.AdapterExpertLoad(
            name=ranks[0][number].name,
            generation=number,
            layers=layer_loads(placement, [rank[number].layers for rank in ranks]),
        )
        for number in sorted(everywhere, key=lambda number: (ranks[0][number].name, number))
    ]


def check_one_placement(placement_ids: Sequence[str]) -> None:
    """UnavailableError if the ranks were asked while they took another placement up."""
    if len(set(placement_ids)) > 1:
        raise UnavailableError(
            "the ranks are taking another placement up; try again",
            reason="PLACEMENT_CHANGES",
            retry_after_seconds=RETRY_AFTER_SECONDS,
        )


def _rows(placement: ExpertPlacement, by_rank: Sequence[LocalLayers]) -> dict[int, list[int]]:
    # Ranks that share their experts compute the same rows.
    holders = by_rank[:: len(by_rank) // placement.num_ranks]
    return logical_load(placement, [{entry.layer: list(entry.num_rows) for entry in layers} for layers in holders])
