"""The JSON file of an explicit placement (docs/placement.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from epilora.errors import InvalidArgumentError, NotFoundError

_Tables = dict[int, tuple[tuple[int, ...], ...]]


def read_placement_file(path: Path, num_experts: Mapping[int, int]) -> _Tables:
    """Per MoE layer, the lists of experts by rank, as the file has them.

    Args:
        path: {"all_layers": [[experts of rank 0], [rank 1], ...]} or {"layers": {"0": [[...], ...], ...}};
            with both, "layers" overrides single layers.
        num_experts: E of each MoE layer of the model.

    Raises:
        NotFoundError: no such file.
        InvalidArgumentError: reason BAD_PLACEMENT; not such a file, or its layers are not the model's.
    """
    content = _read(path)
    unknown = sorted(set(content) - {"all_layers", "layers"})
    if unknown:
        raise _error(path, f'unknown keys {unknown[:8]}, expected "all_layers" or "layers"')
    layers = content.get("layers", {})
    if not isinstance(layers, dict):
        raise _error(path, '"layers" is not an object of layer number: lists')
    tables: _Tables = {}
    if "all_layers" in content:
        table = _table(content["all_layers"], f'{path}: "all_layers"')
        tables = dict.fromkeys(num_experts, table)
    for key, value in layers.items():
        if not (key.isascii() and key.isdecimal()) or int(key) not in num_experts:
            raise _error(path, f"layer {key!r} is not an MoE layer of the model, which are {_few(num_experts)}")
        tables[int(key)] = _table(value, f"{path}: layer {key}")
    missing = sorted(set(num_experts) - set(tables))
    if missing:
        raise _error(path, f"{len(missing)} MoE layers have no placement, first {missing[:8]}")
    return tables


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise NotFoundError(
            f'placement {str(path)!r} is neither "linear" nor "round_robin" nor an existing file',
            reason="PLACEMENT_NOT_FOUND",
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise _error(path, f"not a readable JSON file: {error}") from error
    if not isinstance(content, dict):
        raise _error(path, f"holds {type(content).__name__}, not an object")
    return content


def _table(value: Any, where: str) -> tuple[tuple[int, ...], ...]:
    lists = isinstance(value, list) and all(isinstance(experts, list) for experts in value)
    if not lists or not all(type(expert) is int for experts in value for expert in experts):
        raise InvalidArgumentError(f"{where} is not a list, by rank, of lists of expert ids", reason="BAD_PLACEMENT")
    return tuple(tuple(experts) for experts in value)


def _error(path: Path, message: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{path}: {message}", reason="BAD_PLACEMENT")


def _few(layers: Mapping[int, int]) -> str:
    listed = sorted(layers)
    return str(listed) if len(listed) <= 8 else f"{listed[:7]} ... {listed[-1]}"
