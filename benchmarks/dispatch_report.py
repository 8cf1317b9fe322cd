"""What benchmarks/dispatch.py measured, as docs/dispatch.md has it.

python -m benchmarks.dispatch_report --docs docs/dispatch.md    # writes the table there, between its marks
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.dispatch_costs import layer_us
from benchmarks.dispatch_simulation import RESULTS

START, END = "<!-- measurements -->", "<!-- end of measurements -->"
NAMES = {"allgather_reducescatter": "all-gather", "one_sided": "one-sided"}
"""Of the backends that are replayed as graphs."""

Cell = Mapping[str, Any]


def report(cells: Sequence[Cell]) -> str:
    """Markdown: a row for each size with adapter slots, and what the slots add.

    Args:
        cells: of the file of results; those from before `layer_us` was measured have none.
    """
    lines = [
        "| D | tokens a rank | reference |" + "".join(f" {name} | ratio | same blocks |" for name in NAMES.values()),
        "| --- |" + " --- |" * (2 + 3 * len(NAMES)),
        *_rows(cells),
        "",
    ]
    if any("layer_us" not in cell for cell in cells):
        lines += [
            "\\* Dispatch and combine, each replayed as a graph of its own, and added up: what starting a graph takes",
            "counts twice. The reference is one graph.",
            "",
        ]
    added = ", ".join(_added_by_slots(cells))
    return "\n".join([*lines, f"Adapter slots add at most: {added}.", ""])


def _rows(cells: Sequence[Cell]) -> Iterator[str]:
    shown = {(cell["hidden"], cell["tokens_per_rank"], cell["backend"]): cell for cell in cells if cell["with_slots"]}
    for hidden, num_tokens in dict.fromkeys(key[:2] for key in shown):
        mine = [shown[hidden, num_tokens, backend] for backend in NAMES if (hidden, num_tokens, backend) in shown]
        if len(mine) == len(NAMES):
            columns = [f"{mine[0]['reference_us']:.1f}"]
            for cell in mine:
                us, star = layer_us(cell), "" if "layer_us" in cell else "\\*"
                ratios = (us / cell[name] for name in ("reference_us", "reference_same_ctas_us"))
                columns += [f"{us:.1f}{star}", *(f"{ratio:.2f}" for ratio in ratios)]
            yield f"| {hidden} | {num_tokens} | {' | '.join(columns)} |"


def _added_by_slots(cells: Sequence[Cell]) -> Iterator[str]:
    """For each backend the size at which slots add the largest share."""
    times = {
        (cell["backend"], cell["hidden"], cell["tokens_per_rank"], cell["with_slots"]): layer_us(cell) for cell in cells
    }
    for backend, name in NAMES.items():
        shares = [
            (us / times[*size, False] - 1, us - times[*size, False], size)
            for (*size, with_slots), us in times.items()
            if with_slots and size[0] == backend and (*size, False) in times
        ]
        if shares:
            share, added_us, (_, hidden, num_tokens) = max(shares)
            yield f"{name} {100 * share:.1f} % ({added_us:.2f} us; D {hidden}, {num_tokens} tokens)"


def written(text: str, cells: Sequence[Cell]) -> str:
    """A page with the report between its marks."""
    before, found, rest = text.partition(START)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise ValueError(f"{START} and {END} are not both there")
    return f"{before}{START}\n\n{report(cells)}\n{END}{after}"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, help="the page to write; without it, the report is printed")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    cells = json.loads(arguments.results.read_text())["cells"]
    if arguments.docs:
        arguments.docs.write_text(written(arguments.docs.read_text(), cells))
    else:
        print(report(cells))


if __name__ == "__main__":
    main()
