"""Adapter flips: the same step on every rank, whatever the order in which ranks get ready."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from compute_worker.control_log import Applied, ControlLog
from epilora.errors import EpiloraError


class Rank:
    """One rank's log and what it did."""

    def __init__(self, num_slots: int = 2) -> None:
        self.staged: set[int] = set()
        self.used: set[int] = set()
        self.events: list[tuple[object, ...]] = []
        self.prepared: set[int] = set()
        self.step = 0
        self.log = ControlLog(
            num_slots=num_slots,
            is_staged=self.staged.__contains__,
            in_use=self.used.__contains__,
            activate=lambda generation, slot: self.events.append(("activate", generation, slot, self.step)),
            retire=lambda generation: self.events.append(("retire", generation, self.step)),
            moves=self,
        )

    def promise(self, number: int) -> bool:
        return number in self.prepared

    def withdraw(self, number: int) -> None:
        self.events.append(("withdraw", number, self.step))

    def place(self, number: int) -> None:
        self.events.append(("place", number, self.step))


class Ranks:
    """Logs of a group; `turn` is what the consensus does."""

    def __init__(self, num_ranks: int = 3, num_slots: int = 2) -> None:
        self.ranks = [Rank(num_slots) for _ in range(num_ranks)]
        self.step = 0

    @property
    def leader(self) -> ControlLog:
        return self.ranks[0].log

    def turn(self) -> None:
        self.step += 1
        announced = self.leader.next_announcement()
        acknowledged = [rank.log.acknowledged() for rank in self.ranks]
        refused = [rank.log.refused() for rank in self.ranks]
        for rank in self.ranks:
            rank.step = self.step
            rank.log.advance(step=self.step, announced=announced, acknowledged=acknowledged, refused=refused)

    def stage(self, generation: int) -> None:
        for rank in self.ranks:
            rank.staged.add(generation)

    def activate(self, generation: int) -> Future[Applied]:
        future: Future[Applied] = Future()
        self.leader.submit_activate(generation, future)
        return future

    def retire(self, generation: int) -> Future[Applied]:
        future: Future[Applied] = Future()
        self.leader.submit_retire(generation, future)
        return future


def test_an_activation_is_announced_then_applied_by_all_at_one_step() -> None:
    group = Ranks()
    group.stage(5)
    future = group.activate(5)
    group.turn()
    group.turn()
    assert not future.done(), "another rank may not have come so far"
    group.turn()
    assert future.result(0) == Applied(adapter_slot=0, step=2)
    assert [rank.events for rank in group.ranks] == [[("activate", 5, 0, 2)]] * 3
    assert [rank.log.slot_of(5) for rank in group.ranks] == [0, 0, 0]


def test_a_group_of_one_rank_applies_what_it_announces_at_the_same_step() -> None:
    group = Ranks(num_ranks=1)
    group.stage(5)
    future = group.activate(5)
    group.turn()
    assert future.result(0) == Applied(adapter_slot=0, step=1)
    (rank,) = group.ranks
    rank.used.add(5)
    retired = group.retire(5)
    for _ in range(3):
        group.turn()
    assert not retired.done(), "a request uses it"
    rank.used.clear()
    group.turn()
    assert retired.done()
    assert rank.events == [("activate", 5, 0, 1), ("retire", 5, group.step)]
    refused = group.activate(6)
    group.turn()
    group.turn()
    with pytest.raises(EpiloraError, match="not staged"):
        refused.result(0)


def test_one_rank_moves_only_after_the_step_that_announced_it() -> None:
    group = Ranks(num_ranks=1)
    (rank,) = group.ranks
    rank.prepared.add(7)
    future: Future[Applied] = Future()
    group.leader.submit_place(7, future)
    group.turn()
    assert rank.events == []
    group.turn()
    assert rank.events == [("place", 7, 2)]


def test_an_activation_that_one_rank_has_not_staged_is_dropped_by_all() -> None:
    group = Ranks()
    group.ranks[0].staged.add(5)
    group.ranks[2].staged.add(5)
    future = group.activate(5)
    for _ in range(3):
        group.turn()
    with pytest.raises(EpiloraError, match=r"not staged on ranks \[1\]"):
        future.result(0)
    assert all(not rank.events for rank in group.ranks)
    group.stage(6)
    group.activate(6)
    group.turn()
    group.turn()
    assert [rank.log.slot_of(6) for rank in group.ranks] == [0, 0, 0]


