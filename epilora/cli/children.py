"""One supervised child process: started again when it ends, within limits, and stopped within a bound."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import psutil
import structlog

from epilora.restarts import Restarts

log = structlog.get_logger(__name__)

KILLED_SECONDS = 5.0
EXIT_NOT_STARTED = 71
"""sysexits.h's EX_OSERR, in place of an exit code: the system had no process or memory for it."""


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
        prepare: called before every start; the environment, some of which is known only after the first.
        restarts: how often it may be started again.
        is_final: called after each end that was not asked for; True: it would not help to start it again.
        on_given_up: called when it is not started again.
    """

    def __init__(
        self,
        spec: ChildSpec,
        *,
        prepare: Callable[[], Mapping[str, str]],
        restarts: Restarts,
        is_final: Callable[[Child], bool],
        on_given_up: Callable[[Child], None],
    ) -> None:
        self.spec = spec
        self.restarts = restarts
        self.exit_code = 0
        """How it ended last; -N: by signal N."""
        self._prepare = prepare
        self._is_final = is_final
        self._on_given_up = on_given_up
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
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            self.exit_code = await self._run()
            pause = None if self._is_final(self) else self.restarts.next_pause(started=started, now=loop.time())
            if pause is None:
                log.error("process ended, not starting it again", child=self.spec.name, exit_code=self.exit_code)
                self._on_given_up(self)
                return
            log.error("process ended, starting it again", child=self.spec.name, exit_code=self.exit_code, pause=pause)
            await asyncio.sleep(pause)

    async def _run(self) -> int:
        """Starts it and waits for its end; its exit code."""
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "epilora.process", str(os.getpid()), self.spec.module, *self.spec.args),
                env=dict(self._prepare()),
                # Its own session: Ctrl-C in the terminal must reach the supervisor only, which stops all in order.
                start_new_session=True,
            )
        except OSError as error:
            log.error("no process can be started", child=self.spec.name, error=str(error))
            return EXIT_NOT_STARTED
        return await self._process.wait()

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
