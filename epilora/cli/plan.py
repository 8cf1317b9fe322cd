"""`epilora plan`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from epilora.balance import balanced_placement, spread
from epilora.cli.client import channel_to
from epilora.cli.model import read_model
from epilora.cli.output import console, fail, format_bytes, plain
from epilora.cli.tables import Cell, print_table
from epilora.errors import EpiloraError, InvalidArgumentError
from epilora.memory_plan import RankPlan, element_bytes_of, plan_memory, read_adapter
from epilora.model_spec import ModelSpec
from epilora.placement import ExpertPlacement
from epilora.v1 import cluster_service_pb2, cluster_service_pb2_grpc

_TIMEOUT_SECONDS = 10.0


def plan(
    model: Annotated[Path, typer.Option(help="Directory of the Hugging Face checkpoint; config.json may be enough.")],
    ranks: Annotated[int, typer.Option(min=1, max=4096, help="Ranks the experts are spread over.")] = 1,
    placement: Annotated[
        str | None, typer.Option(help="linear (the default), round_robin, or a JSON file.", show_default=False)
    ] = None,
    load_from: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Place experts by the rows that this running service counted."),
    ] = None,
    expert_tp: Annotated[int, typer.Option(min=1, help="Ranks that share each expert (EPILORA_EXPERT_TP).")] = 1,
    redundant: Annotated[
        int, typer.Option(min=0, help="With --load-from: further copies of busy experts in each layer.")
    ] = 0,
    save: Annotated[
        Path | None, typer.Option(help="Write the placement here, for `epilora serve --placement`.")
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", "--adapters", metavar="[NAME=]DIR", help="Count this one in; may be repeated."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    sequences: Annotated[
        int, typer.Option(min=1, help="Requests generated at once on a rank: those of recurrent layers have states.")
    ] = 64,
    max_lora_rank: Annotated[int, typer.Option(min=1, help="Largest lora_rank accepted.")] = 512,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prints which experts and how many bytes each rank will hold. Reads headers only, starts nothing.

    The key/value cache comes on top: it takes what EPILORA_KV_CACHE_BYTES says, or what is free.

    With --json an error is an object, too, as `epilora inspect` prints it; its path is null if no adapter is at fault.
    """
    if load_from and placement:
        raise typer.BadParameter("--load-from makes a placement; give it or --placement, not both")
    if redundant and not load_from:
        raise typer.BadParameter("--redundant chooses busy experts; give --load-from with it")
    if ranks % expert_tp:
        raise typer.BadParameter(f"--expert-tp {expert_tp} does not divide --ranks {ranks}")
    num_placed = ranks // expert_tp
    at_fault: Path | None = None
    try:
        spec = read_model(model)
        balance = _balance(load_from, spec, num_placed, redundant) if load_from else None
        placed = balance.placement if balance else ExpertPlacement.make(placement or "linear", spec, num_placed)
        forms = {}
        for text in adapter or []:
            name, separator, directory = text.rpartition("=")
            path = Path(directory.removeprefix("file://"))
            name = name if separator else path.name
            if name in forms:
                raise typer.BadParameter(
                    f"two adapters are named {name!r}; give one another name: --adapter NAME={path}"
                )
            at_fault = path
            forms[name] = read_adapter(path, spec, max_lora_rank=max_lora_rank)
            at_fault = None
        plans = plan_memory(
            spec,
            placed,
            forms,
            element_bytes=element_bytes_of(spec, dtype),
            num_sequences=sequences,
            expert_tp=expert_tp,
        )
    except EpiloraError as error:
        raise fail(error, as_json=as_json, adapter=at_fault) from None
    if save:
        try:
            save.write_text(json.dumps({"layers": _tables(placed)}))
        except OSError as error:
            raise typer.BadParameter(f"--save {save} cannot be written: {error.strerror}") from None
    if as_json:
        spreads = {"spread_now": balance.spread_now, "spread_planned": balance.spread_planned} if balance else {}
        typer.echo(json.dumps({**_as_json(spec, placed, plans), **spreads}, indent=2))
        return
    console.print(
        plain(
            f"{spec.name} ({spec.model_type}): {len(spec.moe_layers)} of {spec.num_layers} layers with "
            f"{spec.moe_layers[0].num_experts} experts; placement {placed.strategy} {placed.placement_id[:12]}"
        )
    )
    if balance:
        console.print(
            f"rows of the busiest rank over the mean: now {balance.spread_now:.2f},"
            f" planned {balance.spread_planned:.2f}"
        )
    _print_ranks(spec, placed, plans)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Balance:
    """A placement made from counted rows, and how even it is beside the one that runs."""

    placement: ExpertPlacement
    spread_now: float
    spread_planned: float


