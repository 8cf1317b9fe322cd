"""Per-expert pairs that differ in the expert's number alone, found and kept all at once.

Most per-expert adapters hold, of every layer and projection, an A of one shape and right behind it a B of one shape for
each expert. Of such a group one pair is looked at with care, as any other would be; the others have the same names
but for the number, and the same kinds. `TensorTable` says so without a single string being cut out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from epilora.adapters.keys import ENDING_A, PREFIX, Pair
from epilora.adapters.normal_form import AdapterTarget, ExpertLayout, GridPairs
from epilora.adapters.peft_config import PeftConfig
from epilora.adapters.per_expert import match_expert, resolve_expert_pair
from epilora.adapters.tensor_table import TensorTable
from epilora.adapters.text_words import Mask, Positions
from epilora.families import Projection

_MAX_DIGITS = 6
_DOT = ord(".")


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Experts of one list with a pair for one projection."""

    representative: Pair
    experts: Positions
    """Ascending."""
    rows_of_a: Positions


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """The groups of a file."""

    groups: tuple[Group, ...]
    is_in_group: Mask
    """By tensor."""


def find_grid(table: TensorTable, projections: Sequence[str]) -> Grid | None:
    """Groups the pairs of a file whose names end in `.{expert}.{projection}.lora_A.weight` and `...lora_B.weight`.

    Args:
        table: the file's tensors.
        projections: what experts' projections are called in names.

    Returns:
        None if the experts of some list differ in more than their number, have one twice, or there are none: then
        each tensor has to be looked at.
    """
    rows_of_a = _neighbours(table)
    found = [_of_projection(table, rows_of_a, name) for name in projections]
    groups: list[Group] = []
    is_in_group = np.zeros(len(table), dtype=np.bool_)
    for rows, experts, path_ends in found:
        of_list, firsts = _lists(table, table.name_begins[rows], path_ends)
        order = np.lexsort((experts, of_list))
        bounds = np.searchsorted(of_list[order], np.arange(len(firsts) + 1))
        for number, first in enumerate(firsts):
            members = order[bounds[number] : bounds[number + 1]]
            group = _group(table, rows[members], experts[members], int(rows[first]))
            if group is None:
                return None
            groups.append(group)
        is_in_group[rows] = is_in_group[rows + 1] = True
    return Grid(groups=tuple(groups), is_in_group=is_in_group) if groups else None


def _neighbours(table: TensorTable) -> Positions:
    """Rows of the A's whose B, with the same name but for the side, is the next tensor."""
    ends, sizes = table.name_ends, table.name_ends - table.name_begins
    is_a = sizes > len(ENDING_A) + 1
    is_a[is_a] = table.words.reads(ends[is_a] - len(ENDING_A), ENDING_A.encode())
    fits = is_a[:-1] & (sizes[:-1] == sizes[1:])
    # Of two names of the same size, one with A's ending, the other is that of the B if one letter differs.
    letter = sizes[:-1] - len(ENDING_A) + ENDING_A.index("A")
    difference = np.uint64(ord("A") ^ ord("B")) << ((letter % 8) * 8).astype(np.uint64)
    for place, column in enumerate(table.name_columns):
        fits &= (column[:-1] ^ column[1:]) == np.where(letter // 8 == place, difference, np.uint64(0))
    return np.flatnonzero(fits)


def _of_projection(table: TensorTable, rows: Positions, name: str) -> tuple[Positions, Positions, Positions]:
    """Of the pairs that are one expert's projection: rows, experts, and where the path of their list ends."""
    tail = f".{name}".encode()
    begins, number_ends = table.name_begins[rows], table.name_ends[rows] - len(ENDING_A) - len(tail)
    fits = number_ends - begins > _MAX_DIGITS + 1
    fits[fits] = table.words.reads(number_ends[fits], tail)
    rows, number_ends = rows[fits], number_ends[fits]
    experts, number_begins = table.words.numbers(number_ends, max_digits=_MAX_DIGITS)
    is_expert = (experts >= 0) & (table.words.bytes[number_begins - 1] == _DOT)
    return rows[is_expert], experts[is_expert], number_begins[is_expert] - 1


def _lists(table: TensorTable, begins: Positions, ends: Positions) -> tuple[Positions, list[int]]:
    """Which list of experts each path is, and the first of each list. Those of one list mostly follow each other."""
    if not len(begins):
        return begins, []
    starts = table.words.run_starts(begins, ends)
    firsts: dict[str, int] = {}
    of_run = [firsts.setdefault(table.text[begins[start] : ends[start]], start) for start in starts.tolist()]
    number_of = {first: number for number, first in enumerate(firsts.values())}
    lengths = np.diff(np.append(starts, len(begins)))
    return np.repeat([number_of[first] for first in of_run], lengths), list(number_of)


def _group(table: TensorTable, rows: Positions, experts: Positions, first: int) -> Group | None:
    a_codes, b_codes = table.codes[rows], table.codes[rows + 1]
    is_uniform = (a_codes == a_codes[0]).all() and (b_codes == b_codes[0]).all()
    if not is_uniform or (experts[1:] == experts[:-1]).any():
        return None
    a, b = table[first], table[first + 1]
    module = a.name.removesuffix(ENDING_A).removeprefix(PREFIX)
    return Group(representative=Pair(module, a, b), experts=experts, rows_of_a=rows)


def resolve_groups(
    grid: Grid, table: TensorTable, config: PeftConfig, target: AdapterTarget, renamed: Callable[[str], str]
) -> dict[tuple[int, Projection], GridPairs] | None:
    """What the groups are in a model; None if one of them is not that of a list of experts, or has another lora_rank
    than the config says.

    Args:
        grid: the groups.
        table: of the file.
        config: adapter_config.json, without patterns.
        target: the model.
        renamed: path of a module in the file -> in the model.

    Raises:
        AdapterFormatError: as resolve_expert_pair and match_expert.
    """
    experts: dict[tuple[int, Projection], GridPairs] = {}
    for group in grid.groups:
        pair = group.representative
        expert = None if pair.is_empty else match_expert(renamed(pair.module), target)
        if expert is None or expert.layout is not ExpertLayout.PER_EXPERT:
            return None
        place = (expert.moe.layer, expert.projection)
        resolved = resolve_expert_pair(pair, expert, config)
        differs = config.ranks.value_of(pair.module) != resolved.lora_rank
        if differs or place in experts or group.experts[-1] >= expert.moe.num_experts:
            return None
        experts[place] = GridPairs(table, group.experts, group.rows_of_a, resolved)
    return experts
