"""Runs a function on G ranks, each a process of its own, and brings back what they return."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_DEADLINE_SECONDS = 240.0
_AFTER_FAILURE_SECONDS = 20.0

Results = dict[str, Any]


def run_ranks(
    num_ranks: int, function: Callable[[int, Path], Results], work: Path, *, deadline_seconds: float = _DEADLINE_SECONDS
) -> list[Results]:
    """The result of function(ep_rank, work) of every rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # The server imports once what takes seconds, and has no threads that a fork would lose.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["compute_worker.model_runner", "transformers.models.qwen2_moe.modeling_qwen2_moe"])
    processes = [
        context.Process(target=_enter, args=(rank, num_ranks, port, function, work, deadline_seconds))
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    alive = _wait(processes, deadline_seconds)
    for process in alive:
        process.kill()
    errors = [file.read_text() for file in sorted(work.glob("error-*"))]
    assert not errors, "\n".join(errors)
    assert not alive, f"{len(alive)} ranks hung"
    return [torch.load(work / f"result-{rank}", weights_only=False) for rank in range(num_ranks)]


def _wait(processes: Sequence[BaseProcess], deadline_seconds: float) -> list[BaseProcess]:
    """Those that have not ended in time; one that fails leaves the others only so much more."""
    running = {process.sentinel: process for process in processes}
    deadline = time.monotonic() + deadline_seconds
    while running:
        ended = connection.wait(running, max(0.0, deadline - time.monotonic()))
        if not ended:
            break
        for sentinel in ended:
            process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                # They may wait for it in a kernel, which has no deadline.
                deadline = min(deadline, time.monotonic() + _AFTER_FAILURE_SECONDS)
    return [*running.values()]


def _enter(  # noqa: PLR0917
    ep_rank: int,
    num_ranks: int,
    port: int,
    function: Callable[[int, Path], Results],
    work: Path,
    deadline_seconds: float,
) -> None:
    # A run of tests that was killed kills no ranks: they are the fork server's children.
    end = threading.Timer(deadline_seconds, os._exit, (1,))
    end.daemon = True
    end.start()
    os.environ.update(
        RANK=str(ep_rank),
        LOCAL_RANK=str(ep_rank),
        WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    try:
        torch.save(function(ep_rank, work), work / f"result-{ep_rank}")
    except BaseException:
        (work / f"error-{ep_rank}").write_text(traceback.format_exc())
        # Other ranks wait for this one in a collective; their connection must break.
        os._exit(1)
    if torch.cuda.is_initialized():
        # A captured graph holds its communicator: destroying the group would wait for the graph's end.
        os._exit(0)
    dist.destroy_process_group()
    sys.exit(0)