def test_a_retirement_waits_for_the_last_request_on_any_rank() -> None:
    group = Ranks()
    group.stage(5)
    group.activate(5)
    group.turn()
    group.turn()
    group.ranks[2].used.add(5)
    future = group.retire(5)
    for _ in range(4):
        group.turn()
    assert not future.done()
    assert all(len(rank.events) == 1 for rank in group.ranks)
    group.ranks[2].used.clear()
    group.turn()
    assert {rank.events[1] for rank in group.ranks} == {("retire", 5, group.step)}
    group.turn()
    assert future.result(0).step == group.step - 1


def test_slots_are_the_lowest_free_and_come_back() -> None:
    group = Ranks()
    futures = []
    for generation in (5, 6, 7):
        group.stage(generation)
        futures.append(group.activate(generation))
    with pytest.raises(EpiloraError, match="all 2 adapter slots are taken"):
        futures[2].result(0)
    for _ in range(3):
        group.turn()
    group.retire(5)
    group.turn()
    group.turn()
    again = group.activate(7)
    for _ in range(3):
        group.turn()
    assert (futures[1].result(0).adapter_slot, again.result(0).adapter_slot) == (1, 0)


def test_entries_keep_their_order_across_ranks() -> None:
    group = Ranks(num_slots=4)
    for generation in (1, 2, 3):
        group.stage(generation)
        group.activate(generation)
    for _ in range(4):
        group.turn()
    group.ranks[1].used.add(1)
    group.retire(1)
    last = group.retire(2)
    for _ in range(6):
        group.turn()
    assert not last.done(), "the second retirement must not overtake the first"
    group.ranks[1].used.clear()
    for _ in range(3):
        group.turn()
    kinds = [[event[:2] for event in rank.events] for rank in group.ranks]
    assert kinds[0] == kinds[1] == kinds[2]
    assert kinds[0] == [("activate", 1), ("activate", 2), ("activate", 3), ("retire", 1), ("retire", 2)]


def test_an_activation_under_way_can_be_undone() -> None:
    group = Ranks()
    group.stage(5)
    group.activate(5)
    undone = group.retire(5)
    for _ in range(4):
        group.turn()
    assert undone.done()
    assert [[event[:2] for event in rank.events] for rank in group.ranks] == [[("activate", 5), ("retire", 5)]] * 3
    assert group.leader.slot_of(5) is None


def test_activating_twice_returns_the_slot_and_retiring_the_unknown_is_no_error() -> None:
    group = Ranks()
    group.stage(5)
    group.activate(5)
    group.turn()
    group.turn()
    assert group.activate(5).result(0).adapter_slot == 0
    assert group.retire(9).result(0).step == 0


def test_waits_end_when_the_loop_ends() -> None:
    group = Ranks()
    future = group.activate(5)
    group.leader.fail_all(EpiloraError("stopping", reason="STOPPING"))
    with pytest.raises(EpiloraError, match="stopping"):
        future.result(0)


def test_a_move_is_taken_up_by_all_ranks_at_one_step_in_the_order_of_the_log() -> None:
    ranks = Ranks()
    for rank in ranks.ranks:
        rank.prepared.add(77)
    ranks.stage(5)
    activated, placed = ranks.activate(5), Future[Applied]()
    ranks.leader.submit_place(77, placed)
    for _ in range(5):
        ranks.turn()
    step = placed.result(timeout=0).step
    assert activated.result(timeout=0).step <= step
    for rank in ranks.ranks:
        assert [event for event in rank.events if event[0] == "place"] == [("place", 77, step)]


def test_a_move_that_one_rank_lacks_is_dropped_by_all() -> None:
    ranks = Ranks()
    for rank in ranks.ranks[:-1]:
        rank.prepared.add(77)
    placed: Future[Applied] = Future()
    ranks.leader.submit_place(77, placed)
    for _ in range(3):
        ranks.turn()
    with pytest.raises(EpiloraError, match=r"move 77 is not prepared on ranks \[2\]") as caught:
        placed.result(timeout=0)
    assert caught.value.reason == "PLACEMENT_NOT_PREPARED"
    assert all([event[:2] for event in rank.events] == [("withdraw", 77)] for rank in ranks.ranks)
    # What comes after it in the log is not held up.
    ranks.stage(5)
    activated = ranks.activate(5)
    for _ in range(3):
        ranks.turn()
    assert activated.result(timeout=0).adapter_slot == 0
