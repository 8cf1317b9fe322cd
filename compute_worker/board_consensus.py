"""Consensus through shared memory, for ranks of one host; and the choice between it and gloo."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import structlog
import torch.distributed as dist

from compute_worker.consensus import NUM_FIELDS, Consensus, GlooConsensus, Proposal
from compute_worker.ep_group import EPGroup
from compute_worker.step_board import ProcessIdentity, StepBoard
from epilora.errors import InvalidArgumentError, UnavailableError
from epilora.settings import WorkerSettings

_SHARED_MEMORY = Path("/dev/shm")
_SPIN_SECONDS = 0.0002
_SLEEP_SECONDS = 0.001
_LIVENESS_SECONDS = 0.05
_REST_SECONDS = 0.25
"""Between two exchanges of ranks without work: how late the death of one of them may be noticed."""

log = structlog.get_logger(__name__)


class BoardConsensus(Consensus):
    """Exchanges proposals on a board.

    Waits by spinning for 0.2 ms, then sleeps until it is woken. While it waits it looks whether the others still
    live, so a rank that died is noticed within some 50 ms; one that hangs, at the deadline, and is ended.

    Args:
        board: this rank's view.
        ep_rank: this rank.
        ranks: the process of each rank.
        timeout_seconds: deadline of one exchange.
    """

    def __init__(
        self, board: StepBoard, *, ep_rank: int, ranks: Sequence[ProcessIdentity], timeout_seconds: float
    ) -> None:
        self._board = board
        self._ep_rank = ep_rank
        self._ranks = tuple(ranks)
        self._timeout_seconds = timeout_seconds
        self._number = 0
        self._mine = Proposal(step=0)

    def begin(self, mine: Proposal) -> None:
        """See Consensus.begin."""
        self._mine = mine
        self._number += 1
        self._board.write(self._number, mine.to_vector())

    def finish(self) -> list[Proposal]:
        """See Consensus.finish."""
        mine = self._mine
        start = time.monotonic()
        proposals = []
        for ep_rank in range(len(self._ranks)):
            if ep_rank == self._ep_rank:
                proposals.append(mine)
                continue
            vector = self._board.read(ep_rank, self._number)
            if vector is None:
                vector = self._wait_for(ep_rank, mine.step, start)
            theirs = Proposal.from_vector(vector)
            assert theirs.step == mine.step, f"rank {ep_rank} is at step {theirs.step}, this one at {mine.step}"
            proposals.append(theirs)
        return proposals

    def rest_seconds(self, idle_seconds: float) -> float:
        """See Consensus.rest_seconds: whoever begins wakes the others."""
        return _REST_SECONDS

    def rest(self, wake: threading.Event, seconds: float) -> None:
        """See Consensus.rest. Wakes up when another rank has begun the next exchange."""
        self._board.arm()
        # A pass through the scheduler, and with it the barrier without which the look below could come before `arm`.
        os.sched_yield()
        following = self._number + 1
        if wake.is_set() or any(self._board.is_written(rank, following) for rank in range(len(self._ranks))):
            return
        self._board.sleep(seconds)

    def ring(self) -> None:
        """See Consensus.ring."""
        self._board.ring(self._ep_rank)

    def abandon(self) -> None:
        """See Consensus.abandon."""
        for rank in self._ranks:
            if rank.is_stopped():
                rank.kill()

    def _wait_for(self, ep_rank: int, step: int, start: float) -> list[int]:
        """One rank's vector of this exchange."""
        board, number, next_look = self._board, self._number, start + _LIVENESS_SECONDS
        while True:
            vector = board.read(ep_rank, number)
            if vector is not None:
                return vector
            now = time.monotonic()
            if now - start < _SPIN_SECONDS:
                continue
            if now >= next_look:
                self._check(ep_rank, step, now - start)
                next_look = now + _LIVENESS_SECONDS
            board.arm()
            if not board.is_written(ep_rank, number):
                board.sleep(_SLEEP_SECONDS)

    def _check(self, ep_rank: int, step: int, waited_seconds: float) -> None:
        """Raises UnavailableError if a rank that is waited for is gone, or the deadline has passed."""
        missing = [rank for rank in range(len(self._ranks)) if not self._board.is_written(rank, self._number)]
        dead = [rank for rank in missing if not self._ranks[rank].is_alive()]
        if dead:
            pids = [self._ranks[rank].pid for rank in dead]
            raise UnavailableError(
                f"step {step}: rank {_list(dead)} (pid {_list(pids)}) has ended",
                reason="RANK_LOST",
                metadata={"ep_rank": dead[0], "step": step},
            )
        if waited_seconds > self._timeout_seconds:
            late = missing or [ep_rank]
            # The group starts anew now. A process that is stopped would hold that up: it takes no notice of the
            # SIGTERM by which the others end.
            for rank in late:
                self._ranks[rank].kill()
            raise UnavailableError(
                f"step {step}: rank {_list(late)} did not answer within {self._timeout_seconds:g} s, though its process"
                " was there; it was ended",
                reason="RANK_LOST",
                metadata={"ep_rank": late[0], "step": step},
            )


