"""Moving to another placement gives what a start under it gives: bits, bytes, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_model_ranks import STEPS, open_rank, write_explicit
from worker_model_ranks import Results, run_ranks
from worker_model_support import Rank, random_adapter, small_config, write_model, write_slice

from compute_worker.ep_group import EPGroup
from epilora.errors import EpiloraError
from epilora.placement import ExpertPlacement
from epilora.settings import WorkerSettings

NUM_RANKS = 2
PROJECTIONS = ({"gate_up": 3, "down": 2}, {"gate": 2, "up": 1, "down": 3})


def logits_of(rank: Rank) -> list[list[torch.Tensor]]:
    rank.forget_blocks()
    return [rank.prefill(step.of(rank.group.ep_rank), step.num_tokens(NUM_RANKS)) for step in STEPS]


def stage_next(rank: Rank, work: Path, slot: int) -> None:
    """What the gateway has the loader and the ranks do for one resident adapter."""
    move = rank.runner.mover._move
    assert move is not None
    spec = move.placed.load_spec
    adapter = random_adapter(rank.spec, slot + 1, rank_of=PROJECTIONS[slot], vary_ranks=slot == 1)
    path = write_slice(work / f"next-{slot}-rank-{spec.ep_rank}", adapter, spec)
    pool = rank.runner.pool
    pool.stage(name=f"adapter-{slot + 1}", generation=slot + 1, path=path, placement_id=spec.placement_id)


def take_up(rank: Rank, number: int) -> None:
    with torch.inference_mode():
        rank.runner.mover.place(number)


def reason_of(call: object, *arguments: object) -> str:
    with pytest.raises(EpiloraError) as caught:
        call(*arguments)  # type: ignore[operator]
    return caught.value.reason


def bytes_of(rank: Rank) -> tuple[int, int]:
    report = rank.runner.memory()
    return report.base_expert_bytes, report.adapter_bytes


def rank_main(ep_rank: int, work: Path) -> Results:
    group = EPGroup.from_environment(WorkerSettings(model=work / "model", num_ranks=NUM_RANKS, device="cpu"))
    path = write_explicit(work / f"placement-{ep_rank}.json", NUM_RANKS)
    fresh = open_rank(work, path, NUM_RANKS, group=group)
    results: Results = {"fresh": logits_of(fresh), "fresh bytes": bytes_of(fresh)}

    rank = open_rank(work, "linear", NUM_RANKS, group=group)
    mover, before = rank.runner.mover, bytes_of(rank)
    results["linear"] = logits_of(rank)
    number, placed = 5, mover.placed
    results["read"] = mover.prepare(number, fresh.placement)
    results["prepared bytes"] = bytes_of(rank)
    other = ExpertPlacement.make("round_robin", rank.spec, NUM_RANKS)
    results["reasons"] = [reason_of(mover.prepare, 6, other)]
    # Given up: nothing of it stays, and slices for it are refused.
    stage_next(rank, work, 0)
    mover.abandon()
    results["abandoned"] = bytes_of(rank) == before and not mover.promise(number)
    results["still linear"] = logits_of(rank)

    mover.prepare(number, fresh.placement)
    stage_next(rank, work, 0)
    results["half"] = mover.promise(number)
    stage_next(rank, work, 1)
    results["other number"] = mover.promise(number + 1)
    results["whole"] = mover.promise(number)
    results["reasons"].append(reason_of(mover.abandon))
    mover.withdraw(number)
    assert mover.promise(number)
    take_up(rank, number)
    results["moved"] = logits_of(rank)
    results["moved bytes"] = bytes_of(rank)
    results["is new"] = mover.placed is not placed and mover.placed.placement == fresh.placement
    mover.placed.expert_load.refresh(worked=True)
    results["rows"] = sum(map(sum, mover.placed.expert_load.rows.values()))
    results["reasons"].append(reason_of(mover.prepare, 7, fresh.placement))

    # And back, to a rank of which every expert is another's now; an adapter is retired on the way.
    back = ExpertPlacement.make("linear", rank.spec, NUM_RANKS)
    mover.prepare(8, back)
    for slot in (0, 1):
        stage_next(rank, work, slot)
    with torch.inference_mode():
        rank.runner.pool.retire(2)
    assert mover.promise(8)
    take_up(rank, 8)
    results["back bytes"] = bytes_of(rank)
    results["residents"] = [resident.adapter_slot for resident in rank.runner.pool.residents()]
    results["back"] = rank.prefill(STEPS[0].of(ep_rank), STEPS[0].num_tokens(NUM_RANKS))
    results["start bytes"] = before
    return results


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    work = tmp_path_factory.mktemp("move")
    write_model(small_config("qwen2_moe"), work / "model")
    return run_ranks(NUM_RANKS, rank_main, work)


def same(ours: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    return all(torch.equal(a, b) for one, two in zip(ours, other, strict=True) for a, b in zip(one, two, strict=True))


def test_moved_equals_started_there(outcome: list[Results]) -> None:
    for result in outcome:
        assert same(result["moved"], result["fresh"])
        assert result["moved bytes"] == result["fresh bytes"]
        assert result["is new"]
        for step, moved in zip(result["linear"], result["moved"], strict=True):
            for one, other in zip(step, moved, strict=True):
                torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    # Layers 0 and 1; the rows of one pass over all steps, counted from the move on.
    num_tokens = sum(sum(step.num_tokens(NUM_RANKS)) for step in STEPS)
    assert sum(result["rows"] for result in outcome) == 2 * 3 * num_tokens


def test_a_move_given_up_leaves_nothing(outcome: list[Results]) -> None:
    for result in outcome:
        assert result["read"] > 0
        assert result["prepared bytes"][0] > result["start bytes"][0]
        assert result["abandoned"]
        assert same(result["still linear"], result["linear"])


def test_only_a_complete_move_is_promised(outcome: list[Results]) -> None:
    for result in outcome:
        assert (result["half"], result["other number"], result["whole"]) == (False, False, True)
        assert result["reasons"] == ["PLACEMENT_PREPARED", "PLACEMENT_PROMISED", "ALREADY_PLACED"]


def test_and_back_again(outcome: list[Results]) -> None:
    for result in outcome:
        assert result["back bytes"][0] == result["start bytes"][0]
        assert result["back bytes"][1] < result["start bytes"][1]
        assert result["residents"] == [0]
        assert same([result["back"]], [result["linear"][0]])
