"""Placements that spread the rows evenly: busy experts get copies, copies go to the ranks with the least to do.

The load of a logical expert is a number of rows; its copies share them equally. Legend: E logical experts, P physical
experts, G ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from epilora.errors import InvalidArgumentError
from epilora.placement import ExpertPlacement

FloatArray = npt.NDArray[np.float64]


def balanced_placement(
    load: Mapping[int, Sequence[int]], *, num_ranks: int, num_redundant_experts: int
) -> ExpertPlacement:
    """A placement whose busiest rank has little more to do than the others, layer by layer.

    Ranks get P / G physical experts each (the first P mod G one more), whatever the load, so memory is even.

    Args:
        load: rows of each logical expert, by MoE layer.
        num_ranks: G.
        num_redundant_experts: copies of a layer beyond one for each expert: P - E.

    Raises:
        InvalidArgumentError: reason BAD_PLACEMENT; more copies than fit, since a rank holds one of each at most.
    """
    for layer, rows in load.items():
        limit = len(rows) * (num_ranks - 1)
        if num_ranks < 1 or not 0 <= num_redundant_experts <= limit:
            raise InvalidArgumentError(
                f"layer {layer}: {num_redundant_experts} redundant experts on {num_ranks} ranks, expected 0 to {limit}",
                reason="BAD_PLACEMENT",
            )
    tables = {layer: _place(rows, num_ranks, num_redundant_experts) for layer, rows in load.items()}
    return ExpertPlacement(strategy="explicit", num_ranks=num_ranks, tables=tables)


def num_copies(load: Sequence[int], num_physical: int, num_ranks: int) -> list[int]:
    """Copies of each logical expert: each further one goes to the expert whose copies have most to do each.

    Example: load [90, 30, 30], 5 physical experts, 3 ranks -> [3, 1, 1]; with 2 ranks, 4 physical -> [2, 1, 1].
    """
    copies = [1] * len(load)
    for _ in range(num_physical - len(load)):
        candidates = [expert for expert in range(len(load)) if copies[expert] < num_ranks]
        # The expert with fewer copies first, where loads are equal (all 0, say).
        busiest = max(candidates, key=lambda expert: (load[expert] / copies[expert], -copies[expert], -expert))
        copies[busiest] += 1
    return copies


def rank_loads(placement: ExpertPlacement, load: Sequence[int], layer: int) -> FloatArray:
    """[G]: rows of one layer that each rank computes, where copies share equally."""
    share = np.asarray(load, dtype=np.float64) / placement.num_copies(layer)
    physical = share[placement.physical_experts(layer)]
    offsets = placement.rank_offsets(layer)
    return np.array([physical[first:end].sum() for first, end in pairwise(offsets)])


def spread(placement: ExpertPlacement, load: Mapping[int, Sequence[int]]) -> float:
    """Rows of the busiest rank over the mean, layers added up as they wait for their own busiest rank; 1 is even."""
    loads = [rank_loads(placement, rows, layer) for layer, rows in load.items()]
    mean = sum(float(layer.mean()) for layer in loads)
    return sum(float(layer.max()) for layer in loads) / mean if mean else 1.0


def logical_load(placement: ExpertPlacement, rows: Sequence[Mapping[int, Sequence[int]]]) -> dict[int, list[int]]:
    """Rows of each logical expert, by layer.

    Args:
        placement: of the ranks that counted.
        rows: by rank: rows of each local slot, by layer.
    """
    load = {}
    for layer in placement.layers:
        physical = placement.physical_experts(layer)
        counted = np.array([count for rank in rows for count in rank[layer]], dtype=np.int64)
        assert counted.shape == physical.shape, (layer, counted.shape, physical.shape)
        totals = np.zeros(len(placement.num_copies(layer)), dtype=np.int64)
        np.add.at(totals, physical, counted)
        load[layer] = totals.tolist()
    return load


def _place(load: Sequence[int], num_ranks: int, num_redundant: int) -> tuple[tuple[int, ...], ...]:
    """The physical experts, busiest first, each to the rank with least to do that has room and no copy of it."""
    num_physical = len(load) + num_redundant
    copies = num_copies(load, num_physical, num_ranks)
    share = [rows / count for rows, count in zip(load, copies, strict=True)]
    base, remainder = divmod(num_physical, num_ranks)
    room = [base + (rank < remainder) for rank in range(num_ranks)]
    ranks: list[set[int]] = [set() for _ in range(num_ranks)]
    busy = [0.0] * num_ranks

    def put(expert: int, rank: int) -> None:
        ranks[rank].add(expert)
        busy[rank] += share[expert]

    order = sorted(range(len(load)), key=lambda expert: (-share[expert], expert))
    for expert in (copied for copied in order for _ in range(copies[copied])):
        without = [rank for rank in range(num_ranks) if expert not in ranks[rank]]
        free = [rank for rank in without if len(ranks[rank]) < room[rank]]
        if free:
            put(expert, min(free, key=lambda rank: (busy[rank], rank)))
            continue
        # Only ranks that hold a copy have room left. One of them takes something from a full rank, which then
        # has room for this one; a full rank has something that the other lacks, having more.
        target = next(rank for rank in range(num_ranks) if len(ranks[rank]) < room[rank])
        source, moved = next((rank, other) for rank in without for other in sorted(ranks[rank] - ranks[target]))
        ranks[source].remove(moved)
        busy[source] -= share[moved]
        put(moved, target)
        put(expert, source)
    return tuple(tuple(sorted(experts)) for experts in ranks)
