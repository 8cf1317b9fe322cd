"""Consensus through shared memory, with real processes: nothing is lost or torn, and who died or hangs is named."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from compute_worker.board_consensus import BoardConsensus, make_consensus
from compute_worker.consensus import NUM_FIELDS, GlooConsensus, Proposal
from compute_worker.ep_group import EPGroup
from compute_worker.step_board import ProcessIdentity, StepBoard
from epilora.errors import UnavailableError
from epilora.settings import WorkerSettings

NAME = b"a board for tests"
FOREVER = 120.0

pytestmark = pytest.mark.timeout(300)


def open_board(path: Path, ep_rank: int, num_ranks: int) -> StepBoard:
    return StepBoard(path, NAME, ep_rank=ep_rank, num_ranks=num_ranks, num_fields=NUM_FIELDS)


def proposal(step: int, ep_rank: int) -> Proposal:
    return Proposal(step=step, num_tokens=1000 * ep_rank + step, acknowledged=2**40 + step, stopping=step % 2 == 0)


class Ranks:
    """Processes that each run function(consensus, ep_rank, results, *args)."""

    def __init__(self, work: Path, num_ranks: int, timeout_seconds: float) -> None:
        self.path, self.num_ranks, self.timeout_seconds = work / "board", num_ranks, timeout_seconds
        StepBoard.create(self.path, NAME, num_ranks)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["compute_worker.board_consensus"])
        # One a rank: who is killed while it writes to a queue leaves it locked.
        self.results: list[Any] = [context.Queue() for _ in range(num_ranks)]
        self._identities = [context.Queue() for _ in range(num_ranks)]
        self._seats: list[Any] = [context.Queue() for _ in range(num_ranks)]
        self._context = context
        self.processes: list[Any] = []

    def start(self, function: Callable[..., None]) -> None:
        for ep_rank in range(self.num_ranks):
            arguments = (self.path, ep_rank, self.num_ranks, self.timeout_seconds)
            queues = (self._seats[ep_rank], self._identities[ep_rank], self.results[ep_rank])
            self.processes.append(self._context.Process(target=enter, args=(function, arguments, queues)))
        for process in self.processes:
            process.start()
        seats = [queue.get(timeout=FOREVER) for queue in self._seats]
        for queue in self._identities:
            queue.put(seats)

    def get(self, *ranks: int) -> list[Any]:
        """One result of each of these ranks."""
        return [self.results[rank].get(timeout=FOREVER) for rank in ranks]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(FOREVER)


def enter(function: Callable[..., None], arguments: tuple[Path, int, int, float], queues: tuple[Any, Any, Any]) -> None:
    path, ep_rank, num_ranks, timeout_seconds = arguments
    seats, identities, results = queues
    seats.put(ProcessIdentity.of_self())
    consensus = BoardConsensus(
        open_board(path, ep_rank, num_ranks),
        ep_rank=ep_rank,
        ranks=identities.get(timeout=FOREVER),
        timeout_seconds=timeout_seconds,
    )
    function(consensus, ep_rank, results)


def exchange_many(consensus: BoardConsensus, ep_rank: int, results: Any) -> None:
    wrong = 0
    for step in range(1, 1001):
        heard = consensus.exchange(proposal(step, ep_rank))
        wrong += heard != [proposal(step, rank) for rank in range(3)]
    results.put(wrong)


def exchange_until_lost(consensus: BoardConsensus, ep_rank: int, results: Any) -> None:
    step = 0
    while True:
        step += 1
        start = time.monotonic()
        try:
            consensus.exchange(proposal(step, ep_rank))
        except UnavailableError as error:
            results.put((ep_rank, error.reason, error.message, time.monotonic() - start))
            return
        if step == 20:
            results.put(ep_rank)
        time.sleep(0.001)


NUM_WAKES = 20


def rest_and_exchange(consensus: BoardConsensus, ep_rank: int, results: Any) -> None:
    """Idle turns for a second; then work arrives at rank 1 now and then, until there was enough."""
    start, cpu, step = time.monotonic(), time.process_time(), 0
    wake = threading.Event()
    while time.monotonic() - start < 1 or step < 2:
        step += 1
        consensus.exchange(proposal(step, ep_rank))
        consensus.rest(wake, consensus.rest_seconds(1.0))
    busy = (time.process_time() - cpu) / (time.monotonic() - start)
    arrived: list[float] = []

    def work_arrives() -> None:
        for _ in range(NUM_WAKES):
            time.sleep(0.02)
            arrived.append(time.monotonic())
            wake.set()
            consensus.ring()

    if ep_rank == 1:
        threading.Thread(target=work_arrives).start()
    begun: list[float] = []
    while len(begun) < NUM_WAKES:
        consensus.rest(wake, consensus.rest_seconds(1.0))
        wake.clear()
        step += 1
        heard = consensus.exchange(Proposal(step=step, num_tokens=len(arrived)))
        begun += [time.monotonic()] * (heard[1].num_tokens - len(begun))
    results.put((busy, arrived, begun))


def test_ranks_hear_each_other_a_thousand_times(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 3, FOREVER)
    try:
        ranks.start(exchange_many)
        assert ranks.get(0, 1, 2) == [0, 0, 0]
    finally:
        ranks.end()


@pytest.mark.parametrize(("number", "text"), [(signal.SIGKILL, "has ended"), (signal.SIGSTOP, "did not answer within")])
def test_a_lost_rank_is_named(tmp_path: Path, number: signal.Signals, text: str) -> None:
    ranks = Ranks(tmp_path, 3, FOREVER if number == signal.SIGKILL else 5.0)
    try:
        ranks.start(exchange_until_lost)
        assert ranks.get(0, 1, 2) == [0, 1, 2]
        os.kill(ranks.processes[1].pid, number)
        lost = ranks.get(0, 2)
        assert [item[0] for item in lost] == [0, 2]
        for _, reason, message, seconds in lost:
            assert reason == "RANK_LOST"
            assert "rank 1" in message
            assert seconds < FOREVER / 2
        # Who comes second to the deadline of a hanging rank finds that it was ended.
        assert any(text in message for _, _, message, _ in lost)
        # The hanging one was ended, too: the group can start anew at once.
        ranks.processes[1].join(FOREVER)
        assert ranks.processes[1].exitcode == -signal.SIGKILL
    finally:
        ranks.end()


def test_idle_ranks_rest_and_wake_each_other(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, FOREVER)
    try:
        ranks.start(rest_and_exchange)
        (busy, _, begun), (busy_too, arrived, begun_too) = ranks.get(0, 1)
        assert busy < 0.05
        assert busy_too < 0.05
        for times in (begun, begun_too):
            delays = sorted(begin - arrival for begin, arrival in zip(times, arrived, strict=True))
            # A machine that is busy with other things delays some.
            assert delays[NUM_WAKES // 4] < 0.005, delays
    finally:
        ranks.end()


def sleep_long() -> None:
    time.sleep(FOREVER)


def test_who_gives_up_ends_stopped_ranks_only(tmp_path: Path) -> None:
    StepBoard.create(tmp_path / "board", NAME, 3)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["compute_worker.board_consensus"])
    processes = [context.Process(target=sleep_long) for _ in range(2)]
    try:
        for process in processes:
            process.start()
        stopped, running = [psutil.Process(process.pid) for process in processes]
        os.kill(stopped.pid, signal.SIGSTOP)
        while stopped.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        identities = [ProcessIdentity.of(pid) for pid in (os.getpid(), stopped.pid, running.pid)]
        consensus = BoardConsensus(
            open_board(tmp_path / "board", 0, 3), ep_rank=0, ranks=identities, timeout_seconds=FOREVER
        )
        consensus.abandon()
        processes[0].join(FOREVER)
        assert processes[0].exitcode == -signal.SIGKILL
        assert running.is_running()
        assert [identity.is_alive() for identity in identities] == [True, False, True]
    finally:
        for process in processes:
            process.kill()
            process.join(FOREVER)


def test_own_work_ends_the_rest(tmp_path: Path) -> None:
    StepBoard.create(tmp_path / "board", NAME, 2)
    identity = ProcessIdentity.of_self()
    consensus = BoardConsensus(
        open_board(tmp_path / "board", 0, 2), ep_rank=0, ranks=[identity, identity], timeout_seconds=FOREVER
    )
    wake = threading.Event()

    def work_arrives() -> None:
        wake.set()
        consensus.ring()

    timer = threading.Timer(0.2, work_arrives)
    timer.start()
    start = time.monotonic()
    consensus.rest(wake, FOREVER)
    assert wake.is_set()
    consensus.rest(wake, FOREVER)
    assert time.monotonic() - start < FOREVER / 2
    timer.join()


def test_a_half_written_message_is_not_read(tmp_path: Path) -> None:
    StepBoard.create(tmp_path / "board", NAME, 2)
    writer, reader = open_board(tmp_path / "board", 1, 2), open_board(tmp_path / "board", 0, 2)
    fields = list(range(NUM_FIELDS))
    writer.write(1, fields)
    writer.write(2, [7] * NUM_FIELDS)
    assert reader.read(1, 1) == fields
    assert reader.read(1, 2) == [7] * NUM_FIELDS
    assert reader.read(1, 3) is None
    assert reader.read(0, 1) is None
    content = (tmp_path / "board").read_bytes()
    place = content.index(struct.pack("<3q", 1, 0, 1)) + 16
    with (tmp_path / "board").open("r+b") as file:
        file.seek(place)
        file.write(struct.pack("<q", 5))
    assert reader.is_written(1, 1)
    assert reader.read(1, 1) is None


def test_another_board_is_refused(tmp_path: Path) -> None:
    StepBoard.create(tmp_path / "board", NAME, 2)
    with pytest.raises(ValueError, match="another board"):
        StepBoard(tmp_path / "board", b"other", ep_rank=0, num_ranks=2, num_fields=NUM_FIELDS)
    with pytest.raises(ValueError, match="bytes, expected"):
        open_board(tmp_path / "board", 0, 3)


def test_a_process_is_told_from_a_later_one() -> None:
    mine = ProcessIdentity.of_self()
    assert mine.is_alive()
    later = ProcessIdentity(pid=mine.pid, start_time=mine.start_time + 1, pid_namespace=mine.pid_namespace)
    assert not later.is_alive()


def choose(ep_rank: int, store: str, results: Any) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=ep_rank, world_size=2, timeout=datetime.timedelta(seconds=FOREVER)
    )
    world = dist.group.WORLD
    assert world is not None
    group = EPGroup(ep_rank=ep_rank, num_ranks=2, device=None, data_group=world, control_group=world)  # type: ignore[arg-type]
    for name in ("auto", "shared_memory", "gloo"):
        settings = WorkerSettings(model=Path("unused"), num_ranks=2, consensus=name)  # type: ignore[arg-type]
        consensus = make_consensus(settings, group)
        heard = consensus.exchange(proposal(1, ep_rank))
        results.put((type(consensus).__name__, heard == [proposal(1, 0), proposal(1, 1)]))
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_of_one_host_choose_shared_memory_and_leave_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["compute_worker.board_consensus"])
    results = context.Queue()
    processes = [context.Process(target=choose, args=(rank, str(tmp_path / "store"), results)) for rank in (0, 1)]
    for process in processes:
        process.start()
    try:
        got = sorted(results.get(timeout=FOREVER) for _ in range(6))
    finally:
        for process in processes:
            process.join(FOREVER)
    assert got == sorted([(BoardConsensus.__name__, True)] * 4 + [(GlooConsensus.__name__, True)] * 2)
    left = [path.name for path in Path("/dev/shm").glob("epilora-step-*")]
    assert not [name for name in left if any(f"-{process.pid}-" in name for process in processes)]