def _balance(address: str, model: ModelSpec, num_ranks: int, num_redundant: int) -> _Balance:
    with channel_to(address) as channel:
        stub = cluster_service_pb2_grpc.ClusterServiceStub(channel)
        counted = stub.GetExpertLoad(cluster_service_pb2.GetExpertLoadRequest(), timeout=_TIMEOUT_SECONDS)
        running = stub.GetPlacement(cluster_service_pb2.GetPlacementRequest(), timeout=_TIMEOUT_SECONDS)
    load = {layer.layer: list(layer.expert_rows) for layer in counted.layers}
    expected = {moe.layer: moe.num_experts for moe in model.moe_layers}
    if {layer: len(rows) for layer, rows in load.items()} != expected:
        raise InvalidArgumentError(
            f"the service at {address} runs another model than {model.name}: its layers and experts differ",
            reason="ANOTHER_MODEL",
        )
    placement = balanced_placement(load, num_ranks=num_ranks, num_redundant_experts=num_redundant)
    return _Balance(
        placement=placement,
        spread_now=spread(ExpertPlacement.from_proto(running), load),
        spread_planned=spread(placement, load),
    )


def _print_ranks(model: ModelSpec, placement: ExpertPlacement, plans: tuple[RankPlan, ...]) -> None:
    first = model.moe_layers[0].layer
    names = [plain(f"adapter {adapter.name}") for adapter in plans[0].adapters]
    states = ["states"] if model.recurrent_layers else []
    rows: list[tuple[Cell, ...]] = []
    for rank in plans:
        sizes = [rank.base_expert_bytes, rank.base_dense_bytes, *[rank.state_bytes][: len(states)]]
        sizes += [adapter.expert_bytes + adapter.dense_bytes for adapter in rank.adapters]
        experts = ranges(placement.local_experts(first, rank.ep_rank * placement.num_ranks // len(plans)))
        rows.append((str(rank.ep_rank), plain(experts), *map(format_bytes, [*sizes, rank.total_bytes])))
    heads: tuple[Cell, ...] = (
        "rank",
        f"experts of layer {first}",
        "expert weights",
        "other weights",
        *states,
        *names,
        "total",
    )
    print_table(heads, rows)


def ranges(numbers: tuple[int, ...]) -> str:
    """Numbers for people. Example: (0, 1, 2, 5, 7, 8) -> "0-2 5 7-8"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _tables(placement: ExpertPlacement) -> dict[int, list[tuple[int, ...]]]:
    """Experts by rank, by layer."""
    ranks = range(placement.num_ranks)
    return {layer: [placement.local_experts(layer, ep_rank) for ep_rank in ranks] for layer in placement.layers}


def _as_json(model: ModelSpec, placement: ExpertPlacement, plans: tuple[RankPlan, ...]) -> dict[str, object]:
    return {
        "model": model.name,
        "placement": {
            "strategy": placement.strategy,
            "placement_id": placement.placement_id,
            "layers": _tables(placement),
        },
        "ranks": [{**asdict(rank), "total_bytes": rank.total_bytes} for rank in plans],
    }
