"""`epilora plan`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from epilora.cli.client import console, fail, format_bytes
from epilora.errors import EpiloraError
from epilora.memory_plan import RankPlan, element_bytes_of, plan_memory, read_adapter
from epilora.model_spec import ModelSpec
from epilora.placement import ExpertPlacement


def plan(
    model: Annotated[Path, typer.Option(help="Directory of the Hugging Face checkpoint; config.json may be enough.")],
    ranks: Annotated[int, typer.Option(min=1, help="Ranks the experts are spread over.")] = 1,
    placement: Annotated[str, typer.Option(help="linear, round_robin, or a JSON file.")] = "linear",
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", "--adapters", metavar="[NAME=]DIR", help="Count this one in; may be repeated."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    max_lora_rank: Annotated[int, typer.Option(min=1, help="Largest lora_rank accepted.")] = 512,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prints which experts and how many bytes each rank will hold. Reads headers only, starts nothing.

    The key/value cache comes on top: it takes what EPILORA_KV_CACHE_BYTES says, or what is free.
    """
    try:
        spec = ModelSpec.from_directory(model)
        placed = ExpertPlacement.make(placement, spec, ranks)
        forms = {}
        for text in adapter or []:
            name, separator, directory = text.rpartition("=")
            path = Path(directory.removeprefix("file://"))
            forms[name if separator else path.name] = read_adapter(path, spec, max_lora_rank=max_lora_rank)
        plans = plan_memory(spec, placed, forms, element_bytes=element_bytes_of(spec, dtype))
    except EpiloraError as error:
        raise fail(error) from None
    if as_json:
        typer.echo(json.dumps(_as_json(spec, placed, plans), indent=2))
        return
    console.print(
        f"{spec.name} ({spec.model_type}): {len(spec.moe_layers)} of {spec.num_layers} layers with "
        f"{spec.moe_layers[0].num_experts} experts; placement {placed.strategy} {placed.placement_id[:12]}"
    )
    console.print(_table(spec, placed, plans))


def _table(model: ModelSpec, placement: ExpertPlacement, plans: tuple[RankPlan, ...]) -> Table:
    first = model.moe_layers[0].layer
    names = [adapter.name for adapter in plans[0].adapters]
    table = Table("rank", f"experts of layer {first}", "expert weights", "other weights", *names, "total")
    for rank in plans:
        sizes = [rank.base_expert_bytes, rank.base_dense_bytes]
        sizes += [adapter.expert_bytes + adapter.dense_bytes for adapter in rank.adapters]
        experts = ranges(placement.local_experts(first, rank.ep_rank))
        table.add_row(str(rank.ep_rank), experts, *map(format_bytes, [*sizes, rank.total_bytes]))
    return table


def ranges(numbers: tuple[int, ...]) -> str:
    """Numbers for people. Example: (0, 1, 2, 5, 7, 8) -> "0-2 5 7-8"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _as_json(model: ModelSpec, placement: ExpertPlacement, plans: tuple[RankPlan, ...]) -> dict[str, object]:
    return {
        "model": model.name,
        "placement": {
            "strategy": placement.strategy,
            "placement_id": placement.placement_id,
            "layers": {
                layer: [placement.local_experts(layer, ep_rank) for ep_rank in range(placement.num_ranks)]
                for layer in placement.layers
            },
        },
        "ranks": [{**asdict(rank), "total_bytes": rank.total_bytes} for rank in plans],
    }
