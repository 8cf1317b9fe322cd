"""`epilora serve`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from epilora.cli.client import fail
from epilora.cli.supervisor import ServeOptions, Supervisor
from epilora.errors import EpiloraError, InvalidArgumentError
from epilora.logs import setup_logs

MAX_SOCKET_PATH_BYTES = 107
_SHARED_MEMORY = Path("/dev/shm")


def serve(
    model: Annotated[Path, typer.Option(help="Directory of the Hugging Face checkpoint.")],
    ranks: Annotated[int, typer.Option(min=1, help="Ranks the experts are spread over; one process each.")] = 1,
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="NAME=SOURCE", help="Load this at start; may be repeated.")
    ] = None,
    adapter_root: Annotated[
        list[Path] | None, typer.Option(help="Adapters may lie under this directory; may be repeated.")
    ] = None,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Public services.")] = "127.0.0.1:50051",
    metrics_listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help='Prometheus metrics; "" for none.')
    ] = "127.0.0.1:9400",
    state_dir: Annotated[Path, typer.Option(help="The adapter registry lives here.")] = Path(".epilora"),
    run_dir: Annotated[
        Path | None, typer.Option(help="Unix sockets; by default made from the state directory.")
    ] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Slice cache; by default in shared memory.")] = None,
    placement: Annotated[str, typer.Option(help="linear, round_robin, or a JSON file.")] = "linear",
    dispatch: Annotated[
        str, typer.Option(help="How rows travel: auto, local, allgather_reducescatter or all_to_all.")
    ] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    load_format: Annotated[str, typer.Option(help="safetensors, or random for benchmarks.")] = "safetensors",
    num_adapter_slots: Annotated[int, typer.Option(min=1, help="Adapters that may be active at once.")] = 32,
    drain_timeout: Annotated[float, typer.Option(min=0.0, help="Seconds for requests in flight at a stop.")] = 30.0,
    start_timeout: Annotated[float, typer.Option(min=1.0, help="Seconds until the service must be ready.")] = 900.0,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    ready_file: Annotated[Path | None, typer.Option(help="Write addresses and pids here as JSON when ready.")] = None,
) -> None:
    """Serves a model on this machine: loader, one worker per rank, and the gateway.

    Settings without an option here are taken from EPILORA_* variables. SIGTERM or Ctrl-C stops
    everything in order; a second one kills everything at once.
    """
    setup_logs("serve", level=log_level)
    try:
        adapters = _parse_adapters(adapter or [])
        state_dir = state_dir.resolve()
        name = f"epilora-{os.getuid()}-{hashlib.blake2b(str(state_dir).encode(), digest_size=4).hexdigest()}"
        made_here = [] if run_dir else [Path(tempfile.gettempdir()) / name]
        run_dir = (run_dir or Path(tempfile.gettempdir()) / name).resolve()
        made_cache = cache_dir is None
        cache_dir = (cache_dir or _default_cache_dir(run_dir, name)).resolve()
        if made_cache:
            made_here.append(cache_dir)
        _check(model, run_dir)
        for directory in (state_dir, run_dir):
            directory.mkdir(parents=True, exist_ok=True)
        roots = [root.resolve() for root in adapter_root or []]
        roots += [Path(source.removeprefix("file://")).resolve() for source in adapters.values()]
        environment = {
            "MODEL": str(model.resolve()),
            "NUM_RANKS": str(ranks),
            "RUN_DIR": str(run_dir),
            "STATE_DIR": str(state_dir),
            "CACHE_DIR": str(cache_dir),
            "METRICS_LISTEN": metrics_listen,
            "PLACEMENT": placement,
            "DISPATCH_BACKEND": dispatch,
            "DTYPE": dtype,
            "DEVICE": device,
            "LOAD_FORMAT": load_format,
            "NUM_ADAPTER_SLOTS": str(num_adapter_slots),
            "DRAIN_TIMEOUT_SECONDS": str(drain_timeout),
            "LOG_LEVEL": log_level,
            "ADAPTER_ROOTS": json.dumps([str(root) for root in roots]),
        }
        options = ServeOptions(
            num_ranks=ranks,
            run_dir=run_dir,
            state_dir=state_dir,
            listen=listen,
            adapters=adapters,
            environment={f"EPILORA_{key}": value for key, value in environment.items()},
            drain_timeout_seconds=drain_timeout,
            start_timeout_seconds=start_timeout,
            ready_file=ready_file,
        )
        asyncio.run(_run(options))
        # Shared memory above all: nobody else frees it. After a crash the next start takes the same directories.
        for directory in made_here:
            shutil.rmtree(directory, ignore_errors=True)
    except EpiloraError as error:
        raise fail(error) from None


async def _run(options: ServeOptions) -> None:
    await Supervisor(options).run()


def _parse_adapters(pairs: list[str]) -> dict[str, str]:
    adapters = {}
    for pair in pairs:
        name, separator, source = pair.partition("=")
        if not separator or not name or not source:
            raise typer.BadParameter(f"--adapter is {pair!r}, expected NAME=SOURCE")
        # The processes may have another working directory one day: sources are absolute from here on.
        adapters[name] = source if source.startswith("file://") else str(Path(source).resolve())
    return adapters


def _default_cache_dir(run_dir: Path, name: str) -> Path:
    return _SHARED_MEMORY / name if os.access(_SHARED_MEMORY, os.W_OK) else run_dir / "cache"


def _check(model: Path, run_dir: Path) -> None:
    if not (model / "config.json").is_file():
        raise InvalidArgumentError(
            f"--model is {model}, expected a directory with a checkpoint's config.json", reason="NO_MODEL"
        )
    longest = run_dir / "worker-9999.sock"
    if len(os.fsencode(longest)) > MAX_SOCKET_PATH_BYTES:
        raise InvalidArgumentError(
            f"{run_dir} is too long for Unix sockets ({MAX_SOCKET_PATH_BYTES} bytes); give a shorter --run-dir",
            reason="RUN_DIR_TOO_LONG",
        )
