"""Runs a whole service on one machine: loader, workers under torchelastic, gateway."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from epilora.cli.children import Child, ChildSpec
from epilora.cli.directories import ADDRESS_FILE, try_to_write, writing
from epilora.errors import DeadlineExceededError, EpiloraError, FailedPreconditionError
from epilora.last_error import GATEWAY, LOADER, WORKERS, forget_last_error, read_last_error
from epilora.restarts import EXIT_GAVE_UP, Restarts, ending_of
from epilora.rpc import error_from, make_channel
from epilora.settings_errors import EXIT_BAD_SETTINGS
from epilora.v1 import adapter_service_pb2, adapter_service_pb2_grpc, types_pb2

log = structlog.get_logger(__name__)

FINAL_EXITS = (2, EXIT_BAD_SETTINGS)
"""Exit codes of a process that could not start as it is configured."""
POLL_SECONDS = 0.1
WORKER_STOP_SECONDS = 10.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""SIGHUP comes when the terminal closes."""
LOADER_STOP_SECONDS = 5.0
GATEWAY_STOP_MARGIN_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """What `epilora serve` was asked for; its other settings come from EPILORA_* variables."""

    num_ranks: int
    run_dir: Path
    state_dir: Path
    loader_address: str
    """Where the loader is reached."""
    listen: str
    """host:port; port 0: any free one, kept when the gateway is started again."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Sources by name, loaded at start."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """EPILORA_* variables of all children."""
    drain_timeout_seconds: float
    start_timeout_seconds: float
    max_restarts: int
    """Of each process within restart_window_seconds."""
    restart_window_seconds: float
    ready_file: Path | None = None


class Supervisor:
    """Starts everything in order, keeps it running, stops everything in order.

    What ends is started again, within the limits of `Restarts`; past them the service ends.
    """

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._address_file = options.run_dir / ADDRESS_FILE
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._last_signal = signal.SIGTERM
        self._failure: EpiloraError | None = None
        self._ready = False
        self.address = ""
        self.metrics_address = ""
        loader = ChildSpec(name=LOADER, module="loader_service", stop_seconds=LOADER_STOP_SECONDS)
        workers = ChildSpec(
            name=WORKERS,
            module="compute_worker.launch",
            # Workers hold nothing that a stop could save, and are idle once the gateway has drained. They end with it.
            stop_signal=signal.SIGKILL,
            stop_seconds=WORKER_STOP_SECONDS,
        )
        stop_seconds = options.drain_timeout_seconds + GATEWAY_STOP_MARGIN_SECONDS
        gateway = ChildSpec(name=GATEWAY, module="gateway", stop_seconds=stop_seconds)
        self._loader, self._workers, self._gateway = (
            Child(
                spec,
                prepare=partial(self._prepare, spec.name),
                restarts=Restarts(options.max_restarts, options.restart_window_seconds),
                is_final=self._is_final,
                on_given_up=self._given_up,
            )
            for spec in (loader, workers, gateway)
        )

    def _prepare(self, name: str) -> dict[str, str]:
        """Before each start of a process; its environment."""
        forget_last_error(self._options.run_dir, name)
        environment = {**os.environ, **self._options.environment, "PYTHONUNBUFFERED": "1"}
        environment["EPILORA_LISTEN"] = self.address or self._options.listen
        if self.metrics_address:
            environment["EPILORA_METRICS_LISTEN"] = self.metrics_address
        environment["EPILORA_ADDRESS_FILE"] = str(self._address_file)
        environment.setdefault("TOKENIZERS_PARALLELISM", "false")
        return environment

    def _is_final(self, child: Child) -> bool:
        # What was right once may be right again: a device that is still busy, a directory that is not mounted yet.
        return child.exit_code == EXIT_GAVE_UP or (not self._ready and child.exit_code in FINAL_EXITS)

    def _given_up(self, child: Child) -> None:
        # The first that is given up stops the service; one that ends meanwhile changes nothing.
        if not self._stop.is_set():
            self._failure = self._why_given_up(child)
            self._stop.set()

    def _why_given_up(self, child: Child) -> EpiloraError:
        name, last = child.spec.name, read_last_error(self._options.run_dir, child.spec.name)
        if not self._ready and child.exit_code in FINAL_EXITS:
            if last is not None:
                return last
            why = f"the {name} process cannot start"
        else:
            why = f"the {name} process cannot be kept running: {child.restarts.spent()}"
        ended = last.message if last is not None else f"{ending_of(child.exit_code)}; its log lines above say why"
        return FailedPreconditionError(
            f"{why}. Its last error: {ended}. Mend that and start the service again; its adapters come back",
            reason="CANNOT_START",
        )

    def ask_to_stop(self, number: signal.Signals) -> None:
        """First call: stop in order. Second call: kill everything now."""
        if not self._stop.is_set():
            self._stop.set()
        # One closing terminal may send SIGHUP twice: the shell and the kernel both do.
        elif number is not signal.SIGHUP:
            self._last_signal = number
            self._stop_now.set()

    async def run(self) -> signal.Signals | None:
        """Runs until asked to stop.

        Returns:
            The signal that cut the stop short, so that everything was killed; None if it stopped in order.

        Raises:
            EpiloraError: it could not be started, or an adapter of the command line could not be loaded.
        """
        for number in STOP_SIGNALS:
            # nohup, and whoever starts it with signals ignored, wants it to go on.
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, self.ask_to_stop, number)
        try:
            self._remove_ready_file()
            self._address_file.unlink(missing_ok=True)
            for child in (self._loader, self._workers, self._gateway):
                child.start()
            starting = asyncio.create_task(self._start())
            await self._until_stopped(starting)
            starting.cancel()
            await asyncio.wait([starting])
        finally:
            stopped_in_order = await self._stop_all()
        if self._failure is not None:
            raise self._failure
        return None if stopped_in_order else self._last_signal

    def _remove_ready_file(self) -> None:
        """Whoever waits for it must not read the addresses of a service that is gone."""
        path = self._options.ready_file
        if path is None:
            return
        with writing("--ready-file", path, reason="BAD_READY_FILE"):
            path.unlink(missing_ok=True)
            # Else it would fail when all has started.
            try_to_write(path.parent)

    async def _until_stopped(self, starting: asyncio.Task[None]) -> None:
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait({stop, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and not starting.cancelled():
            error = starting.exception()
            if isinstance(error, EpiloraError):
                self._failure = error
                self._stop.set()
            elif error is not None:
                raise error
        await stop

    async def _start(self) -> None:
        limit = self._options.start_timeout_seconds
        try:
            async with asyncio.timeout(limit):
                await self._read_addresses()
                async with make_channel(self.address) as channel:
                    await self._until_serving(channel)
                    # Without it every load fails later on, and one that can never start would go unseen.
                    async with make_channel(self._options.loader_address) as loader:
                        await self._until_serving(loader)
                    await self._load_adapters(channel)
        except TimeoutError:
            raise DeadlineExceededError(
                f"the service was not ready within {limit:g} s; its log lines above say what it was doing",
                reason="START_TIMEOUT",
            ) from None
        self._ready = True
        if (path := self._options.ready_file) is not None:
            with writing("--ready-file", path, reason="BAD_READY_FILE"):
                _write_atomically(path, self._description())
        log.info("ready", address=self.address, metrics=self.metrics_address, ranks=self._options.num_ranks)

    async def _read_addresses(self) -> None:
        while not self._address_file.exists():
            await asyncio.sleep(POLL_SECONDS)
        addresses = json.loads(self._address_file.read_text())
        self.address, self.metrics_address = addresses["listen"], addresses["metrics"]

    async def _until_serving(self, channel: grpc.aio.Channel) -> None:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=2.0)
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.aio.AioRpcError:
                log.debug("no answer yet")
            await asyncio.sleep(POLL_SECONDS)

    async def _load_adapters(self, channel: grpc.aio.Channel) -> None:
        stub = adapter_service_pb2_grpc.AdapterServiceStub(channel)
        for name, source in self._options.adapters.items():
            try:
                if await _serves(stub, name, source):
                    log.info("adapter serves already", adapter=name)
                    continue
                response = await stub.LoadAdapter(adapter_service_pb2.LoadAdapterRequest(name=name, source=source))
            except grpc.aio.AioRpcError as error:
                raise error_from(error) from error
            log.info("adapter loaded", adapter=name, generation=response.adapter.generation)

    def _description(self) -> str:
        pids = {child.spec.name: child.pid for child in (self._loader, self._workers, self._gateway)}
        return json.dumps(
            {
                "address": self.address,
                "metrics": self.metrics_address,
                "pids": {"supervisor": os.getpid(), **pids},
                "run_dir": str(self._options.run_dir),
                "state_dir": str(self._options.state_dir),
            }
        )

    async def _stop_all(self) -> bool:
        """Gateway first, which drains; then the workers it used; then the loader. False: they were killed instead."""
        log.info("stopping")
        if self._options.ready_file is not None:
            with suppress(OSError):
                self._options.ready_file.unlink()
        stopping = asyncio.create_task(self._stop_in_order())
        now = asyncio.create_task(self._stop_now.wait())
        await asyncio.wait({stopping, now}, return_when=asyncio.FIRST_COMPLETED)
        in_order = stopping.done()
        if not in_order:
            stopping.cancel()
            await asyncio.wait([stopping])
            for child in (self._gateway, self._workers, self._loader):
                await child.stop(now=True)
        now.cancel()
        log.info("stopped")
        return in_order

    async def _stop_in_order(self) -> None:
        for child in (self._gateway, self._workers, self._loader):
            await child.stop()


async def _serves(stub: adapter_service_pb2_grpc.AdapterServiceStub, name: str, source: str) -> bool:
    """True if the registry brought the adapter back already."""
    try:
        response = await stub.GetAdapter(adapter_service_pb2.GetAdapterRequest(name=name))
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return False
        raise
    adapter = response.adapter
    return bool(adapter.state == types_pb2.ADAPTER_STATE_SERVING and adapter.source == source)


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
