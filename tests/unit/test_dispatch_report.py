"""The table of docs/dispatch.md is what was measured, by one graph of a layer where there is one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.dispatch_report import report, written
from benchmarks.dispatch_simulation import RESULTS

PAGE = Path(__file__).parents[2] / "docs" / "dispatch.md"


def cell(backend: str, us: float, *, with_slots: bool, **more: float) -> dict[str, Any]:
    """Dispatch and combine take as long; the reference 100 us, with as many blocks 80."""
    return {
        "backend": backend,
        "hidden": 2048,
        "tokens_per_rank": 8,
        "with_slots": with_slots,
        "dispatch_us": us,
        "combine_us": us,
        "reference_us": 100.0,
        "reference_same_ctas_us": 80.0,
        **more,
    }


def test_a_layer_as_one_graph_counts_where_it_was_timed() -> None:
    cells = [
        cell("allgather_reducescatter", 30, with_slots=True, layer_us=56.0),
        cell("allgather_reducescatter", 30, with_slots=False, layer_us=50.0),
        cell("one_sided", 20, with_slots=True),
        cell("one_sided", 16, with_slots=False),
        cell("all_to_all", 300, with_slots=True),
    ]
    text = report(cells)
    assert "| 2048 | 8 | 100.0 | 56.0 | 0.56 | 0.70 | 40.0\\* | 0.40 | 0.50 |" in text
    assert "each replayed as a graph of its own" in text
    assert "all-gather 12.0 % (6.00 us; D 2048, 8 tokens), one-sided 25.0 % (8.00 us; D 2048, 8 tokens)" in text
    assert "\\*" not in report([{**one, "layer_us": 40.0} for one in cells])


def test_a_page_without_marks_is_not_written() -> None:
    with pytest.raises(ValueError, match="not both there"):
        written("a page", [])


def test_the_page_is_what_was_measured() -> None:
    text = PAGE.read_text()
    cells = json.loads(RESULTS.read_text())["cells"]
    assert written(text, cells) == text, "run python -m benchmarks.dispatch_report --docs docs/dispatch.md"
