"""Moving to another placement on two GPUs: the bits of a start under it, decode steps replayed before and after."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from worker_model_ranks import Results, run_ranks
from worker_model_support import (
    Chunk,
    Prompt,
    Rank,
    prompt_tokens,
    random_adapter,
    small_config,
    write_model,
    write_slice,
)

from epilora.placement import ExpertPlacement

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

ALIGNED = {"hidden_size": 128, "moe_intermediate_size": 96, "num_experts": 13, "head_dim": 32}
PROJECTIONS = ({"gate_up": 16, "down": 16}, {"gate": 3, "up": 5, "down": 2})
NUM_STEPS = 6
DEVICE = "cuda"
MEBIBYTE = 1 << 20


def open_rank(work: Path, placement: str, dispatch: str) -> Rank:
    rank = Rank(
        work / "model",
        work=work,
        placement=placement,
        num_ranks=2,
        device=DEVICE,
        dtype="bfloat16",
        dispatch_backend=dispatch,
    )
    for slot, projections in enumerate(PROJECTIONS):
        rank.add_adapter(random_adapter(rank.spec, slot + 1, rank_of=projections), slot=slot, work=work)
    return rank


def decode(rank: Rank) -> torch.Tensor:
    """Logits of three sequences (no adapter, and both), token by token; float32 [steps * 3, V]."""
    rank.forget_blocks()
    prompts = [Prompt(tokens=prompt_tokens(10 + slot, NUM_STEPS), slot=slot) for slot in (-1, 0, 1)]
    blocks = [rank.blocks(NUM_STEPS) for _ in prompts]
    logits = []
    for step in range(NUM_STEPS):
        chunks = [
            Chunk(prompt=prompt, start=step, stop=step + 1, blocks=own)
            for prompt, own in zip(prompts, blocks, strict=True)
        ]
        logits += [part.cpu() for part in rank.step(chunks, [3, 3])]
    return torch.cat(logits)


def move(rank: Rank, placement: ExpertPlacement, work: Path) -> None:
    """What gateway, loader and step loop do together."""
    mover = rank.runner.mover
    mover.prepare(1, placement)
    assert mover._move is not None
    spec = mover._move.placed.load_spec
    for slot, projections in enumerate(PROJECTIONS):
        adapter = random_adapter(rank.spec, slot + 1, rank_of=projections)
        path = write_slice(work / f"next-{slot}-rank-{spec.ep_rank}", adapter, spec)
        rank.runner.pool.stage(name="a", generation=slot + 1, path=path, placement_id=spec.placement_id)
    assert mover.promise(1)
    with torch.inference_mode():
        mover.place(1)


def allocated() -> int:
    if DEVICE == "cpu":
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def rank_main(ep_rank: int, work: Path, *, dispatch: str) -> Results:
    fresh = open_rank(work, "round_robin", dispatch)
    results: Results = {"fresh": decode(fresh), "fresh bytes": fresh.runner.memory().base_expert_bytes}
    rank = open_rank(work, "linear", dispatch)
    results["before"] = decode(rank)
    steps = rank.runner._decode_steps
    memory = allocated()
    move(rank, fresh.placement, work)
    results["growth"] = allocated() - memory
    results["bytes"] = rank.runner.memory().base_expert_bytes
    replayed = steps.num_replayed if steps is not None else 0
    results["after"] = decode(rank)
    results["replays"] = (replayed, steps.num_replayed - replayed if steps is not None else 0)
    return results


@pytest.mark.parametrize("dispatch", ["allgather_reducescatter", "one_sided"])
def test_moved_equals_started_there(tmp_path: Path, dispatch: str) -> None:
    write_model(small_config("qwen3_moe", **ALIGNED), tmp_path / "model")
    for result in run_ranks(2, partial(rank_main, dispatch=dispatch), tmp_path):
        assert torch.equal(result["after"], result["fresh"])
        # Another order of summation in bfloat16, and maybe another expert near a tie.
        error = (result["after"] - result["before"]).norm(dim=1) / result["before"].norm(dim=1)
        assert error.median() < 0.05, error
        assert result["bytes"] == result["fresh bytes"]
        assert result["growth"] < 8 * MEBIBYTE
        before, after = result["replays"]
        assert before > 0
        assert after > 0