def make_consensus(settings: WorkerSettings, group: EPGroup) -> Consensus:
    """The consensus of a group, shared memory where all its ranks can see the same, unless the settings name one.

    All ranks call it together.

    Raises:
        InvalidArgumentError: shared_memory is asked for, but the ranks do not share a host.
    """
    timeout_seconds = settings.collective_timeout_seconds
    over_gloo = GlooConsensus(num_ranks=group.num_ranks, group=group.control_group, timeout_seconds=timeout_seconds)
    if group.num_ranks == 1 or settings.consensus == "gloo":
        return over_gloo
    board, ranks, problem = _open_board(group)
    if board is not None:
        log.info("consensus chosen", consensus="shared_memory")
        return BoardConsensus(board, ep_rank=group.ep_rank, ranks=ranks, timeout_seconds=timeout_seconds)
    if settings.consensus == "shared_memory":
        raise InvalidArgumentError(
            f"EPILORA_CONSENSUS is shared_memory, but {problem}; use gloo, or auto", reason="NO_SHARED_MEMORY"
        )
    log.info("consensus chosen", consensus="gloo", why=problem)
    return over_gloo


def _open_board(group: EPGroup) -> tuple[StepBoard | None, list[ProcessIdentity], str]:
    """(board, process of each rank, why there is none); every rank gets a board, or none does.

    Rank 0 makes the file, and unlinks it when everybody has it open: nothing is left behind, whoever dies.
    """
    path = _SHARED_MEMORY / f"epilora-step-{os.getpid()}-{secrets.token_hex(8)}"
    offer: list[tuple[Path, bytes]] = [(path, secrets.token_bytes(32))]
    problem = ""
    if group.ep_rank == 0:
        try:
            StepBoard.create(path, offer[0][1], group.num_ranks)
        except OSError as error:
            problem = f"rank 0: {error}"
    try:
        dist.broadcast_object_list(offer, src=0, group=group.control_group)
        board = None
        try:
            board = StepBoard(*offer[0], ep_rank=group.ep_rank, num_ranks=group.num_ranks, num_fields=NUM_FIELDS)
        except (OSError, ValueError) as error:
            problem = problem or f"rank {group.ep_rank}: {error}"
        answers: list[tuple[ProcessIdentity, str]] = [(ProcessIdentity.of_self(), problem)] * group.num_ranks
        dist.all_gather_object(answers, answers[0], group=group.control_group)
    finally:
        if group.ep_rank == 0:
            path.unlink(missing_ok=True)
    ranks = [identity for identity, _ in answers]
    problems = [text for _, text in answers if text]
    if len({identity.pid_namespace for identity in ranks}) > 1:
        # A pid of another namespace means nothing here: a death would go unnoticed.
        problems.append("the ranks do not see each other's processes")
    return (None, ranks, "; ".join(problems)) if problems else (board, ranks, "")


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
