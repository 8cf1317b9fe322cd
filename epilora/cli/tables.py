"""Tables that cut nothing off: names fold, numbers stay whole, and what is wider than the terminal is turned round."""

from __future__ import annotations

from collections.abc import Sequence

from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from epilora.cli.output import console, plain

Cell = str | Text
"""A string stays whole, such as a number with its unit; a Text may fold: its words, or within them if they are long."""

_FOLDED = 12
"""Columns of the terminal that text is folded to at least."""
_MAX_LINES = 6
"""That a cell is folded to where rows are side by side."""
_PADDING = 2
_BORDER = 1


def print_table(heads: Sequence[Cell], rows: Sequence[Sequence[Cell]]) -> None:
    """Prints a row a line; if its cells do not fit side by side, each row as lines of a head and its cell.

    Args:
        heads: one a column. They fold at their words.
        rows: as many cells each as there are heads.
    """
    titles = [head if isinstance(head, Text) else plain(head) for head in heads]
    widths = _widths([titles, *rows])
    if widths is not None and not _is_tall([titles, *rows], widths):
        table = Table()
        for title, width in zip(titles, widths, strict=True):
            table.add_column(title, width=width)
        for row in rows:
            table.add_row(*map(_shown, row))
        console.print(table)
        return
    records = [list(zip(titles, row, strict=True)) for row in rows or [[""] * len(titles)]]
    print_records(records)


def print_records(records: Sequence[Sequence[tuple[Text, Cell]]]) -> None:
    """Prints lines of a head and its cell, with a rule between records."""
    lines = [line for record in records for line in record]
    table = Table(show_header=False)
    # Terminals that are too narrow even for this leave the widths to rich: then numbers fold, too.
    for width in _widths(lines) or (None, None):
        table.add_column(width=width)
    for record in records:
        for head, cell in record:
            table.add_row(head, _shown(cell))
        table.add_section()
    console.print(table)


def _shown(cell: Cell) -> Text:
    return cell if isinstance(cell, Text) else plain(cell)


def _widths(rows: Sequence[Sequence[Cell]]) -> list[int] | None:
    """The width of each column, the widest shrunk first; None: they do not fit."""
    columns = list(zip(*rows, strict=True))
    room = console.width - _BORDER - (_BORDER + _PADDING) * len(columns)
    least = [max(_least_width(cell) for cell in column) for column in columns]
    if sum(least) > room:
        return None
    widths = [max(_measured(cell).maximum for cell in column) for column in columns]
    while sum(widths) > room:
        widest = max(range(len(widths)), key=lambda column: (widths[column] > least[column], widths[column]))
        widths[widest] -= 1
    return widths


def _is_tall(rows: Sequence[Sequence[Cell]], widths: Sequence[int]) -> bool:
    return any(
        _shown(cell).cell_len > _MAX_LINES * width for row in rows for cell, width in zip(row, widths, strict=True)
    )


def _least_width(cell: Cell) -> int:
    return min(_measured(cell).minimum, _FOLDED) if isinstance(cell, Text) else _measured(cell).maximum


def _measured(cell: Cell) -> Measurement:
    """Its longest word and its longest line."""
    return Measurement.get(console, console.options, _shown(cell))
