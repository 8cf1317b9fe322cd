"""Rows of logical experts, from what the ranks count."""

from __future__ import annotations

from collections.abc import Sequence

from epilora.balance import logical_load
from epilora.errors import UnavailableError
from epilora.placement import ExpertPlacement
from epilora.v1 import worker_service_pb2
from gateway.ranks import RETRY_AFTER_SECONDS


def rows_by_expert(infos: Sequence[worker_service_pb2.GetWorkerInfoResponse]) -> dict[int, list[int]]:
    """Rows of each logical expert, by layer, as the ranks reported them last.

    Raises:
        UnavailableError: the ranks were asked while they took another placement up.
    """
    if len({info.placement.placement_id for info in infos}) > 1:
        raise UnavailableError(
            "the ranks are taking another placement up; try again",
            reason="PLACEMENT_CHANGES",
            retry_after_seconds=RETRY_AFTER_SECONDS,
        )
    placement = ExpertPlacement.from_proto(infos[0].placement)
    # Ranks that share their experts compute the same rows.
    holders = infos[:: len(infos) // placement.num_ranks]
    rows = [{entry.layer: list(entry.num_rows) for entry in info.expert_load} for info in holders]
    return logical_load(placement, rows)
