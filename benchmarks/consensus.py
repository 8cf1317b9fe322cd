"""Times how long ranks wait between two steps for each other's messages: exchanged in between, or during the step.

    torchrun --nproc-per-node 2 -m benchmarks.consensus                    # gloo, as between hosts
    torchrun --nproc-per-node 2 -m benchmarks.consensus --consensus auto   # shared memory, on one host
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:PORT -m benchmarks.consensus --ranks 16

A step is a pause here, as for a thread that waits for its device; every rank's begins when it has heard the others.
Times are what rank 0's step thread spends in `Consensus.begin` and `Consensus.finish`, medians, microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.command_line import at_least, refusing
from compute_worker.board_consensus import make_consensus
from compute_worker.consensus import Consensus, Proposal
from compute_worker.ep_group import EPGroup
from epilora.settings import WorkerSettings

STEPS = 300


def in_between_us(consensus: Consensus, step_seconds: float) -> tuple[float, float]:
    """(begin, finish) where each step is followed by the exchange for the next one."""
    begins, finishes = [], []
    for step in range(STEPS):
        start = time.perf_counter()
        consensus.begin(Proposal(step=step))
        begun = time.perf_counter()
        consensus.finish()
        finishes.append(time.perf_counter() - begun)
        begins.append(begun - start)
        time.sleep(step_seconds)
    return _median_us(begins), _median_us(finishes)


def during_us(consensus: Consensus, step_seconds: float) -> tuple[float, float]:
    """(begin, finish) where the exchange for the next step begins before the step."""
    begins, finishes = [], []
    for step in range(STEPS):
        start = time.perf_counter()
        consensus.begin(Proposal(step=step))
        begins.append(time.perf_counter() - start)
        time.sleep(step_seconds)
        start = time.perf_counter()
        consensus.finish()
        finishes.append(time.perf_counter() - start)
    return _median_us(begins), _median_us(finishes)


def _median_us(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e6


def main() -> None:
    """Entry point; run it with torchrun."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=at_least(1), default=2)
    parser.add_argument("--consensus", choices=["gloo", "auto"], default="gloo")
    parser.add_argument("--step-ms", type=float, default=5.0)
    arguments = parser.parse_args()
    settings = WorkerSettings(
        model=Path(), num_ranks=arguments.ranks, device="cpu", consensus=arguments.consensus, torch_threads=1
    )
    with refusing(parser):
        group = EPGroup.from_environment(settings)
    consensus = make_consensus(settings, group)
    with torch.inference_mode():
        for name, measure in (("in between", in_between_us), ("during the step", during_us)):
            begin_us, finish_us = measure(consensus, arguments.step_ms / 1e3)
            if group.ep_rank == 0:
                print(f"{name:16} begin {begin_us:6.0f} us, finish {finish_us:6.0f} us", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
