"""Which rank and local slot hold which expert. The only place that converts between logical and physical experts.

A logical expert is one of the model's E; a physical expert is a placed copy of one. Physical ids are rank-major:
rank 0's slots first, in slot order. P physical experts, G ranks, C most copies of any expert.
docs/placement.md describes the strategies and the file of an explicit placement.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from epilora.errors import InvalidArgumentError
from epilora.model_spec import ModelSpec
from epilora.placement_file import read_placement_file
from epilora.v1 import cluster_service_pb2

Table = tuple[tuple[int, ...], ...]
"""Logical experts of one layer by rank, in slot order."""
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True)
class _LayerArrays:
    """The arrays of one layer, read-only."""

    ranks: Table
    physical: Int32Array
    rank_offsets: Int32Array
    copies: Int32Array
    num_copies: Int32Array


class ExpertPlacement:
    """Immutable. Make it with `make` or `from_proto`."""

    __slots__ = ("_layers", "num_ranks", "placement_id", "strategy")

    def __init__(self, *, strategy: str, num_ranks: int, tables: Mapping[int, Table]) -> None:
        """Args:
        strategy: "linear", "round_robin" or "explicit".
        num_ranks: G.
        tables: per MoE layer; checked already.
        """
        self.strategy = strategy
        self.num_ranks = num_ranks
        self.placement_id = _digest(num_ranks, tables)
        # Most placements have the same table in every layer.
        arrays = {table: _arrays(table) for table in set(tables.values())}
        self._layers = MappingProxyType({layer: arrays[tables[layer]] for layer in sorted(tables)})

    @classmethod
    def make(cls, strategy_or_path: str, model: ModelSpec, num_ranks: int) -> ExpertPlacement:
        """Places a model's experts on ranks.

        Args:
            strategy_or_path: "linear" (contiguous; the first E mod G ranks hold one more), "round_robin"
                (expert i on rank i mod G), or the path of a JSON file with an explicit placement.
            model: the model.
            num_ranks: G.

        Raises:
            NotFoundError: no such file.
            InvalidArgumentError: reason BAD_PLACEMENT; the file does not place every expert, or is broken.
        """
        return cls.of_experts(strategy_or_path, {spec.layer: spec.num_experts for spec in model.moe_layers}, num_ranks)

    @classmethod
    def of_experts(cls, strategy_or_path: str, num_experts: Mapping[int, int], num_ranks: int) -> ExpertPlacement:
        """Like make, for a model of which only E of each MoE layer is known."""
        if num_ranks < 1:
            raise InvalidArgumentError(f"num_ranks is {num_ranks}, expected 1 or more", reason="BAD_PLACEMENT")
        if strategy_or_path in _STRATEGIES:
            place = _STRATEGIES[strategy_or_path]
            tables = {layer: place(experts, num_ranks) for layer, experts in num_experts.items()}
            return cls(strategy=strategy_or_path, num_ranks=num_ranks, tables=tables)
        path = Path(strategy_or_path)
        tables = read_placement_file(path, num_experts)
        for layer, ranks in tables.items():
            check_table(ranks, num_experts[layer], num_ranks, where=f"{path}: layer {layer}")
        return cls(strategy="explicit", num_ranks=num_ranks, tables=tables)

    @property
    def layers(self) -> tuple[int, ...]:
        """MoE layers, in order."""
        return tuple(self._layers)

    def local_experts(self, layer: int, ep_rank: int) -> tuple[int, ...]:
        """Logical expert in each local slot of a rank, in slot order."""
        return self._layers[layer].ranks[ep_rank]

    def physical_experts(self, layer: int) -> Int32Array:
        """int32 [P]: logical id of each physical expert."""
        return self._layers[layer].physical

    def rank_offsets(self, layer: int) -> Int32Array:
        """int32 [G+1]: first physical id of each rank; the last entry is P."""
        return self._layers[layer].rank_offsets

    def copies(self, layer: int) -> Int32Array:
        """int32 [E, C]: physical ids of the copies of each logical expert, ascending, cycled to fill the row.

        A sender maps expert e of a token at position p to copies[e, p % num_copies[e]].
        """
        return self._layers[layer].copies

    def num_copies(self, layer: int) -> Int32Array:
        """int32 [E]: copies of each logical expert, at least 1."""
        return self._layers[layer].num_copies

    def to_proto(self) -> cluster_service_pb2.GetPlacementResponse:
        """The message of this placement."""
        layers = [
            cluster_service_pb2.LayerPlacement(
                layer=layer,
                ranks=[cluster_service_pb2.LocalExperts(experts=experts) for experts in arrays.ranks],
            )
            for layer, arrays in self._layers.items()
        ]
        return cluster_service_pb2.GetPlacementResponse(
            placement_id=self.placement_id, strategy=self.strategy, layers=layers
        )

    @classmethod
    def from_proto(cls, message: cluster_service_pb2.GetPlacementResponse) -> ExpertPlacement:
        """The placement of a message.

        Raises:
            InvalidArgumentError: reason BAD_PLACEMENT; the table is not valid, or its digest is not placement_id.
        """
        tables = {entry.layer: tuple(tuple(rank.experts) for rank in entry.ranks) for entry in message.layers}
        if not tables:
            raise InvalidArgumentError("placement message has no layers", reason="BAD_PLACEMENT")
        num_ranks = len(next(iter(tables.values())))
        for layer, ranks in tables.items():
            num_experts = max((expert + 1 for experts in ranks for expert in experts), default=0)
            check_table(ranks, num_experts, num_ranks, where=f"placement message: layer {layer}")
        placement = cls(strategy=message.strategy, num_ranks=num_ranks, tables=tables)
        if placement.placement_id != message.placement_id:
            raise InvalidArgumentError(
                f"placement message says placement_id {message.placement_id}, its table has {placement.placement_id}",
                reason="BAD_PLACEMENT",
            )
        return placement

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExpertPlacement) and self.placement_id == other.placement_id

    def __hash__(self) -> int:
        return hash(self.placement_id)

    def __repr__(self) -> str:
        return f"ExpertPlacement({self.strategy}, {self.num_ranks} ranks, {self.placement_id[:12]})"


def check_table(ranks: Sequence[Sequence[int]], num_experts: int, num_ranks: int, *, where: str) -> None:
    """Checks one layer: a list for each rank, ids in range, no expert twice on a rank, every expert placed.

    Raises:
        InvalidArgumentError: reason BAD_PLACEMENT.
    """

    def error(message: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"{where}: {message}", reason="BAD_PLACEMENT")

    if len(ranks) != num_ranks:
        raise error(f"lists of {len(ranks)} ranks, expected {num_ranks}")
    for ep_rank, experts in enumerate(ranks):
        outside = [expert for expert in experts if not 0 <= expert < num_experts]
        if outside:
            raise error(f"rank {ep_rank} has experts {outside[:8]}, expected ids from 0 to {num_experts - 1}")
        twice = sorted({expert for expert in experts if experts.count(expert) > 1})
        if twice:
            raise error(f"rank {ep_rank} has experts {twice[:8]} more than once; copies belong on different ranks")
    missing = sorted(set(range(num_experts)).difference(*ranks))
    if missing:
        raise error(f"{len(missing)} of {num_experts} experts are on no rank, first {missing[:8]}")


def _linear(num_experts: int, num_ranks: int) -> Table:
    base, remainder = divmod(num_experts, num_ranks)
    starts = [rank * base + min(rank, remainder) for rank in range(num_ranks + 1)]
    return tuple(tuple(range(starts[rank], starts[rank + 1])) for rank in range(num_ranks))


def _round_robin(num_experts: int, num_ranks: int) -> Table:
    return tuple(tuple(range(rank, num_experts, num_ranks)) for rank in range(num_ranks))


_STRATEGIES = {"linear": _linear, "round_robin": _round_robin}


def _digest(num_ranks: int, tables: Mapping[int, Table]) -> str:
    """Of the table alone: equal tables are one placement, whatever made them."""
    canonical = json.dumps([num_ranks, [[layer, tables[layer]] for layer in sorted(tables)]], separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def _arrays(ranks: Table) -> _LayerArrays:
    physical = np.array([expert for experts in ranks for expert in experts], dtype=np.int32)
    rank_offsets = np.cumsum([0, *map(len, ranks)]).astype(np.int32)
    num_copies = np.bincount(physical).astype(np.int32)
    copies = np.stack(
        [np.resize(np.flatnonzero(physical == expert), num_copies.max()) for expert in range(len(num_copies))]
    ).astype(np.int32)
    for array in (physical, rank_offsets, copies, num_copies):
        array.setflags(write=False)
    return _LayerArrays(ranks=ranks, physical=physical, rank_offsets=rank_offsets, copies=copies, num_copies=num_copies)
