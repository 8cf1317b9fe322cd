"""What dispatch costs past the machines that were measured: bytes and microseconds a layer for 2 to 256 ranks.

    python -m benchmarks.dispatch_simulation --docs docs/scaling.md

Inputs: collectives between two GPUs of a host as measured (benchmarks/reference/links_2xh200.json), and, for what two
GPUs cannot show, the figures under "assumed" there. Routing is drawn at random, each expert as likely as any other.
Where benchmarks/results/dispatch.json has measurements, the simulation's errors against them are in the page, too.

Legend: G ranks, H hosts, T tokens of each rank, K experts a token, E experts, D model width.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
LINKS = ROOT / "benchmarks" / "reference" / "links_2xh200.json"
RESULTS = ROOT / "benchmarks" / "results" / "dispatch.json"
RANKS = (2, 8, 16, 64, 256)
TOKENS = (8, 64, 256)
ELEMENT_BYTES = 2
ALIGNMENT = 16
DRAWS = 64
BACKENDS = ("allgather_reducescatter", "all_to_all")


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


def errors_at_two(links: Links, results: dict[str, Any]) -> list[dict[str, Any]]:
    """Simulated over measured time of each cell with slots on two ranks."""
    rows = []
    for cell in results["cells"]:
        model = next((model for model in MODELS if model.hidden == cell["hidden"]), None)
        if model is None or not cell["with_slots"]:
            continue
        cost = simulate(links, model, cell["backend"], 2, cell["tokens_per_rank"])
        measured = cell["dispatch_us"] + cell["combine_us"]
        rows.append({**cell, "measured_us": measured, "simulated_us": cost.total_us, "ratio": cost.total_us / measured})
    return rows


def document(links: Links, figures: dict[str, Any], results: dict[str, Any] | None) -> str:
    """docs/scaling.md."""
    lines = [
        "# What dispatch costs on more ranks",
        "",
        *_paragraph(
            "Written by `python -m benchmarks.dispatch_simulation --docs docs/scaling.md`. Simulated from what two"
            " GPUs of a host showed: nothing here was run on more than two ranks."
        ),
        "## Inputs",
        "",
        *_paragraph(
            f"Measured: `benchmarks/reference/links_2xh200.json` ({figures['hardware']}). A collective in which a rank"
            " receives n bytes takes what the all-gather of two GPUs takes for n bytes, a straight line between the"
            " measured sizes."
        ),
        "Assumed, since two GPUs of a host cannot show it:",
        "",
        "| what | value |",
        "| --- | --- |",
        *(f"| {name.replace('_', ' ')} | {value} |" for name, value in figures["assumed"].items()),
        "",
        *_paragraph(
            "Each rank has a network card of its own. All-gather and reduce-scatter send a token between two hosts once"
            " and spread it inside; `all_to_all` sends it to each rank that needs it, after an exchange of counts."
            " Experts are placed linearly and chosen uniformly at random; the busiest rank decides."
        ),
        *_paragraph(
            "`allgather_reducescatter` is part of a step's graph. `all_to_all` is not: the host waits for the counts"
            f" and launches one thing after another, which took {links.launches_us['dispatch']:.0f} us for dispatch and"
            f" {links.launches_us['combine']:.0f} us for combine where little travelled (measured). So it has two"
            " columns: as it is, where the longer of launches and links counts, and by the links alone, which is what"
            " it could be."
        ),
    ]
    for model in MODELS:
        lines += _model_table(links, model)
    lines += _small_costs(links, figures, results)
    lines += _errors(links, results)
    return "\n".join(lines) + "\n"


def _paragraph(text: str) -> list[str]:
    """Wrapped, and an empty line."""
    return [*textwrap.wrap(text, 118, break_on_hyphens=False), ""]


def _model_table(links: Links, model: Model) -> list[str]:
    lines = [
        f"## {model.name}: D {model.hidden}, {model.num_experts} experts, top {model.top_k},"
        f" {model.num_moe_layers} MoE layers",
        "",
        "Received MB of a layer, time of a layer and of a step's dispatch; other ranks that a token goes to.",
        "",
        "| ranks | tokens a rank | all-gather: MB | us | ms a step | all-to-all: MB | us | by links | ranks reached |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for num_ranks in RANKS:
        for num_tokens in TOKENS:
            cells = []
            for backend in BACKENDS:
                cost = simulate(links, model, backend, num_ranks, num_tokens)
                step_ms = cost.total_us * model.num_moe_layers / 1e3
                third = f"{step_ms:.1f}" if backend == BACKENDS[0] else f"{cost.links_us:.0f}"
                cells += [f"{(cost.dispatch_bytes + cost.combine_bytes) / 1e6:.2f}", f"{cost.total_us:.0f}", third]
            to = destinations(model, num_ranks, num_tokens, links.gpus_per_host)
            reached = to.same_host + to.other_hosts
            lines.append(f"| {num_ranks} | {num_tokens} | {' | '.join(cells)} | {reached:.2f} |")
    return [*lines, ""]


def _small_costs(links: Links, figures: dict[str, Any], results: dict[str, Any] | None) -> list[str]:
    lines = [
        "## What the small things cost",
        "",
        "| ranks | LoRA id, us a layer (64 tokens a rank, D 2048) | fullest rank over the mean, 8 tokens | 64 tokens |",
        "| --- | --- | --- | --- |",
    ]
    for num_ranks in RANKS:
        with_slot, without = (
            simulate(links, MODELS[0], BACKENDS[0], num_ranks, 64, with_slot=slot).total_us for slot in (True, False)
        )
        fullest = " | ".join(f"{fullest_rank(num_ranks, tokens):.2f}" for tokens in (8, 64))
        lines.append(f"| {num_ranks} | {with_slot - without:.2f} | {fullest} |")
    measured = figures["measured"]
    exchange = f" a whole exchange of two ranks {results['consensus_us']} us," if results else ""
    return [
        *lines,
        "",
        *_paragraph(
            "The id is 16 of a row's bytes. The fullest rank is what all-gather pads every rank to: bytes grow by that"
            " factor where requests are spread at random, which is why the gateway sends each request to the least"
            " loaded rank."
        ),
        *_paragraph(
            f"Consensus: reading a flag in shared memory takes {measured['consensus_shared_memory_us']} us,"
            f"{exchange} whatever the number of a host's ranks, if they wait already; over gloo"
            f" {measured['consensus_gloo_us']:.0f} us between two ranks and more with more of them, so that between"
            " hosts it has to overlap with the running step."
        ),
    ]


def _errors(links: Links, results: dict[str, Any] | None) -> list[str]:
    lines = ["## Against measurements at G = 2", ""]
    if results is None:
        return [*lines, "`benchmarks/results/dispatch.json` is not there yet: `benchmarks/dispatch.py` writes it."]
    lines += [
        f"{results['hardware']}; adapter slots included. The inputs above were measured in another session than these.",
        "",
        "| backend | D | tokens a rank | measured us | simulated us | ratio |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in errors_at_two(links, results):
        lines.append(
            f"| {row['backend']} | {row['hidden']} | {row['tokens_per_rank']} | {row['measured_us']:.1f} |"
            f" {row['simulated_us']:.1f} | {row['ratio']:.2f} |"
        )
    return lines


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, help="where to write the page; without it, it is printed")
    arguments = parser.parse_args()
    figures = json.loads(LINKS.read_text())
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else None
    page = document(Links(figures), figures, results)
    if arguments.docs:
        arguments.docs.write_text(page)
    else:
        print(page)


if __name__ == "__main__":
    main()
