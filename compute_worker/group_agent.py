"""torchelastic's agent for the ranks of one host.

The library's looks after its workers every so often, meets agents of other hosts at a rendezvous that costs it work
while nothing happens, and gives workers half a minute to end. This one sleeps until a rank ends, so that a group that
lost one is back sooner and costs nothing meanwhile. It starts the group again within the limits of `Restarts`, not
some number of times in all, and not if a rank said that it cannot start. It also ends a rank that has been stopped (by
a signal, or a debugger) for longer than a collective may take: where no other rank is there to notice, nobody else
would.
"""

from __future__ import annotations

import os
import select
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import structlog
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from compute_worker.step_board import ProcessIdentity
from epilora.errors import UnavailableError
from epilora.last_error import WORKERS, forget_last_error, leave_last_error, read_last_error
from epilora.restarts import EXIT_GAVE_UP, Restarts, ending_of
from epilora.settings_errors import EXIT_BAD_SETTINGS

log = structlog.get_logger(__name__)

__all__ = ["GroupAgent", "SignalException", "WorkerState"]

_HOST = "127.0.0.1"
_LOOK_SECONDS = 1.0
_PAUSE_SECONDS = 0.02
_FAREWELL_SECONDS = 0.6
"""For ranks that lost one to tell their callers, and the log, which one it was."""
_UNLIMITED = 1_000_000_000
"""Restarts that torchelastic would allow in all: Restarts decides."""


class OneHostRendezvous(RendezvousHandler):
    """An agent that meets nobody: every round is complete at once. Its store serves the ranks of all rounds."""

    def __init__(self) -> None:
        self._store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        self._run_id = uuid.uuid4().hex
        self._closed = False

    def get_backend(self) -> str:
        return "one_host"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(
            PrefixStore("torchelastic", self._store), 0, 1, RendezvousStoreInfo(_HOST, self._store.port)
        )

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._closed = True
        return True


class GroupAgent(LocalElasticAgent):  # type: ignore[misc]
    """See the module. `run` ends with a SignalException when it is told to; it returns when it gave up.

    Attributes:
        exit_code: for the process, once `run` has returned.

    Args:
        num_ranks: ranks of the group.
        program: of a rank: a path, or a function that is called in a fork of this process.
        args: of the program.
        run_dir: for files of torchelastic's own, and the last error of the ranks.
        restarts: how often the group may be started again.
        stopped_seconds: how long a rank may be stopped.
    """

    def __init__(
        self,
        *,
        num_ranks: int,
        program: Callable[[str], None] | str,
        args: tuple[str, ...],
        run_dir: Path,
        restarts: Restarts,
        stopped_seconds: float,
    ) -> None:
        spec = WorkerSpec(
            role="rank",
            local_world_size=num_ranks,
            rdzv_handler=OneHostRendezvous(),
            entrypoint=program,
            args=args,
            max_restarts=_UNLIMITED,
            monitor_interval=_PAUSE_SECONDS,
            local_addr=_HOST,
        )
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(run_dir / "torchelastic")), start_method="fork")
        self._stopped_seconds = stopped_seconds
        self._stopped_since: dict[int, float] = {}
        self._run_dir = run_dir
        self._restarts = restarts
        self._started = 0.0
        self.exit_code = EXIT_GAVE_UP

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        """Starts the ranks."""
        forget_last_error(self._run_dir, WORKERS)
        self._started = time.monotonic()
        super()._initialize_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Called in a loop, after each start: waits for a rank's end, then says how the group is."""
        assert self._pcontext is not None
        found = {rank: ProcessIdentity.find(pid) for rank, pid in self._pcontext.pids().items()}
        ranks = [identity for identity in found.values() if identity is not None]
        ended: list[int] = []
        if len(ranks) < len(found) or self._first_end(ranks, _LOOK_SECONDS):
            ended = [rank for rank, identity in found.items() if identity is None or not identity.is_alive()]
            deadline = time.monotonic() + _FAREWELL_SECONDS
            while ranks := [rank for rank in ranks if rank.is_alive()]:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._first_end(ranks, left)
            # They hold nothing that a slower end could save, and one that is stopped would not heed a SIGTERM.
            for rank in ranks:
                rank.kill()
        else:
            self._end_stopped(ranks)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED:
            self._after_loss(ended, result.failures)
        return result

    def _after_loss(self, ended: list[int], failures: dict[int, ProcessFailure]) -> None:
        """Waits until the group may be started again, or has it given up.

        Args:
            ended: the ranks that ended first.
            failures: by rank, as far as torchelastic knows.
        """
        first = min(ended or failures)
        how = f"ended with {ending_of(failures[first].exitcode)}" if first in failures else "ended"
        leave_last_error(
            self._run_dir,
            WORKERS,
            UnavailableError(f"rank {first} {how}; its log lines say more", reason="RANK_ENDED"),
        )
        last = read_last_error(self._run_dir, WORKERS)
        pause = self._restarts.next_pause(started=self._started, now=time.monotonic())
        if last is not None and not last.retry_may_help:
            self.exit_code = EXIT_BAD_SETTINGS
            log.error("the ranks cannot start", reason=last.reason, message=last.message)
        elif pause is None:
            self.exit_code = EXIT_GAVE_UP
            why = last.message if last is not None else how
            log.error("the group is given up", why=self._restarts.spent(), last_error=why)
        else:
            log.error("the group lost a rank, starting it again", first_rank=first, how=how, pause=pause)
            time.sleep(pause)
            return
        self._remaining_restarts = 0

    @staticmethod
    def _first_end(ranks: list[ProcessIdentity], seconds: float) -> bool:
        """Waits for the end of one of them; False if none came in time."""
        poll = select.poll()
        descriptors = []
        try:
            for rank in ranks:
                descriptors.append(os.pidfd_open(rank.pid))
                poll.register(descriptors[-1], select.POLLIN)
            return bool(poll.poll(max(1.0, 1000 * seconds)))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _end_stopped(self, ranks: list[ProcessIdentity]) -> None:
        now = time.monotonic()
        stopped = [rank for rank in ranks if rank.is_stopped()]
        self._stopped_since = {rank.pid: self._stopped_since.get(rank.pid, now) for rank in stopped}
        for rank in stopped:
            if now - self._stopped_since[rank.pid] > self._stopped_seconds:
                rank.kill()
