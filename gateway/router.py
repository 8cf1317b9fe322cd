"""Chooses the rank that answers a request."""

from __future__ import annotations

from gateway.in_flight import InFlight
from gateway.ranks import Group, Rank


class Router:
    """Least loaded first; ranks that are equally loaded take turns."""

    def __init__(self, group: Group, in_flight: InFlight) -> None:
        self._group = group
        self._in_flight = in_flight
        self._turn = 0

    def choose(self) -> Rank:
        """The rank with the fewest requests. Call it while the group is ready."""
        ranks = self._group.ranks
        self._turn += 1
        return min(ranks, key=lambda rank: (self.load(rank), (rank.ep_rank - self._turn) % len(ranks)))

    def load(self, rank: Rank) -> int:
        """Requests on a rank: our own now, and those of others that it reported last."""
        reported = 0
        if rank.info is not None:
            reported = rank.info.rank.num_running_requests + rank.info.rank.num_queued_requests
        others = max(0, reported - rank.num_in_flight_at_probe)
        return self._in_flight.on_rank(rank.ep_rank) + others
