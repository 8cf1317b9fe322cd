"""Experts whose width is shared by ranks: what whole ones give, and each rank holds its part only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from worker_model_families import CONFIGS, family_config
from worker_model_ranks import Results, run_ranks
from worker_model_support import Prompt, Rank, prompt_tokens, random_adapter, small_config, write_model

from compute_worker.ep_group import EPGroup
from compute_worker.expert_shard import ExpertShard
from epilora.errors import InvalidArgumentError
from epilora.model_spec import GateUpLayout, ModelSpec
from epilora.settings import WorkerSettings

MOST_RANKS = 4
# Concatenated; interleaved and transposed, with biases.
FAMILIES = ("qwen2_moe", "gpt_oss")
PROJECTIONS: Mapping[str, tuple[Mapping[str, int], ...]] = {
    "qwen2_moe": ({"gate_up": 3, "down": 2}, {"gate": 2, "up": 1, "down": 3}),
    "gpt_oss": ({"gate_up": 2, "down": 3}, {"gate": 1, "up": 2}),
}
PROMPTS = {0: [(1, 5, -1), (2, 4, 0)], 1: [(3, 6, 1)], 3: [(4, 3, 0), (5, 2, 1)]}


class Mix(NamedTuple):
    """Ranks, how many of them share an expert, and whether one of two groups of them has no experts."""

    num_ranks: int
    tp: int
    backend: str
    without: bool = False


MIXES = (
    Mix(2, 2, "all_to_all"),
    Mix(4, 2, "allgather_reducescatter"),
    Mix(4, 2, "all_to_all", without=True),
    Mix(4, 4, "auto"),
)


def prompts_of(ep_rank: int) -> list[Prompt]:
    return [Prompt(tokens=prompt_tokens(seed, length), slot=slot) for seed, length, slot in PROMPTS.get(ep_rank, [])]


def num_tokens(num_ranks: int) -> list[int]:
    return [sum(len(prompt.tokens) for prompt in prompts_of(rank)) for rank in range(num_ranks)]


def open_rank(work: Path, family: str, mix: Mix, group: EPGroup | None) -> Rank:
    options: dict[str, Any] = {} if group is None else {"dispatch_backend": mix.backend, "expert_tp": mix.tp}
    placement = str(work / f"{family}.json") if mix.without else "round_robin"
    rank = Rank(work / family, work=work, placement=placement, num_ranks=mix.num_ranks, group=group, **options)
    for slot, projections in enumerate(PROJECTIONS[family]):
        adapter = random_adapter(rank.spec, slot + 1, rank_of=projections, vary_ranks=slot == 1)
        rank.add_adapter(adapter, slot=slot, work=work)
    return rank


def rank_main(ep_rank: int, work: Path) -> Results:
    everyone = EPGroup.from_environment(WorkerSettings(model=work, num_ranks=MOST_RANKS, device="cpu"))
    results: Results = {}
    groups = {count: dist.new_group(range(count)) for count in (2, 4)}
    for mix in MIXES:
        if ep_rank >= mix.num_ranks:
            continue
        group = replace(everyone, num_ranks=mix.num_ranks, data_group=groups[mix.num_ranks], expert_tp=mix.tp)
        for family in FAMILIES:
            rank = open_rank(work, family, mix, group)
            report = rank.runner.memory()
            results[f"{family} {mix}"] = {
                "logits": rank.prefill(prompts_of(ep_rank), num_tokens(mix.num_ranks)),
                "expert bytes": report.base_expert_bytes,
                "adapter bytes": [resident.expert_bytes for resident in rank.runner.pool.residents()],
            }
    return results


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Results]]:
    work = tmp_path_factory.mktemp("tp")
    configs = {"qwen2_moe": small_config("qwen2_moe"), "gpt_oss": family_config("gpt_oss", CONFIGS["gpt_oss"])}
    for (family, config), num_experts in zip(configs.items(), ("num_experts", "num_local_experts"), strict=True):
        write_model(config, work / family)
        all_on_one = [[*range(getattr(config, num_experts))], []]
        (work / f"{family}.json").write_text(json.dumps({"all_layers": all_on_one}))
    return work, run_ranks(MOST_RANKS, rank_main, work)


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_experts_equal_whole_ones(outcome: tuple[Path, list[Results]], family: str) -> None:
    work, results = outcome
    one = open_rank(work, family, Mix(1, 1, "local"), None)
    report = one.runner.memory()
    scale_bytes = 4
    for mix in MIXES:
        ranks = [result[f"{family} {mix}"] for result in results[: mix.num_ranks]]
        for ep_rank, rank in enumerate(ranks):
            one.forget_blocks()
            expected = one.prefill(prompts_of(ep_rank)) if prompts_of(ep_rank) else []
            for got, wanted in zip(rank["logits"], expected, strict=True):
                torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
        # Base weights are there once, but for the biases of down, which every part has room for.
        total = sum(rank["expert bytes"] for rank in ranks)
        biases = sum(moe.num_experts * moe.hidden_size * 4 for moe in one.spec.moe_layers) if family == "gpt_oss" else 0
        assert total == report.base_expert_bytes + (mix.tp - 1) * biases
        # Of each pair one matrix is split, the other on every rank.
        for whole, parts in zip(
            one.runner.pool.residents(), zip(*(rank["adapter bytes"] for rank in ranks), strict=True), strict=True
        ):
            assert whole.expert_bytes < sum(parts) < mix.tp * whole.expert_bytes
            assert all(size % scale_bytes == 0 for size in parts)


def test_widths_that_do_not_split_are_refused(outcome: tuple[Path, list[Results]]) -> None:
    model = ModelSpec.from_directory(outcome[0] / "qwen2_moe")
    with pytest.raises(InvalidArgumentError, match="does not divide the experts' width 24") as caught:
        ExpertShard.make(0, 5, model)
    assert caught.value.reason == "EXPERT_TP"


def test_parts_of_gate_and_up() -> None:
    """The docstring's examples, and pairs of slots with different ranks."""
    shard, columns = ExpertShard(index=1, count=2), torch.arange(8)
    assert shard.first(columns, 0, GateUpLayout.CONCATENATED).tolist() == [2, 3, 6, 7]
    assert shard.first(columns, 0, GateUpLayout.INTERLEAVED).tolist() == [4, 5, 6, 7]
    assert shard.second(columns, 0).tolist() == [4, 5, 6, 7]
    a, b = torch.zeros(3, 5), torch.arange(12)
    # Slot 0 has rank 2: [[0, 1], [2, 3], [4, 5], [6, 7]]; slot 1 none; slot 2 rank 1: [8, 9, 10, 11].
    for projection, layout, expected in (
        ("gate_up", GateUpLayout.CONCATENATED, [2, 3, 6, 7, 9, 11]),
        ("gate_up", GateUpLayout.INTERLEAVED, [4, 5, 6, 7, 10, 11]),
        ("up", GateUpLayout.CONCATENATED, [4, 5, 6, 7, 10, 11]),
    ):
        assert shard.pair(projection, layout, a, b, (2, 0, 1))[1].tolist() == expected
    split, same = shard.pair("down", GateUpLayout.CONCATENATED, torch.arange(12).view(3, 4), b, (2, 0, 1))
    assert split.tolist() == [[2, 3], [6, 7], [10, 11]]
    assert same is b
    # A rank that has none of a layer's experts.
    for projection in ("gate_up", "down"):
        a, b = shard.pair(projection, GateUpLayout.CONCATENATED, torch.zeros(0, 6), torch.zeros(0), ())
        assert (a.shape[0], b.shape) == (0, (0,))
