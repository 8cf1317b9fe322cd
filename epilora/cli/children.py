"""One supervised child process: started again whenever it ends, stopped within a bound."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import psutil
import structlog

log = structlog.get_logger(__name__)

FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 5.0
STEADY_SECONDS = 10.0
"""A child that ran this long is started again at once."""
KILLED_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildSpec:
    """What to run."""

    name: str
    module: str
    """Run as `python -m MODULE ARGS`."""
    args: Sequence[str] = ()
    stop_signal: signal.Signals = signal.SIGTERM
    """Asks it to stop."""
    stop_seconds: float
    """From stop_signal to SIGKILL."""


class Child:
    """Keeps one process running.

    Args:
        environment: read at every start, since some of it is known only after the first.
        on_exit: called with this child after each end that was not asked for.
    """

    def __init__(
        self, spec: ChildSpec, environment: Callable[[], Mapping[str, str]], on_exit: Callable[[Child], None]
    ) -> None:
        self.spec = spec
        self.num_exits = 0
        self.exit_code: int | None = None
        self._environment = environment
        self._on_exit = on_exit
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if self._process is not None and running else None

    def start(self) -> None:
        """Begins to keep it running."""
        self._keeping = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "epilora.process", str(os.getpid()), self.spec.module, *self.spec.args),
                env=dict(self._environment()),
                # Its own session: Ctrl-C in the terminal must reach the supervisor only, which stops all in order.
                start_new_session=True,
            )
            self.exit_code = await self._process.wait()
            self.num_exits += 1
            pause = FIRST_PAUSE_SECONDS if loop.time() - started > STEADY_SECONDS else pause
            log.error("process ended, starting it again", child=self.spec.name, exit_code=self.exit_code, pause=pause)
            self._on_exit(self)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def stop(self, *, now: bool = False) -> None:
        """Asks it to stop, then kills it if it does not in time, and whatever it leaves behind."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        process = self._process
        if process is None or process.returncode is not None:
            return
        family = descendants(process.pid)
        process.send_signal(signal.SIGKILL if now else self.spec.stop_signal)
        try:
            async with asyncio.timeout(self.spec.stop_seconds):
                await process.wait()
        except TimeoutError:
            log.error("process did not stop in time, killing it", child=self.spec.name)
            process.kill()
            await process.wait()
        _kill(family)


def children(pid: int) -> list[psutil.Process]:
    """The processes that a process started itself."""
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []


def descendants(pid: int) -> list[psutil.Process]:
    """All processes under a process."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _kill(processes: list[psutil.Process]) -> None:
    """Ends what is left of a child's own children."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=KILLED_SECONDS)
