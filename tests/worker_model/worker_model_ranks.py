"""Runs a function on G ranks, each a process of its own, and brings back what they return."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_DEADLINE_SECONDS = 240.0

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
    for process in processes:
        process.join(deadline_seconds)
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.kill()
    assert not alive, f"{len(alive)} ranks hung"
    errors = [file.read_text() for file in sorted(work.glob("error-*"))]
    assert not errors, "\n".join(errors)
    return [torch.load(work / f"result-{rank}", weights_only=False) for rank in range(num_ranks)]


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
