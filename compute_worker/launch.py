"""`python -m compute_worker.launch`: all ranks of a group on this host, under torchelastic, which starts them anew
together when one of them ends; EPILORA_MAX_RESTARTS says how often.

Exit codes: 69 if the group ended too often, 78 if a rank cannot start as it is configured; the last log line says why.

Without a GPU the ranks are forks of this process, which has imported all that they need: the imports take longer than
the rest of starting a small model, and are done once for the group, not by each rank and again at each restart. Where
there is a GPU each rank is a program of its own, since CUDA does not survive a fork.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import structlog

from epilora.errors import EpiloraError
from epilora.last_error import WORKERS, leave_last_error
from epilora.logs import setup_logs
from epilora.process import die_with_parent
from epilora.restarts import Restarts
from epilora.settings import WorkerSettings
from epilora.settings_errors import EXIT_BAD_SETTINGS, settings_or_exit

log = structlog.get_logger(__name__)

_GPU_DRIVER = Path("/dev/nvidiactl")
_SIGNAL_EXIT = 128


def main() -> None:
    """Runs the group until it is told to end."""
    settings = settings_or_exit(WorkerSettings)
    if settings.num_ranks > 1:
        # As torchrun does: ranks share the cores. It counts when torch is imported; ranks set their own threads later.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    setup_logs("workers", level=settings.log_level)
    mine = str(os.getpid())
    program: Callable[[str], None] | str
    args: tuple[str, ...]
    if _GPU_DRIVER.exists():
        program, args = sys.executable, ("-m", "epilora.process", mine, "compute_worker")
    else:
        import compute_worker.__main__  # noqa: F401  what every fork needs

        program, args = run_rank, (mine,)
    from compute_worker.group_agent import GroupAgent, SignalException, WorkerState

    try:
        settings.check_expert_backend(settings.why_no_kernels(on_gpu=_is_on_gpu(settings)))
    except EpiloraError as error:
        # Every rank would find it, and torchelastic report each.
        log.error("cannot start", reason=error.reason, message=error.message)
        leave_last_error(settings.run_dir, WORKERS, error)
        sys.exit(EXIT_BAD_SETTINGS)
    agent = GroupAgent(
        num_ranks=settings.num_ranks,
        program=program,
        args=args,
        run_dir=settings.run_dir,
        restarts=Restarts(settings.max_restarts, settings.restart_window_seconds),
        stopped_seconds=settings.collective_timeout_seconds,
    )
    # What is there now is shared with the forks, as long as nobody writes to it: collections of cycles leave it alone.
    gc.freeze()
    try:
        result = agent.run()
    except SignalException as error:
        sys.exit(_SIGNAL_EXIT + error.sigval)
    if result.state is not WorkerState.SUCCEEDED:
        sys.exit(agent.exit_code)


def _is_on_gpu(settings: WorkerSettings) -> bool:
    """Whether the ranks will be, as far as the settings and the devices of this host tell."""
    import torch  # not above: OMP_NUM_THREADS counts when it is imported

    # To count devices does not begin to use CUDA, which would not survive a fork.
    return settings.device == "cuda" or (settings.device == "auto" and torch.cuda.device_count() > 0)


def run_rank(launcher_pid: str) -> None:
    """One rank, in a fork of the launcher."""
    # The launcher's handlers raise an exception of torchelastic's.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    die_with_parent(int(launcher_pid))
    from compute_worker.__main__ import main as run_worker

    run_worker()


if __name__ == "__main__":
    main()
