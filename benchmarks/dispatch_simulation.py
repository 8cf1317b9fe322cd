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
from pathlib import Path
from typing import Any

from benchmarks.dispatch_costs import (
    MODELS,
    ONE_SIDED,
    Links,
    Model,
    OneSided,
    destinations,
    fullest_rank,
    layer_us,
    simulate,
)

ROOT = Path(__file__).resolve().parent.parent
LINKS = ROOT / "benchmarks" / "reference" / "links_2xh200.json"
RESULTS = ROOT / "benchmarks" / "results" / "dispatch.json"
RANKS = (2, 8, 16, 64, 256)
TOKENS = (8, 64, 256)
BACKENDS = ("allgather_reducescatter", "all_to_all")
MEASURED_AS_ONE = " Measured is a layer as one graph; simulations add up what dispatch and combine took alone."


def errors_at_two(links: Links, results: dict[str, Any]) -> list[dict[str, Any]]:
    """Simulated over measured time of each cell with slots on two ranks; one-sided ones from the other cells' times."""
    rows = []
    for cell in results["cells"]:
        model = next((model for model in MODELS if model.hidden == cell["hidden"]), None)
        if model is None or not cell["with_slots"]:
            continue
        num_tokens, us = cell["tokens_per_rank"], None
        if cell["backend"] in BACKENDS:
            us = simulate(links, model, cell["backend"], 2, num_tokens).total_us
        elif cell["backend"] == ONE_SIDED:
            others = [other for other in results["cells"] if other is not cell]
            us = OneSided(links, others).layer_us(model, 2, num_tokens)
        if us is not None:
            measured = layer_us(cell)
            rows.append({**cell, "measured_us": measured, "simulated_us": us, "ratio": us / measured})
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
        *_paragraph(
            "`one_sided` is there within a host. Its kernels take what they took between two GPUs for as many bytes"
            " received (`benchmarks/results/dispatch.json`); a token's hidden state goes to the ranks of its experts,"
            " what belongs to it to all."
        ),
    ]
    one_sided = OneSided(links, results["cells"] if results else ())
    for model in MODELS:
        lines += _model_table(links, one_sided, model)
    lines += _small_costs(links, figures, results)
    lines += _errors(links, results)
    return "\n".join(lines) + "\n"


def _paragraph(text: str) -> list[str]:
    """Wrapped, and an empty line."""
    return [*textwrap.wrap(text, 118, break_on_hyphens=False), ""]


def _model_table(links: Links, one_sided: OneSided, model: Model) -> list[str]:
    lines = [
        f"## {model.name}: D {model.hidden}, {model.num_experts} experts, top {model.top_k},"
        f" {model.num_moe_layers} MoE layers",
        "",
        "Received MB of a layer, time of a layer and of a step's dispatch; other ranks that a token goes to.",
        "",
        "| ranks | tokens a rank | all-gather: MB | us | ms a step | all-to-all: MB | us | by links | one-sided: us"
        " | ranks reached |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
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
            us = one_sided.layer_us(model, num_ranks, num_tokens)
            cells.append("-" if us is None else f"{us:.0f}")
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
            f" {measured['consensus_gloo_us']:.0f} us between two ranks and more with more of them, which is why"
            " ranks on several hosts agree on a step while they compute the one before it ([dispatch](dispatch.md))."
        ),
    ]


def _errors(links: Links, results: dict[str, Any] | None) -> list[str]:
    lines = ["## Against measurements at G = 2", ""]
    if results is None:
        return [*lines, "`benchmarks/results/dispatch.json` is not there yet: `benchmarks/dispatch.py` writes it."]
    lines += [
        *_paragraph(
            f"{results['hardware']}; adapter slots included. The links were measured in another session than these, and"
            " with NCCL's default options. `one_sided` is simulated from the other cells of the same file, without the"
            " one it is compared with."
            + (MEASURED_AS_ONE if any("layer_us" in cell for cell in results["cells"]) else "")
        )[:-1],
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
