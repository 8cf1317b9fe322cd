"""`epilora serve`."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import ValidationError
from pydantic_settings import SettingsError

from epilora.cli.directories import Directories
from epilora.cli.output import fail, print_error
from epilora.cli.supervisor import ServeOptions, Supervisor
from epilora.errors import EpiloraError, InvalidArgumentError
from epilora.families import SIZED_FAMILIES
from epilora.logs import setup_logs
from epilora.model_spec import ModelSpec, reading_model
from epilora.placement import ExpertPlacement
from epilora.settings import CommonSettings, GatewaySettings, LoaderSettings, WorkerSettings
from epilora.settings_errors import EXIT_BAD_SETTINGS, REASONS_OF_VARIABLES, Problem, problems_of

EXIT_USAGE = 2
EXIT_SIGNAL = 128
S = TypeVar("S", bound=CommonSettings)
_OPTIONS = {"num_ranks": "--ranks", "dispatch_backend": "--dispatch", "drain_timeout_seconds": "--drain-timeout"}
"""Options that are not named as their setting is."""


def serve(
    model: Annotated[
        Path | None, typer.Option(help="Directory of the Hugging Face checkpoint.", show_default="EPILORA_MODEL")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks the experts are spread over; one process each.", show_default="1"),
    ] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="NAME=SOURCE", help="Load this at start; may be repeated.")
    ] = None,
    adapter_root: Annotated[
        list[Path] | None,
        typer.Option(help="Adapters may lie under this directory, too; may be repeated.", show_default=False),
    ] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Public services.", show_default="127.0.0.1:50051")
    ] = None,
    metrics_listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help='Prometheus metrics; "" for none.', show_default="127.0.0.1:9400"),
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="The adapter registry lives here.", show_default=".epilora")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Unix sockets; by default made from the state directory.")
    ] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Slice cache; by default in shared memory.")] = None,
    placement: Annotated[
        str | None, typer.Option(help="linear, round_robin, or a JSON file.", show_default="linear")
    ] = None,
    dispatch: Annotated[
        str | None,
        typer.Option(
            help="How rows travel: auto, local, allgather_reducescatter, all_to_all or one_sided.", show_default="auto"
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.", show_default="auto")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.", show_default="auto")] = None,
    load_format: Annotated[
        str | None, typer.Option(help="safetensors, or random for benchmarks.", show_default="safetensors")
    ] = None,
    num_adapter_slots: Annotated[
        int | None, typer.Option(min=1, help="Adapters that may be active at once.", show_default="32")
    ] = None,
    drain_timeout: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds for requests in flight at a stop.", show_default="30.0")
    ] = None,
    start_timeout: Annotated[float, typer.Option(min=1.0, help="Seconds until the service must be ready.")] = 900.0,
    log_level: Annotated[str | None, typer.Option(help="DEBUG, INFO, WARNING or ERROR.", show_default="INFO")] = None,
    ready_file: Annotated[Path | None, typer.Option(help="Write addresses and pids here as JSON when ready.")] = None,
) -> None:
    """Serves a model on this machine: loader, one worker per rank, and the gateway.

    A setting is what its option says, else its EPILORA_* variable (EPILORA_NUM_RANKS for --ranks), else
    the default; some have no option. SIGTERM, SIGHUP or Ctrl-C stops everything in order; a second
    SIGTERM or Ctrl-C kills everything at once. A process that ends is started again, EPILORA_MAX_RESTARTS
    times within EPILORA_RESTART_WINDOW_SECONDS; then the service stops with its last error.

    Exit codes: 0 after a stop in order; 128 + the signal's number if a second one cut that short; 1 or 3 if it
    could not start, or a process of it not any more; 2 if an option is wrong, 78 if a variable is.
    """
    adapters = _parse_adapters(adapter or [])
    options = {
        "model": model,
        "num_ranks": ranks,
        "run_dir": run_dir,
        "state_dir": state_dir,
        "cache_dir": cache_dir,
        "listen": listen,
        "metrics_listen": metrics_listen,
        "placement": placement,
        "dispatch_backend": dispatch,
        "dtype": dtype,
        "device": device,
        "load_format": load_format,
        "num_adapter_slots": num_adapter_slots,
        "drain_timeout_seconds": drain_timeout,
        "log_level": log_level,
    }
    given = {name: value for name, value in options.items() if value is not None}
    worker, loader, gateway = read_settings(given)
    setup_logs("serve", level=worker.log_level)
    try:
        directories = Directories.choose(
            state=gateway.state_dir,
            run=worker.run_dir if "run_dir" in worker.model_fields_set else None,
            cache=loader.cache_dir if "cache_dir" in loader.model_fields_set else None,
        )
        _check_model(worker)
        roots = [*loader.adapter_roots, *(adapter_root or [])]
        roots += [Path(source.removeprefix("file://")) for source in adapters.values()]
        resolved = {
            "model": worker.model.resolve(),
            "run_dir": directories.run,
            "state_dir": directories.state,
            "cache_dir": directories.cache,
            "adapter_roots": json.dumps([str(root.resolve()) for root in roots]),
        }
        serve_options = ServeOptions(
            num_ranks=worker.num_ranks,
            run_dir=directories.run,
            state_dir=directories.state,
            loader_address=gateway.model_copy(update={"run_dir": directories.run}).loader_address_resolved(),
            listen=gateway.listen,
            adapters=adapters,
            environment={f"EPILORA_{name.upper()}": str(value) for name, value in {**given, **resolved}.items()},
            drain_timeout_seconds=gateway.drain_timeout_seconds,
            start_timeout_seconds=start_timeout,
            max_restarts=worker.max_restarts,
            restart_window_seconds=worker.restart_window_seconds,
            ready_file=ready_file,
        )
        with directories.owned():
            killed_by = asyncio.run(_run(serve_options))
    except EpiloraError as error:
        ending = fail(error)
        raise typer.Exit(EXIT_BAD_SETTINGS) if error.reason in REASONS_OF_VARIABLES else ending from None
    if killed_by is not None:
        raise typer.Exit(EXIT_SIGNAL + killed_by)


async def _run(options: ServeOptions) -> signal.Signals | None:
    return await Supervisor(options).run()


def read_settings(given: Mapping[str, object]) -> tuple[WorkerSettings, LoaderSettings, GatewaySettings]:
    """The settings that the processes will have: what options gave, else the variable, else the default.

    Raises:
        typer.Exit: some are wrong, and one line each was printed; 2 if all of those are options, else 78.
    """
    wrong: dict[str, Problem] = {}
    worker = _read(WorkerSettings, given, wrong)
    loader = _read(LoaderSettings, given, wrong)
    gateway = _read(GatewaySettings, given, wrong)
    if worker is not None and loader is not None and gateway is not None:
        return worker, loader, gateway
    usage = True
    for field, problem in wrong.items():
        option = _OPTIONS.get(field, f"--{field.replace('_', '-')}")
        if problem.value is None:
            line = f"neither {option} nor {problem.variable} is given"
        else:
            line = problem.line(option if field in given else "")
        usage &= field in given or problem.value is None
        print_error("INVALID_ARGUMENT", "BAD_SETTING", line)
    raise typer.Exit(EXIT_USAGE if usage else EXIT_BAD_SETTINGS)


def _read(cls: type[S], given: Mapping[str, Any], wrong: dict[str, Problem]) -> S | None:
    try:
        return cls(**given)
    except (ValidationError, SettingsError) as error:
        wrong.update({problem.field: problem for problem in problems_of(error)})
        return None


def _check_model(settings: WorkerSettings) -> None:
    """What every worker would find wrong after half a minute, found before any is started."""
    with reading_model(settings.model):
        if not (settings.model / "config.json").is_file():
            raise InvalidArgumentError(
                f"--model is {settings.model}, expected a directory with a checkpoint's config.json", reason="NO_MODEL"
            )
    # Where the device is `auto`, the workers' launcher looks at it.
    settings.check_expert_backend(settings.why_no_kernels(on_gpu=settings.device != "cpu"))
    num_placed = settings.num_placed(settings.num_ranks)
    # Others are described by transformers, which only workers have; they say it if they cannot.
    if ModelSpec.model_type_of(settings.model) in SIZED_FAMILIES:
        ExpertPlacement.make(settings.placement, ModelSpec.from_directory(settings.model), num_placed)


def _parse_adapters(pairs: list[str]) -> dict[str, str]:
    adapters = {}
    for pair in pairs:
        name, separator, source = pair.partition("=")
        if not separator or not name or not source:
            raise typer.BadParameter(f"--adapter is {pair!r}, expected NAME=SOURCE")
        # The processes may have another working directory one day: sources are absolute from here on.
        adapters[name] = source if source.startswith("file://") else str(Path(source).resolve())
    return adapters
