"""A group of ranks that only sleep, under the agent that workers run under.

    python -m tests.worker_loop.sleeping_ranks DIRECTORY STOPPED_SECONDS MAX_RESTARTS [CANNOT_START]

Each rank writes `RANK ATTEMPT PID` to a file of its own in DIRECTORY. With CANNOT_START rank 1 leaves that as its error
and ends.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from epilora.errors import FailedPreconditionError
from epilora.last_error import WORKERS, leave_last_error
from epilora.restarts import Restarts


def sleep(directory: str, cannot_start: str) -> None:
    """One rank."""
    line = " ".join((os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], str(os.getpid())))
    unfinished = Path(directory) / f".{os.getpid()}"
    unfinished.write_text(line)
    unfinished.rename(Path(directory) / f"rank-{os.getpid()}")
    if cannot_start and os.environ["RANK"] == "1":
        leave_last_error(Path(directory), WORKERS, FailedPreconditionError(cannot_start, reason="TEST"))
        sys.exit(78)
    time.sleep(600)


def main() -> None:
    """Command line."""
    directory, stopped_seconds, max_restarts = sys.argv[1:4]
    from compute_worker.group_agent import GroupAgent, SignalException

    agent = GroupAgent(
        num_ranks=2,
        program=sys.executable,
        args=("-m", "tests.worker_loop.sleeping_ranks", "--rank", directory, "".join(sys.argv[4:])),
        run_dir=Path(directory),
        restarts=Restarts(int(max_restarts), 60.0),
        stopped_seconds=float(stopped_seconds),
    )
    try:
        agent.run()
    except SignalException:
        sys.exit(3)
    sys.exit(agent.exit_code)


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        sleep(*sys.argv[2:])
    else:
        main()
