"""G ranks give what one rank gives: uneven and zero token counts, all placements, LoRA on one rank's tokens only."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from worker_model_ranks import Results, run_ranks
from worker_model_support import Chunk, Prompt, Rank, prompt_tokens, random_adapter, small_config, write_model

from compute_worker.ep_group import EPGroup
from compute_worker.experts_call import TopK
from epilora.settings import WorkerSettings

RANKS = (2, 3, 4)
PLACEMENTS = ("linear", "round_robin", "explicit")
# The other backend needs no placements of its own.
GROUPED_RANKS = 3
NUM_EXPERTS = 7
HIDDEN = 32
LAYER = 1


@dataclass(frozen=True)
class Step:
    """Prompts of each rank, cycled over the ranks there are; what a rank does not name it has none of."""

    name: str
    prompts: dict[int, list[Prompt]]

    def of(self, ep_rank: int) -> list[Prompt]:
        return self.prompts.get(ep_rank, [])

    def num_tokens(self, num_ranks: int) -> list[int]:
        return [sum(len(prompt.tokens) for prompt in self.of(rank)) for rank in range(num_ranks)]


def _prompt(seed: int, length: int, slot: int = -1) -> Prompt:
    return Prompt(tokens=prompt_tokens(seed, length), slot=slot)


STEPS = (
    Step("all base", {0: [_prompt(1, 5)], 1: [_prompt(2, 3), _prompt(3, 4)], 2: [_prompt(4, 6)], 3: [_prompt(5, 1)]}),
    Step("one rank has tokens", {1: [_prompt(6, 9, 0), _prompt(7, 2)]}),
    Step("lora on one rank", {0: [_prompt(8, 7)], 1: [_prompt(9, 5, 1), _prompt(10, 4, 0)], 3: [_prompt(11, 3)]}),
    Step(
        "lora on all", {0: [_prompt(12, 2, 0)], 1: [_prompt(13, 1, 1)], 2: [_prompt(14, 8, 1)], 3: [_prompt(15, 4, 0)]}
    ),
)
BITS = Step("bits", {0: [_prompt(20, 6), _prompt(21, 5, 0)], 1: [_prompt(22, 4), _prompt(23, 7, 1)]})


def write_explicit(path: Path, num_ranks: int) -> str:
    """Every expert once, in an odd order, and two of them again on the last rank; layer 0 differs from layer 1."""
    tables = {}
    for layer in (0, 1):
        order = [(3 * expert + layer) % NUM_EXPERTS for expert in range(NUM_EXPERTS)]
        ranks = [order[rank::num_ranks] for rank in range(num_ranks)]
        ranks[-1] += [expert for expert in (0, 5) if expert not in ranks[-1]]
        tables[str(layer)] = ranks
    path.write_text(json.dumps({"layers": tables}))
    return str(path)


def open_rank(work: Path, placement: str, num_ranks: int, **options: object) -> Rank:
    rank = Rank(work / "model", work=work, placement=placement, num_ranks=num_ranks, **options)
    for slot, projections in enumerate(({"gate_up": 3, "down": 2}, {"gate": 2, "up": 1, "down": 3})):
        adapter = random_adapter(rank.spec, slot + 1, rank_of=projections, vary_ranks=slot == 1)
        rank.add_adapter(adapter, slot=slot, work=work)
    return rank


def expert_input(ep_rank: int) -> tuple[torch.Tensor, TopK, list[int]]:
    """Hidden states, chosen experts and adapter slots of one rank's tokens of an expert step; rank 1 has none."""
    num_tokens = (5, 0, 3, 1)[ep_rank]
    generator = torch.Generator().manual_seed(ep_rank)
    x_TD = torch.randn((num_tokens, HIDDEN), generator=generator)
    scores_TE = torch.rand((num_tokens, NUM_EXPERTS), generator=generator)
    weight_TK, expert_TK = scores_TE.topk(3, dim=1)
    return x_TD, (expert_TK, weight_TK), [(-1, 0, 1)[t % 3] for t in range(num_tokens)]


def _run_placement(rank: Rank, num_ranks: int) -> Results:
    ep_rank = rank.group.ep_rank
    results: Results = {}
    for step in STEPS:
        results[step.name] = rank.prefill(step.of(ep_rank), step.num_tokens(num_ranks))
    results["decode"] = _decode(rank, ep_rank, num_ranks)
    results["experts"] = _expert_steps(rank, ep_rank, num_ranks)
    plain = [Prompt(tokens=prompt.tokens) for prompt in BITS.of(ep_rank)]
    results["bits mixed"] = rank.prefill(BITS.of(ep_rank), BITS.num_tokens(num_ranks))
    results["bits plain"] = rank.prefill(plain, BITS.num_tokens(num_ranks))
    report = rank.runner.memory()
    results["expert bytes"] = report.base_expert_bytes
    results["resident"] = rank.runner.pool.residents()
    results["adapter bytes"] = report.adapter_bytes
    return results


def _decode(rank: Rank, ep_rank: int, num_ranks: int) -> list[torch.Tensor]:
    """A prompt a rank, token by token; odd ranks begin two steps later."""
    prompt, blocks = _prompt(30 + ep_rank, 4, ep_rank % 2), rank.blocks(4)
    logits = []
    for step in range(6):
        counts = [int(0 <= step - 2 * (r % 2) < 4) for r in range(num_ranks)]
        start = step - 2 * (ep_rank % 2)
        chunks = [Chunk(prompt=prompt, start=start, stop=start + 1, blocks=blocks)] if counts[ep_rank] else []
        logits += rank.step(chunks, counts)
    return [torch.cat(logits)]


