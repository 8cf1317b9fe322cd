"""Reading the results file of the expert layer, with one clear error for whatever is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.kernel_cells import TOKENS
from benchmarks.kernel_layer import SHAPES

_EXPECTED = "expected a file that `python -m benchmarks.kernels` wrote"
_CHOICES: dict[str, tuple[object, ...]] = {"shape": tuple(SHAPES), "tokens": TOKENS, "half": (False, True)}
_FLOORS = ("floor_base_us", "floor_lora_us")
_NUMBERS = ("adapters", "rel_error", *_FLOORS)
_NUMBERS_OR_NULL = ("base_us", "lora_us")
_TOGETHER = (("base_half_us", "lora_half_us"), ("adapter_bytes", "allocated_bytes"))


def read_results(path: Path) -> dict[str, Any]:
    """The file's object; every cell has what the limits and tables need.

    Raises:
        ValueError: it cannot be read, or holds something else; the message names the file and what was expected.
    """
    try:
        results = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; {_EXPECTED}") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}; {_EXPECTED}") from None
    cells = results.get("cells") if isinstance(results, dict) else None
    if not isinstance(cells, list):
        raise ValueError(f'{path} is no object with a list "cells"; {_EXPECTED}')
    for number, cell in enumerate(cells):
        if why := next(_problems(cell), ""):
            raise ValueError(f"{path}: cells[{number}] {why}; {_EXPECTED}")
    assert isinstance(results, dict)
    return results


def _problems(cell: object) -> Iterator[str]:
    """What is wrong with a cell."""
    if not isinstance(cell, dict):
        yield f"is {json.dumps(cell)[:40]}, no object"
        return
    missing = [key for key in (*_CHOICES, *_NUMBERS, *_NUMBERS_OR_NULL, "lora_rank") if key not in cell]
    if missing:
        yield f"has no {missing[0]}"
        return
    for key, choices in _CHOICES.items():
        # As JSON has them: 1 is not true.
        known, found = [json.dumps(choice) for choice in choices], json.dumps(cell[key])
        if found not in known:
            yield f"has {key} {found}, none of {', '.join(known)}"
    for key in (*_NUMBERS, *_NUMBERS_OR_NULL, *chain(*_TOGETHER), "grouped_mm_us"):
        value = cell.get(key)
        if not _is_number(value) and not (value is None and key not in _NUMBERS):
            yield f"has {key} {json.dumps(value)}, no number"
        elif key in _FLOORS and not cell[key] > 0:
            yield f"has {key} {json.dumps(value)}, expected more than 0"
    if not isinstance(cell["lora_rank"], str) and not _is_number(cell["lora_rank"]):
        yield f'has lora_rank {json.dumps(cell["lora_rank"])}, neither a number nor ranks as in "8+64"'
    for one, other in _TOGETHER:
        if (one in cell) != (other in cell):
            yield f"has not both {one} and {other}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
