"""docs/field-cases.md: every case is there, and every test that it names."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
DOCUMENT = TESTS.parent / "docs" / "field-cases.md"
ROWS = re.findall(r"^\| ([KCXS]\d+) \| [^|]+ \| ([^|]+) \|$", DOCUMENT.read_text(), flags=re.MULTILINE)
SERIES = {"K": 32, "C": 17, "X": 12, "S": 26}


@cache
def _functions(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_no_case_is_missing() -> None:
    assert [case for case, _ in ROWS] == [
        f"{kind}{number + 1}" for kind, count in SERIES.items() for number in range(count)
    ]
    assert len(ROWS) == 87


@pytest.mark.parametrize(("case", "text"), ROWS, ids=[case for case, _ in ROWS])
def test_named_tests_exist(case: str, text: str) -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", text)
    assert named or re.match(r"no test( of its own)?: .{20,}", text), case
    for file, function in named:
        assert function in _functions(TESTS / file), (case, file, function)
