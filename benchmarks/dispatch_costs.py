"""Bytes and microseconds of a layer's dispatch on more ranks than were measured: what dispatch_simulation tells of.

Legend: G ranks, H hosts, T tokens of each rank, K experts a token, E experts, D model width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

ELEMENT_BYTES = 2
ALIGNMENT = 16
DRAWS = 64
ONE_SIDED = "one_sided"


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """The sizes that decide what travels."""

    name: str
    hidden: int
    num_experts: int
    top_k: int
    num_moe_layers: int

    def row_bytes(self, *, with_slot: bool = True) -> int:
        """Bytes of one packed row."""
        parts = [self.hidden * ELEMENT_BYTES, self.top_k * 4, self.top_k * 4, *([4] if with_slot else [])]
        return sum(-(-part // ALIGNMENT) * ALIGNMENT for part in parts)

    @property
    def result_bytes(self) -> int:
        """Bytes of one token's partial result."""
        return self.hidden * ELEMENT_BYTES

    @property
    def beside_bytes(self) -> int:
        """Bytes that one-sided dispatch sends of every token to every rank: local slots, weights, the adapter slot."""
        return self.top_k * (8 + 4) + 4


MODELS = (
    Model(name="Qwen3-30B-A3B", hidden=2048, num_experts=128, top_k=8, num_moe_layers=48),
    Model(name="DeepSeek-V3", hidden=7168, num_experts=256, top_k=8, num_moe_layers=58),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Destinations:
    """Ranks that one token's row goes to on average, its own left out, and how uneven arrivals are.

    Attributes:
        same_host: on the token's host.
        other_hosts: on others.
        busiest: rows at the busiest rank over the mean, in one layer of T tokens a rank.
    """

    same_host: float
    other_hosts: float
    busiest: float


class Links:
    """Times of collectives. A rank sends and receives at once; copies within a host and between hosts overlap."""

    def __init__(self, figures: dict[str, Any]) -> None:
        measured, assumed = figures["measured"], figures["assumed"]
        points = sorted(
            (int(hidden) * ELEMENT_BYTES * tokens, us)
            for hidden, times in measured["allgather_us"].items()
            for tokens, us in zip(measured["tokens_per_rank"], times, strict=True)
        )
        self._bytes, self._us = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
        self.gpus_per_host = int(assumed["gpus_per_host"])
        self._network_bytes_per_us = assumed["network_gb_per_second"] * 1e3
        self._hop_us, self._network_hop_us = assumed["hop_us"], assumed["network_hop_us"]
        self.launches_us = {kind: float(us) for kind, us in measured["all_to_all_launches_us"].items()}

    def two_gpus_us(self, num_bytes: float) -> float:
        """One collective of two GPUs in which each receives so many bytes: between measured points, a straight line."""
        if num_bytes <= self._bytes[-1]:
            return float(np.interp(num_bytes, self._bytes, self._us))
        slope = (self._us[-1] - self._us[-2]) / (self._bytes[-1] - self._bytes[-2])
        return float(self._us[-1] + (num_bytes - self._bytes[-1]) * slope)

    def collective_us(self, num_ranks: int, *, host_bytes: float, network_bytes: float) -> float:
        """One collective.

        Args:
            num_ranks: G.
            host_bytes: that a rank receives over its links within the host.
            network_bytes: that a rank receives over its network card.
        """
        num_hosts = self.num_hosts(num_ranks)
        us = self.two_gpus_us(host_bytes) + self._hop_us * (min(num_ranks, self.gpus_per_host) - 2)
        if num_hosts > 1:
            us = max(us, network_bytes / self._network_bytes_per_us) + self._network_hop_us * np.log2(num_hosts)
        return float(us)

    def num_hosts(self, num_ranks: int) -> int:
        """H."""
        return -(-num_ranks // self.gpus_per_host)

    def later_hops_us(self, num_ranks: int) -> float:
        """What more than two GPUs of a host add to one exchange among them."""
        return float(self._hop_us * (num_ranks - 2))


def layer_us(cell: Mapping[str, Any]) -> float:
    """Measured time of a layer: as one graph where that was timed, else dispatch and combine added up."""
    return float(cell["layer_us"] if "layer_us" in cell else cell["dispatch_us"] + cell["combine_us"])


class OneSided:
    """Times of the one-sided kernels by the bytes that each of two GPUs receives.

    Args:
        links: for what is assumed of more GPUs.
        cells: of benchmarks/results/dispatch.json.
    """

    def __init__(self, links: Links, cells: Iterable[Mapping[str, Any]]) -> None:
        self._links = links
        points = []
        for cell in cells:
            model = next((model for model in MODELS if model.hidden == cell["hidden"]), None)
            if cell["backend"] == ONE_SIDED and cell["with_slots"] and model is not None:
                num_tokens = cell["tokens_per_rank"]
                points.append((num_tokens * (model.result_bytes + model.beside_bytes), cell["dispatch_us"]))
                points.append((num_tokens * model.result_bytes, cell["combine_us"]))
        self._points = sorted(points)

    def layer_us(self, model: Model, num_ranks: int, num_tokens: int) -> float | None:
        """Dispatch and combine with T tokens on each of G ranks; None past one host, or where nothing was measured."""
        if not self._points or num_ranks > self._links.gpus_per_host:
            return None
        reached = destinations(model, num_ranks, num_tokens, self._links.gpus_per_host).same_host
        hidden = reached * num_tokens * model.result_bytes
        beside = (num_ranks - 1) * num_tokens * model.beside_bytes
        return sum(
            self._us(num_bytes) + self._links.later_hops_us(num_ranks) for num_bytes in (hidden + beside, hidden)
        )

    def _us(self, num_bytes: float) -> float:
        """Between measured points a straight line, past the last one in proportion."""
        num_bytes_measured, us = zip(*self._points, strict=True)
        return float(np.interp(num_bytes, num_bytes_measured, us) * max(1.0, num_bytes / num_bytes_measured[-1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """One layer on one rank.

    Attributes:
        links_us: by the links alone, without what the host takes to launch it all.
    """

    dispatch_bytes: float
    combine_bytes: float
    dispatch_us: float
    combine_us: float
    links_us: float

    @property
    def total_us(self) -> float:
        """Dispatch and combine."""
        return self.dispatch_us + self.combine_us


def destinations(model: Model, num_ranks: int, num_tokens: int, gpus_per_host: int) -> Destinations:
    """Draws routings for the tokens of rank 0, and for all tokens what arrives where."""
    rng = np.random.default_rng(num_ranks * 1000 + num_tokens)
    owner_E = np.arange(model.num_experts) * num_ranks // model.num_experts
    host = np.arange(num_ranks) // gpus_per_host
    same, other, busiest = 0, 0, []
    for _ in range(DRAWS):
        scores = rng.random((num_tokens, model.num_experts))
        chosen = np.argpartition(scores, model.top_k, axis=1)[:, : model.top_k]
        needed = np.zeros((num_tokens, num_ranks), dtype=bool)
        needed[np.arange(num_tokens)[:, None], owner_E[chosen]] = True
        same += needed[:, (host == 0)].sum() - needed[:, 0].sum()
        other += needed[:, (host != 0)].sum()
        # Every rank's tokens are drawn alike, so arrivals of G * T tokens scatter like these, 1 / sqrt(G) as much.
        arrivals = needed.sum(axis=0)
        busiest.append(1 + (arrivals.max() / arrivals.mean() - 1) / np.sqrt(num_ranks))
    count = DRAWS * num_tokens
    return Destinations(same_host=same / count, other_hosts=other / count, busiest=float(np.mean(busiest)))


def simulate(
    links: Links, model: Model, backend: str, num_ranks: int, num_tokens: int, *, with_slot: bool = True
) -> Cost:
    """One layer with T tokens on each of G ranks."""
    row, result = model.row_bytes(with_slot=with_slot), model.result_bytes
    host_rows: float
    network_rows: float
    if backend == "allgather_reducescatter":
        # Between hosts each token travels once, card to card, and spreads inside.
        host_rows, network_rows = (num_ranks - 1) * num_tokens, (links.num_hosts(num_ranks) - 1) * num_tokens
        counts_us, uneven, launches_us = 0.0, 1.0, {"dispatch": 0.0, "combine": 0.0}
    else:
        to = destinations(model, num_ranks, num_tokens, links.gpus_per_host)
        host_rows, network_rows = to.same_host * num_tokens, to.other_hosts * num_tokens
        counts_us = links.collective_us(num_ranks, host_bytes=8 * num_ranks, network_bytes=0)
        uneven, launches_us = to.busiest, links.launches_us
    received = host_rows if backend == "allgather_reducescatter" else host_rows + network_rows

    def us(row_bytes: int) -> float:
        return links.collective_us(
            num_ranks, host_bytes=host_rows * row_bytes * uneven, network_bytes=network_rows * row_bytes * uneven
        )

    dispatch_us, combine_us = us(row) + counts_us, us(result)
    return Cost(
        dispatch_bytes=received * row,
        combine_bytes=received * result,
        # The host launches one after another, while the device works.
        dispatch_us=max(dispatch_us, launches_us["dispatch"]),
        combine_us=max(combine_us, launches_us["combine"]),
        links_us=dispatch_us + combine_us,
    )


def fullest_rank(num_ranks: int, mean_tokens: int) -> float:
    """Tokens of the fullest rank over the mean, where requests come to ranks independently (Poisson)."""
    rng = np.random.default_rng(num_ranks)
    return float(rng.poisson(mean_tokens, (200, num_ranks)).max(axis=1).mean() / mean_tokens)