def _expert_steps(rank: Rank, ep_rank: int, num_ranks: int) -> list[torch.Tensor]:
    x_TD, topk, slots = expert_input(ep_rank)
    counts = [expert_input(r)[0].shape[0] for r in range(num_ranks)]
    outputs = []
    for chosen in (None, topk):
        for routed_only in (False, True):
            y_TD = rank.runner.forward_experts(LAYER, x_TD, chosen, slots, routed_only, counts)
            assert y_TD is not None
            outputs.append(y_TD)
    assert rank.runner.forward_experts(LAYER, None, None, [], False, [0] * num_ranks) is None
    return outputs


def rank_main(ep_rank: int, work: Path) -> Results:
    """Runs all checks on groups of the first 2, the first 3, and all 4 processes, since starting one takes seconds."""
    everyone = EPGroup.from_environment(WorkerSettings(model=work / "model", num_ranks=max(RANKS), device="cpu"))
    results: Results = {}
    for num_ranks in RANKS:
        data_group = dist.new_group(range(num_ranks))
        if ep_rank < num_ranks:
            group = (
                everyone if num_ranks == max(RANKS) else replace(everyone, num_ranks=num_ranks, data_group=data_group)
            )
            results[str(num_ranks)] = _run_group(work, group)
    return results


def _run_group(work: Path, group: EPGroup) -> Results:
    num_ranks, results = group.num_ranks, Results()
    for placement in PLACEMENTS:
        path = placement
        if placement == "explicit":
            path = write_explicit(work / f"placement-{group.ep_rank}.json", num_ranks)
        results[placement] = _run_placement(open_rank(work, path, num_ranks, group=group), num_ranks)
    if num_ranks == GROUPED_RANKS:
        grouped = open_rank(work, "round_robin", num_ranks, group=group, expert_backend="grouped")
        results["grouped"] = _run_placement(grouped, num_ranks)
    return results


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rank, list[Results]]:
    work = tmp_path_factory.mktemp("ranks")
    write_model(small_config("qwen2_moe"), work / "model")
    results = run_ranks(max(RANKS), rank_main, work)
    return open_rank(work, "linear", 1), results


CASES = [*itertools.product(RANKS, PLACEMENTS), (GROUPED_RANKS, "grouped")]


class Outcome(NamedTuple):
    """What one rank has, and what each of num_ranks gave."""

    num_ranks: int
    case: str
    one: Rank
    results: list[Results]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def outcome(request: pytest.FixtureRequest, everything: tuple[Rank, list[Results]]) -> Outcome:
    num_ranks, case = request.param
    one, results = everything
    one.forget_blocks()
    return Outcome(num_ranks, case, one, [result[str(num_ranks)][case] for result in results[:num_ranks]])


def test_logits_equal_one_rank(outcome: Outcome) -> None:
    num_ranks, _, one, results = outcome
    for step in STEPS:
        for ep_rank in range(num_ranks):
            got = results[ep_rank][step.name]
            expected = one.prefill(step.of(ep_rank)) if step.of(ep_rank) else []
            assert len(got) == len(expected)
            for mine, other in zip(got, expected, strict=True):
                torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


def test_decode_equals_prefill_on_one_rank(outcome: Outcome) -> None:
    num_ranks, _, one, results = outcome
    for ep_rank in range(num_ranks):
        expected = one.prefill([_prompt(30 + ep_rank, 4, ep_rank % 2)])
        torch.testing.assert_close(results[ep_rank]["decode"][0], expected[0], atol=1e-5, rtol=1e-5)


def test_experts_equal_one_rank(outcome: Outcome) -> None:
    num_ranks, _, one, results = outcome
    for ep_rank in range(num_ranks):
        x_TD, topk, slots = expert_input(ep_rank)
        calls = [(chosen, routed_only) for chosen in (None, topk) for routed_only in (False, True)]
        for got, (chosen, routed_only) in zip(results[ep_rank]["experts"], calls, strict=True):
            expected = one.runner.forward_experts(LAYER, x_TD, chosen, slots, routed_only, [x_TD.shape[0]])
            assert got.shape == x_TD.shape
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_base_rows_keep_their_bits(outcome: Outcome) -> None:
    results = outcome.results
    for ep_rank in (0, 1):
        mixed, plain = results[ep_rank]["bits mixed"], results[ep_rank]["bits plain"]
        assert torch.equal(mixed[0], plain[0])
        assert not torch.equal(mixed[1], plain[1])


def test_bytes_equal_placement(outcome: Outcome) -> None:
    num_ranks, case, one, results = outcome
    total = sum(result["expert bytes"] for result in results)
    copies = 0
    if case == "explicit":
        orders = [[(3 * expert + layer) % NUM_EXPERTS for expert in range(NUM_EXPERTS)] for layer in (0, 1)]
        copies = sum(expert not in order[num_ranks - 1 :: num_ranks] for order in orders for expert in (0, 5))
    expert_bytes = 3 * HIDDEN * 24 * 4
    assert one.runner.memory().base_expert_bytes == 2 * NUM_EXPERTS * expert_bytes
    assert total == (2 * NUM_EXPERTS + copies) * expert_bytes
    for result in results:
        residents = result["resident"]
        assert [resident.adapter_slot for resident in residents] == [0, 1]
        assert result["adapter bytes"] == sum(r.expert_bytes + r.dense_bytes for r in residents)
        assert {r.dense_bytes for r in residents} == {r.dense_bytes for r in one.runner.pool.residents()}
