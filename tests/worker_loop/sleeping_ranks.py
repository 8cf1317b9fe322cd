"""A group of ranks that only sleep, under the agent that workers run under.

    python -m tests.worker_loop.sleeping_ranks DIRECTORY STOPPED_SECONDS

Each rank writes `RANK ATTEMPT PID` to a file of its own in DIRECTORY.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def sleep(directory: str) -> None:
    """One rank."""
    line = " ".join((os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], str(os.getpid())))
    unfinished = Path(directory) / f".{os.getpid()}"
    unfinished.write_text(line)
    unfinished.rename(Path(directory) / f"rank-{os.getpid()}")
    time.sleep(600)


def main() -> None:
    """Command line."""
    directory, stopped_seconds = sys.argv[1:]
    from compute_worker.group_agent import GroupAgent, SignalException

    agent = GroupAgent(
        num_ranks=2,
        program=sys.executable,
        args=("-m", "tests.worker_loop.sleeping_ranks", directory),
        log_dir=Path(directory) / "log",
        stopped_seconds=float(stopped_seconds),
    )
    try:
        agent.run()
    except SignalException:
        sys.exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        main()
    else:
        sleep(sys.argv[1])
