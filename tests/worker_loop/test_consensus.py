"""The step message: nothing is lost on the way, and a lost rank ends the wait."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from compute_worker.consensus import GlooConsensus, Proposal
from compute_worker.control_log import Entry, Operation
from epilora.errors import UnavailableError


def _proposal(rank: int) -> Proposal:
    entry = Entry(number=3, operation=Operation.RETIRE, generation=2**40, adapter_slot=1)
    return Proposal(
        step=7,
        num_tokens=10 * rank,
        expert_layer=rank,
        num_expert_tokens=rank,
        acknowledged=rank,
        refused=5,
        announced=entry if rank == 0 else None,
        stopping=rank == 1,
    )


def _rank(rank: int, store: str, results: Any) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=20)
    )
    consensus = GlooConsensus(num_ranks=2, group=dist.group.WORLD, timeout_seconds=20)
    results.put((rank, consensus.exchange(_proposal(rank))))
    if rank == 1:
        time.sleep(0.5)
        os._exit(0)
    # Rank 1 never begins this one.
    consensus.begin(_proposal(rank))
    start = time.monotonic()
    try:
        consensus.finish()
    except UnavailableError as error:
        results.put(("lost", error.reason, error.message, time.monotonic() - start))


def test_a_proposal_survives_the_vector() -> None:
    for rank in (0, 1):
        assert Proposal.from_vector(_proposal(rank).to_vector()) == _proposal(rank)


def test_one_rank_hears_itself() -> None:
    alone = GlooConsensus(num_ranks=1, group=None, timeout_seconds=20)
    assert alone.exchange(_proposal(1)) == [_proposal(1)]
    assert not alone.overlaps


@pytest.mark.timeout(90)
def test_two_ranks_hear_each_other_and_one_notices_the_others_end(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(r, str(tmp_path / "store"), results)) for r in (0, 1)]
    for process in ranks:
        process.start()
    try:
        got = [results.get(timeout=60) for _ in range(3)]
    finally:
        for process in ranks:
            process.join(30)
    heard = {item[0]: item[1] for item in got if item[0] != "lost"}
    assert heard == {0: [_proposal(0), _proposal(1)], 1: [_proposal(0), _proposal(1)]}
    lost = next(item for item in got if item[0] == "lost")
    assert lost[1] == "RANK_LOST"
    assert lost[2].startswith("step 7: the other ranks did not answer")
    assert lost[3] < 10
