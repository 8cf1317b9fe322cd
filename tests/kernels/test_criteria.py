"""What the recorded times of the expert layer say, and that documents and limits are made from them."""

import copy
import json
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the plan of cells lies beside the kernels")

from benchmarks.kernel_cells import plan
from benchmarks.kernel_criteria import summary, summary_text, verdicts
from benchmarks.kernel_report import BEGIN, END, table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "kernels.json").read_text())


def _changed(shape, tokens, adapters, lora_rank, half=False, **factors):
    """The recorded cells with some values of one multiplied."""
    cells = copy.deepcopy(RESULTS["cells"])
    wanted = (shape, tokens, adapters, lora_rank, half)
    found = [c for c in cells if (c["shape"], c["tokens"], c["adapters"], c["lora_rank"], c["half"]) == wanted]
    assert len(found) == 1
    for key, factor in factors.items():
        found[0][key] *= factor
    return cells


def _misses(cells):
    return {(v.line[0], v.cell) for v in verdicts(cells) if not v.met}


def test_the_limits_and_the_table_are_those_of_the_recorded_times():
    assert RESULTS["limits"] == summary(RESULTS["cells"], plan())
    assert RESULTS["limits"]["not_measured"] == []
    text = (ROOT / "docs" / "kernels.md").read_text()
    assert text.split(BEGIN)[1].split(END)[0].strip() == table(RESULTS)


def test_every_limit_on_the_base_layer_the_reference_and_mixed_ranks_is_met():
    """Those on adapters beside their own floor are goals: docs/kernels.md says which are missed, and why."""
    assert {line for line, _ in _misses(RESULTS["cells"])} <= {"3"}


@pytest.mark.parametrize(
    "cell, factors, missed",
    [
        (("a", 64, 8, 16), {"lora_us": 2.0}, {("2", "a 64 n8 r16"), ("3", "a 64 n8 r16")}),
        (("a", 1, 8, 64), {"lora_us": 1.5}, {("3", "a 1 n8 r64")}),
        (("b", 64, 8, "8+64"), {"lora_us": 1.1}, {("4", "b 64 n8 r8+64")}),
        (("c", 64, 8, "8+64"), {"allocated_bytes": 1.03}, {("4", "c 64 n8 r8+64")}),
        (("a", 8, 8, 16, True), {"lora_us": 1.1}, {("3", "a 8 n8 r16 half")}),
    ],
    ids=["lora", "one_token", "mixed_ranks", "memory", "half"],
)
def test_a_cell_that_is_too_slow_or_too_large_is_named(cell, factors, missed):
    cells = _changed(*cell, **factors)
    assert _misses(cells) - _misses(RESULTS["cells"]) >= missed
    shown = summary_text(summary(cells, plan()))
    assert all(f"    {name}: " in shown for _, name in missed)


def test_a_base_layer_is_judged_by_the_median_of_its_cells():
    one_slow = _changed("a", 64, 8, 16, base_us=2.0)
    assert not {cell for line, cell in _misses(one_slow) if line == "1"}
    slow = copy.deepcopy(RESULTS["cells"])
    for c in slow:
        if (c["shape"], c["tokens"]) == ("a", 64):
            c["base_us"] *= 1.1
    assert ("1", "a 64") in _misses(slow)


def test_a_cell_without_a_time_is_not_measured():
    cells = [c for c in RESULTS["cells"] if (c["shape"], c["tokens"]) != ("c", 256)]
    missing = summary(cells, plan())["not_measured"]
    assert "c 256 n8 r8+64" in missing
    assert all(name.startswith("c 256 ") for name in missing)
