"""The small message that opens each step: what every rank has to do, so that all do the same.

All ranks exchange one vector of int64, whatever carries the tensors: over gloo here, through shared memory in
`board_consensus`. None can step without the others, and a lost rank ends the exchange with an error on all.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from compute_worker.collectives import all_gather
from compute_worker.control_log import Entry, Operation
from epilora.errors import UnavailableError

NO_LAYER = -1
NUM_FIELDS = 11
_NO_ENTRY = [0, 0, 0, 0]

_ALONE_SECONDS = 1.0
_LOOK_SECONDS = 0.002
_IDLE_LOOK_SECONDS = 0.02
_IDLE_AFTER_SECONDS = 0.5


class Proposal(NamedTuple):
    """What one rank would do in this step.

    A tuple, since one of each rank is made in each step, and a frozen dataclass takes twice as long to make.

    Attributes:
        step: its number.
        num_tokens: tokens of its generate step.
        expert_layer: MoE layer of its expert step.
        num_expert_tokens: tokens of its expert step.
        acknowledged: see ControlLog.acknowledged.
        refused: see ControlLog.refused.
        announced: leader only: see ControlLog.next_announcement.
        stopping: the rank was told to stop.
    """

    step: int
    num_tokens: int = 0
    expert_layer: int = NO_LAYER
    num_expert_tokens: int = 0
    acknowledged: int = 0
    refused: int = 0
    announced: Entry | None = None
    stopping: bool = False

    def to_vector(self) -> list[int]:
        """As int64s."""
        step, tokens, layer, expert_tokens, acknowledged, refused, entry, stopping = self
        vector = [step, tokens, layer, expert_tokens, acknowledged, refused, int(stopping)]
        if entry is None:
            return vector + _NO_ENTRY
        return [*vector, entry.number, entry.operation, entry.generation, entry.adapter_slot]

    @classmethod
    def from_vector(cls, vector: list[int]) -> Proposal:
        """The reverse of `to_vector`."""
        step, tokens, layer, expert_tokens, acknowledged, refused, stopping, number, operation, generation, slot = (
            vector
        )
        entry = None
        if number:
            entry = Entry(number=number, operation=Operation(operation), generation=generation, adapter_slot=slot)
        # By position, since by name it takes twice as long.
        return cls(step, tokens, layer, expert_tokens, acknowledged, refused, entry, stopping != 0)


class Consensus(ABC):
    """Exchanges proposals between the ranks of a group. One thread calls all methods but ring.

    Attributes:
        overlaps: an exchange takes so long that it should begin while the step before computes.
    """

    overlaps: bool = False

    @abstractmethod
    def begin(self, mine: Proposal) -> None:
        """Sends this rank's proposal, and waits for nobody. The exchange before must be finished.

        Raises:
            UnavailableError: reason RANK_LOST; a rank is gone.
        """

    @abstractmethod
    def finish(self) -> list[Proposal]:
        """Everybody's proposal of the exchange that was begun, in order of rank.

        Raises:
            UnavailableError: reason RANK_LOST; a rank is gone, or did not answer in time.
        """

    def exchange(self, mine: Proposal) -> list[Proposal]:
        """begin and finish."""
        self.begin(mine)
        return self.finish()

    @abstractmethod
    def rest_seconds(self, idle_seconds: float) -> float:
        """How long to rest between two exchanges without work, when the last work was so long ago."""

    @abstractmethod
    def rest(self, wake: threading.Event, seconds: float) -> None:
        """Waits until `wake` is set (and `ring` called), another rank began the next exchange, or time is up.

        Whether it sees that another rank began depends on the implementation, and `rest_seconds` on that.
        """

    @abstractmethod
    def ring(self) -> None:
        """Ends `rest`, once its event is set. Any thread."""

    @abstractmethod
    def abandon(self) -> None:
        """This rank gives the group up. Ends ranks of this host that are stopped, where it can: they would not end
        by the SIGTERM that follows, and hold up the group's restart."""


class GlooConsensus(Consensus):
    """Exchanges proposals over a gloo process group, whose own threads do so beside the step thread.

    Args:
        num_ranks: ranks in the group; with one, nothing is exchanged.
        group: gloo process group of the ranks.
        timeout_seconds: deadline of one exchange.
    """

    def __init__(self, *, num_ranks: int, group: dist.ProcessGroup | None, timeout_seconds: float) -> None:
        self._num_ranks = num_ranks
        self._group = group
        self._timeout = timedelta(seconds=timeout_seconds)
        self._received = torch.empty(num_ranks, NUM_FIELDS, dtype=torch.int64)
        self._mine = Proposal(step=0)
        self._work: dist.Work | None = None
        self.overlaps = num_ranks > 1

    def begin(self, mine: Proposal) -> None:
        """See Consensus.begin."""
        self._mine = mine
        if self._num_ranks == 1:
            return
        vector = torch.tensor(mine.to_vector(), dtype=torch.int64)
        try:
            self._work = all_gather(self._received.view(-1), vector, group=self._group, async_op=True)
        except RuntimeError as error:
            raise self._lost(error) from error

    def finish(self) -> list[Proposal]:
        """See Consensus.finish."""
        mine = self._mine
        if self._num_ranks == 1:
            return [mine]
        assert self._work is not None, "no exchange was begun"
        try:
            self._work.wait(self._timeout)
        except RuntimeError as error:
            raise self._lost(error) from error
        self._work = None
        proposals = [Proposal.from_vector(vector) for vector in self._received.tolist()]
        assert all(p.step == mine.step for p in proposals), f"ranks are at steps {[p.step for p in proposals]}"
        return proposals

    def _lost(self, error: RuntimeError) -> UnavailableError:
        return UnavailableError(f"step {self._mine.step}: the other ranks did not answer: {error}", reason="RANK_LOST")

    def rest_seconds(self, idle_seconds: float) -> float:
        """See Consensus.rest_seconds. Short while there are other ranks: `rest` does not see them begin."""
        if self._num_ranks == 1:
            return _ALONE_SECONDS
        return _LOOK_SECONDS if idle_seconds < _IDLE_AFTER_SECONDS else _IDLE_LOOK_SECONDS

    def rest(self, wake: threading.Event, seconds: float) -> None:
        """See Consensus.rest. Sees nothing of other ranks."""
        wake.wait(seconds)

    def ring(self) -> None:
        """See Consensus.ring: nothing to do, the event wakes."""

    def abandon(self) -> None:
        """See Consensus.abandon: knows nothing of other processes."""
