"""`epilora adapter load|unload|list|get`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from google.protobuf import duration_pb2
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from epilora.adapters.layout_hints import LayoutHints
from epilora.cli.client import DEFAULT_ADDRESS, Address, Timeout, connected
from epilora.cli.output import console, error_console, format_bytes, plain
from epilora.cli.tables import Cell, print_records, print_table
from epilora.v1 import adapter_service_pb2, adapter_service_pb2_grpc, types_pb2

app = typer.Typer(help="Loads, unloads and shows adapters.", no_args_is_help=True)

LOADING_STATES = (types_pb2.ADAPTER_STATE_LOADING, types_pb2.ADAPTER_STATE_STAGED)
WATCH_ATTEMPTS = 40
WATCH_PAUSE_SECONDS = 0.05


@app.command()
def load(
    name: Annotated[str, typer.Argument(help="Name that requests will use.")],
    source: Annotated[str, typer.Argument(help="Directory with adapter_config.json and the weights.")],
    allow_partial: Annotated[bool, typer.Option(help="Accept tensors that fit nothing in the model.")] = False,
    swapped: Annotated[
        bool | None,
        typer.Option("--swapped/--not-swapped", help="In and out of stacked experts, where the file does not say it."),
    ] = None,
    rank_from_shape: Annotated[
        bool, typer.Option(help="Stacked experts are all of the model's, whatever rank the config has.")
    ] = False,
    parameter: Annotated[
        list[str] | None, typer.Option(help="Stacked parameter that has a pair, where the config names none.")
    ] = None,
    address: Address = DEFAULT_ADDRESS,
    timeout: Timeout = 600.0,
) -> None:
    """Loads an adapter, or reloads a name as a new generation."""
    hints = LayoutHints(
        swapped=swapped, expert_rank_from_shape=rank_from_shape, stacked_parameters=tuple(parameter or ())
    )
    request = adapter_service_pb2.LoadAdapterRequest(
        name=name, source=_absolute(source), allow_partial=allow_partial, layout_hints=hints.to_proto()
    )
    with connected(address) as channel:
        stub = adapter_service_pb2_grpc.AdapterServiceStub(channel)
        # A name may take several lines, which a bar has not.
        error_console.print(plain(f"loading {name}"))
        with _progress() as progress:
            call = stub.LoadAdapter.future(request, timeout=timeout)
            watching = threading.Thread(target=_follow, args=(stub, name, call, progress), daemon=True)
            watching.start()
            adapter = call.result().adapter
            watching.join(timeout=1.0)
    _print_adapter(adapter)


def _absolute(source: str) -> str:
    """A relative path is meant from here; the service has another working directory."""
    return source if "://" in source or Path(source).is_absolute() else str(Path(source).resolve())


def _progress() -> Progress:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(table_column=Column(no_wrap=True)),
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
    )
    return Progress(*columns, console=error_console, transient=False)


def _follow(stub: adapter_service_pb2_grpc.AdapterServiceStub, name: str, call: Any, progress: Progress) -> None:
    """Shows what WatchAdapter tells until the load has ended."""
    bar = progress.add_task("loading", total=None)
    for observation in _observations(stub, name, call):
        adapter = observation.adapter
        if adapter.state not in LOADING_STATES and call.done():
            break
        total = observation.bytes_total or None
        state = types_pb2.AdapterState.Name(adapter.state).removeprefix("ADAPTER_STATE_").lower()
        progress.update(bar, completed=observation.bytes_done, total=total, description=state)
        if adapter.state not in LOADING_STATES and adapter.generation:
            break


def _observations(
    stub: adapter_service_pb2_grpc.AdapterServiceStub, name: str, call: Any
) -> Iterator[adapter_service_pb2.WatchAdapterResponse]:
    pause = threading.Event()
    for _ in range(WATCH_ATTEMPTS):
        watch = stub.WatchAdapter(adapter_service_pb2.WatchAdapterRequest(name=name))
        call.add_done_callback(_canceller(watch))
        try:
            yield from watch
            return
        except grpc.RpcError as error:
            # The watch can overtake the load, whose name is not there yet then.
            if call.done() or error.code() is not grpc.StatusCode.NOT_FOUND:
                return
            pause.wait(WATCH_PAUSE_SECONDS)


def _canceller(watch: Any) -> Callable[[Any], None]:
    return lambda _: watch.cancel()


@app.command()
def unload(
    name: str,
    drain_timeout: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds that requests in flight may go on.")
    ] = None,
    address: Address = DEFAULT_ADDRESS,
    timeout: Timeout = 120.0,
) -> None:
    """Lets requests in flight finish and frees the adapter."""
    request = adapter_service_pb2.UnloadAdapterRequest(name=name)
    if drain_timeout is not None:
        drain = duration_pb2.Duration()
        drain.FromNanoseconds(int(drain_timeout * 1e9))
        request.drain_timeout.CopyFrom(drain)
    with connected(address) as channel:
        response = adapter_service_pb2_grpc.AdapterServiceStub(channel).UnloadAdapter(request, timeout=timeout)
    cancelled = response.num_requests_cancelled
    console.print(
        plain(
            f"unloaded {name}: {format_bytes(response.freed_bytes)} freed"
            + (f", {cancelled} requests cancelled" if cancelled else "")
        )
    )


@app.command("list")
def list_adapters(address: Address = DEFAULT_ADDRESS, timeout: Timeout = 30.0) -> None:
    """Shows all adapters."""
    adapters: list[types_pb2.Adapter] = []
    with connected(address) as channel:
        stub, token = adapter_service_pb2_grpc.AdapterServiceStub(channel), ""
        while True:
            request = adapter_service_pb2.ListAdaptersRequest(page_size=500, page_token=token)
            response = stub.ListAdapters(request, timeout=timeout)
            adapters.extend(response.adapters)
            token = response.next_page_token
            if not token:
                break
    print_adapters(adapters)


def print_adapters(adapters: Sequence[types_pb2.Adapter]) -> None:
    """One row an adapter."""
    rows = [
        (
            plain(adapter.name),
            types_pb2.AdapterState.Name(adapter.state).removeprefix("ADAPTER_STATE_"),
            str(adapter.generation),
            str(adapter.adapter_slot) if adapter.adapter_slot >= 0 else "-",
            str(adapter.num_requests_in_flight),
            format_bytes(adapter.resident_bytes),
            plain(adapter.source),
        )
        for adapter in adapters
    ]
    print_table(("adapter", "state", "generation", "slot", "in flight", "resident", "source"), rows)


@app.command()
def get(name: str, address: Address = DEFAULT_ADDRESS, timeout: Timeout = 30.0) -> None:
    """Shows one adapter and what was found in its files."""
    with connected(address) as channel:
        stub = adapter_service_pb2_grpc.AdapterServiceStub(channel)
        response = stub.GetAdapter(adapter_service_pb2.GetAdapterRequest(name=name), timeout=timeout)
    _print_adapter(response.adapter)


def _print_adapter(adapter: types_pb2.Adapter) -> None:
    report = adapter.report
    experts = sorted({coverage.layer for coverage in report.expert_coverage})
    rows = {
        "adapter": adapter.name,
        "state": types_pb2.AdapterState.Name(adapter.state).removeprefix("ADAPTER_STATE_"),
        "generation": adapter.generation,
        "slot": adapter.adapter_slot,
        "source": adapter.source,
        "digest": adapter.digest,
        "resident": format_bytes(adapter.resident_bytes),
        "written by": f"PEFT {report.producer}" if report.producer else "not recorded",
        "expert layout": report.expert_layout,
        "expert layers": ", ".join(map(str, experts)) or "none",
        "dense modules": len(report.dense_modules),
        "lora ranks": f"{report.min_lora_rank} to {report.max_lora_rank}",
        "tensors": f"{report.num_tensors_used} of {report.num_tensors} used, {report.file_dtype}",
        "read": f"{format_bytes(report.bytes_read)} of {format_bytes(report.file_bytes)}"
        + (" (cached)" if report.cache_hit else ""),
    }
    lines: list[tuple[Text, Cell]] = [(plain(key), plain(str(value))) for key, value in rows.items()]
    lines += [(plain("warning", "yellow"), plain(warning, "yellow")) for warning in report.warnings]
    lines += [(plain("ignored", "yellow"), plain(ignored, "yellow")) for ignored in report.ignored_tensors]
    if adapter.HasField("failure"):
        said = f"{adapter.failure.reason}: {adapter.failure.message}"
        lines.append((plain("failure", "red"), plain(said, "red")))
    print_records([lines])
