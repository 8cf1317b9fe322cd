"""`epilora inspect` and `epilora convert`: what is in an adapter, and the same adapter in another layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from epilora.adapters.convert import ConvertedLayout, convert_adapter
from epilora.adapters.inspection import Inspection, coverage, inspect_adapter
from epilora.adapters.layout_hints import LayoutHints
from epilora.adapters.open_adapter import open_adapter
from epilora.cli.model import read_model
from epilora.cli.output import EXIT_REFUSED, console, fail, format_bytes, plain
from epilora.cli.tables import print_table
from epilora.errors import EpiloraError

_SHADES = " ░▒▓█"
_MAX_COLUMNS = 64
_MAX_LISTED = 20

# What cannot be read is an error of the adapter, not of the command line.
Adapter = Annotated[Path, typer.Argument(help="Directory with adapter_config.json and the weights.", readable=False)]
Swapped = Annotated[
    bool | None,
    typer.Option("--swapped/--not-swapped", help="In and out of stacked experts, where the file does not say it."),
]
RankFromShape = Annotated[bool, typer.Option(help="Stacked experts are all of the model's, whatever rank it says.")]
Parameter = Annotated[
    list[str] | None,
    typer.Option(help="A stacked parameter that has a pair, where the config does not name it; may be repeated."),
]
AllowPartial = Annotated[bool, typer.Option(help="Accept tensors that fit nothing in the model.")]


def inspect(
    adapter: Adapter,
    model: Annotated[Path | None, typer.Option(help="Checkpoint that it would be loaded into.")] = None,
    ep: Annotated[int, typer.Option(min=1, max=4096, help="Expert-parallel ranks to count bytes for.")] = 1,
    placement: Annotated[str, typer.Option(help="linear, round_robin, or a JSON file.")] = "linear",
    allow_partial: AllowPartial = False,
    swapped: Swapped = None,
    rank_from_shape: RankFromShape = False,
    parameter: Parameter = None,
    verify: Annotated[bool, typer.Option(help="Read all values, too: NaN, infinities, zeros.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Shows what is in an adapter, and whether it would be served; exit code 1: it would not. Reads headers only.

    With --json an error is an object, too: {"path": ..., "error": {"code": ..., "reason": ..., "message": ...}}.
    """
    try:
        spec = None if model is None else read_model(model)
        hints = LayoutHints(
            swapped=swapped, expert_rank_from_shape=rank_from_shape, stacked_parameters=tuple(parameter or ())
        )
        with open_adapter(adapter) as opened:
            found = inspect_adapter(
                opened,
                model=spec,
                num_ranks=ep,
                placement=placement,
                allow_partial=allow_partial,
                hints=hints,
                verify=verify,
            )
    except EpiloraError as error:
        raise fail(error, as_json=as_json, adapter=adapter) from None
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        _print(found)
    if found.refusal is not None:
        raise typer.Exit(EXIT_REFUSED)


def convert(
    adapter: Adapter,
    out: Annotated[Path, typer.Argument(help="New directory.")],
    layout: Annotated[ConvertedLayout, typer.Option(help="What other tools read.")],
    model: Annotated[Path, typer.Option(help="Checkpoint that the adapter is for.")],
    swapped: Swapped = None,
    rank_from_shape: RankFromShape = False,
    parameter: Parameter = None,
) -> None:
    """Writes an adapter anew, one pair per expert or PEFT's stacked pairs; its deltas stay the same."""
    try:
        spec = read_model(model)
        hints = LayoutHints(
            swapped=swapped, expert_rank_from_shape=rank_from_shape, stacked_parameters=tuple(parameter or ())
        )
        with open_adapter(adapter) as opened:
            num_tensors = convert_adapter(opened, spec, out, layout, hints=hints)
    except EpiloraError as error:
        raise fail(error) from None
    console.print(plain(f"{out}: {num_tensors} tensors, {layout.value}"))


def _print(found: Inspection) -> None:
    facts = Table.grid(padding=(0, 2))
    for name, value in (
        ("adapter", found.path),
        ("producer", f"PEFT {found.producer}" if found.producer else "not recorded"),
        ("trained on", found.base_model or "not recorded"),
        ("weights", f"{found.num_tensors} tensors, {format_bytes(found.file_bytes)}, {', '.join(found.dtypes)}"),
        ("families", ", ".join(found.likely_families) or "no experts' names"),
        ("model", found.model),
        ("layout", found.layout),
        ("lora ranks", _range(found.lora_ranks)),
        ("scales", _range(found.scales)),
    ):
        if value:
            facts.add_row(Text(name, style="bold"), plain(value))
    console.print(facts)
    modules = [
        (plain(group.path), str(group.num_pairs), plain(_range(group.rows_of_a)), format_bytes(group.num_bytes))
        for group in found.groups[:_MAX_LISTED]
    ]
    if modules:
        console.print(plain("modules", "italic"))
        print_table(("module", "pairs", "rows of A", "bytes"), modules)
    if len(found.groups) > _MAX_LISTED:
        console.print(f"and {len(found.groups) - _MAX_LISTED} more modules")
    _print_heat_map(found)
    if found.bytes_per_rank:
        console.print(plain(f"{found.placement} placement", "italic"))
        ranks = [(str(rank), format_bytes(num_bytes)) for rank, num_bytes in enumerate(found.bytes_per_rank)]
        print_table(("EP rank", "bytes, as stored"), ranks)
    for module in found.saved_modules[:_MAX_LISTED]:
        console.print(plain(f"replaced by a trained weight: {module}"))
    for tensor in found.ignored[:_MAX_LISTED]:
        console.print(plain(f"left out: {tensor}", "yellow"))
    for warning in found.warnings:
        console.print(plain(f"warning: {warning}", "yellow"))
    if found.refusal is not None:
        console.print(plain(f"would be refused ({found.refusal.reason}): {found.refusal.message}", "bold red"))
    elif found.model:
        unread = "" if found.values_read else "; the values were not read (--verify looks for NaN and infinities)"
        console.print(Text(f"would be served{unread}", style="bold green"))


def _range(numbers: Sequence[float]) -> str:
    """All of a few numbers, the ends of many."""
    shown = [f"{number:g}" for number in numbers]
    return ", ".join(shown) if len(shown) < 6 else f"{shown[0]} to {shown[-1]}"


def _print_heat_map(found: Inspection) -> None:
    """Layers down, experts across: darker where more of an expert's projections have a pair."""
    num_experts, layers = coverage(found)
    if not layers:
        return
    width = max(1, min(num_experts, _MAX_COLUMNS, console.width - len(f"{max(layers):4d} ||")))
    console.print(Text(f"experts 0 to {num_experts - 1} across, layers down", style="bold"))
    for layer, values in layers.items():
        cells = []
        for column in range(width):
            part = values[column * num_experts // width : (column + 1) * num_experts // width]
            share = sum(part) / len(part)
            cells.append(_SHADES[0 if share == 0 else max(1, round(share * (len(_SHADES) - 1)))])
        console.print(Text(f"{layer:4d} |{''.join(cells)}|"))
