"""Every way of sending rows, on 1 to 4 ranks: what one rank gives, the same bits each time, no row too many."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from worker_model_dispatch import (
    BACKENDS,
    HIDDEN,
    INTERPRETED_COUNTS,
    LAYER,
    LORA,
    NUM_ADAPTER_SLOTS,
    NUM_EXPERTS,
    PEER_BYTES,
    PLACEMENTS,
    RANKS,
    TOP_K,
    Case,
    Place,
    cases_of,
    make_dispatcher_of,
    make_layer,
    make_placement,
    run_layer,
    slots_of,
    tokens_of,
)
from worker_model_peers import shared_memory
from worker_model_ranks import Results, run_ranks
from worker_model_support import small_config

from compute_worker.dispatch.all_to_all import needed_by_rank
from compute_worker.dispatch.allgather_reducescatter import SPLIT_BYTES, AllGatherDispatcher
from compute_worker.dispatch.local import LocalDispatcher
from compute_worker.dispatch.peer_memory import PeerMemory
from compute_worker.dispatch.sequence_parallel import SequenceParallelDispatcher, part_of
from compute_worker.ep_group import EPGroup
from compute_worker.expert_load import ExpertLoad
from compute_worker.expert_shard import ExpertShard
from compute_worker.step_context import CurrentStep
from epilora.model_spec import ModelSpec
from epilora.settings import WorkerSettings

CASES = {num_ranks: cases_of(num_ranks) for num_ranks in RANKS}
WITH_COPIES = [Case(backend, "explicit", "all", "even") for backend in BACKENDS]
TWINS = "round_robin"


def rank_main(ep_rank: int, work: Path) -> Results:
    """The whole table, on groups of the first 1, 2, 3 and all 4 processes."""
    everyone = EPGroup.from_environment(WorkerSettings(model=work, num_ranks=max(RANKS), device="cpu"))
    model = ModelSpec.from_directory(work / "model")
    results: Results = {}
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for num_ranks in RANKS:
        data_group = dist.new_group(range(num_ranks))
        if ep_rank < num_ranks:
            group = replace(everyone, num_ranks=num_ranks, data_group=data_group)
            memory = shared_memory(group, work, PEER_BYTES) if "one_sided" in BACKENDS else None
            results[str(num_ranks)] = {
                case: _run_case(case, model, replace(group, expert_tp=case.tp), pairs, memory)
                for case in CASES[num_ranks]
            }
            results[f"twins {num_ranks}"] = _run_twins(model, group, memory)
            if memory is not None:
                results[f"written {num_ranks}"] = _written(group, memory)
    return results


def _run_case(
    case: Case, model: ModelSpec, group: EPGroup, pairs: list[dist.ProcessGroup], memory: PeerMemory | None
) -> Results:
    # Both forms of rows: hidden states packed, and beside them.
    split_bytes = 0 if case.placement == "round_robin" else SPLIT_BYTES
    dispatcher = inner = make_dispatcher_of(case.backend, group, memory, split_bytes)
    if case.sp > 1:
        assert case.sp == 2, case
        dispatcher = SequenceParallelDispatcher(
            inner, group=pairs[group.ep_rank // 2], num_parts=2, part=group.ep_rank % 2
        )
    placement, current = make_placement(case.placement, model, group.num_ranks // case.tp), CurrentStep()
    shard = ExpertShard(index=group.expert_tp_rank, count=case.tp)
    local = placement.local_experts(LAYER, group.placement_rank)
    load = ExpertLoad({LAYER: len(local)}, NUM_ADAPTER_SLOTS, torch.device("cpu"))
    layer = make_layer(placement, group.placement_rank, dispatcher, current, load, shard)
    place = Place(
        ep_rank=group.ep_rank,
        num_ranks=group.num_ranks,
        counts=case.num_tokens(group.num_ranks),
        local=local,
        shard=shard,
    )
    y_TD = run_layer(layer, current, case, place)
    load.refresh(worked=True)
    results = {"y": y_TD, "num_rows": load.rows[LAYER], "sent": list(getattr(inner, "num_pairs_sent", ()))}
    results["rows by adapter"] = [load.rows_of(slot)[LAYER] for slot in range(-1, NUM_ADAPTER_SLOTS)]
    results["again"] = run_layer(layer, current, case, place)
    without = case._replace(lora="no")
    results["plain"] = results["again"] if case == without else run_layer(layer, current, without, place)
    return results


def _run_twins(model: ModelSpec, group: EPGroup, memory: PeerMemory | None) -> Results:
    """Where every rank holds the same tokens, some of them with adapters."""
    results: Results = {}
    for backend in BACKENDS:
        placement, current = make_placement(TWINS, model, group.num_ranks), CurrentStep()
        local = placement.local_experts(LAYER, group.ep_rank)
        load = ExpertLoad({LAYER: len(local)}, NUM_ADAPTER_SLOTS, torch.device("cpu"))
        layer = make_layer(placement, group.ep_rank, make_dispatcher_of(backend, group, memory), current, load)
        # Groups of as many ranks as there are hold the tokens of one; none of them splits its run.
        case = Case(backend, TWINS, "all", "ragged", sp=group.num_ranks)
        place = Place(
            ep_rank=group.ep_rank, num_ranks=group.num_ranks, counts=case.num_tokens(group.num_ranks), local=local
        )
        results[backend] = run_layer(layer, current, case, place)
    return results


def _written(group: EPGroup, memory: PeerMemory) -> Results:
    """One-sided dispatch into memory that is all -1: what arrived where, and a layer too large for the memory."""
    from compute_worker.dispatch.one_sided import OneSidedDispatcher
    from compute_worker.kernels.one_sided import MAX_PROGRAMS

    counts = INTERPRETED_COUNTS["ragged"][: group.num_ranks]
    # Behind the flags.
    memory.local[group.num_ranks * MAX_PROGRAMS * 4 :] = 255
    dist.barrier(group=group.data_group)
    dispatcher = OneSidedDispatcher(group, memory, overflow=AllGatherDispatcher(group))
    base, remainder = divmod(NUM_EXPERTS, group.num_ranks)
    offsets = [rank * base + min(rank, remainder) for rank in range(group.num_ranks + 1)]
    x_TD, expert_TK, weight_TK = tokens_of(group.ep_rank, counts[group.ep_rank])
    arrived, handle = dispatcher.dispatch(
        x_TD, expert_TK, weight_TK, {}, rank_offsets=offsets, num_tokens_per_rank=counts, pad_to=max(counts) + 2
    )
    results = {"x": arrived.x_ND.clone(), "slot": arrived.slot_NK.clone()}
    dispatcher.combine(torch.zeros_like(arrived.x_ND), handle)
    many = [PEER_BYTES // HIDDEN] * group.num_ranks
    _, handle = dispatcher.dispatch(
        torch.zeros((many[0], HIDDEN)),
        torch.zeros((many[0], TOP_K), dtype=torch.int64),
        torch.zeros((many[0], TOP_K)),
        {},
        rank_offsets=offsets,
        num_tokens_per_rank=many,
    )
    results["too many"] = type(handle).__name__
    return results


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelSpec, list[Results]]:
    work = tmp_path_factory.mktemp("dispatch")
    small_config("qwen2_moe").save_pretrained(work / "model")
    return ModelSpec.from_directory(work / "model"), run_ranks(max(RANKS), rank_main, work)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_table_has_every_pair_of_values(backend: str, num_ranks: int) -> None:
    """Forms of two parallel ranks are void on an odd number of ranks, and no others are left out.

    Not void, but no more than another one: with one group that holds all tokens, adapters on one are adapters on all,
    and tokens on none leaves the layer without any.
    """
    forms = (1, 2) if num_ranks % 2 == 0 else (1,)
    axes = {"placement": PLACEMENTS, "lora": LORA, "counts": tuple(INTERPRETED_COUNTS), "sp": forms, "tp": forms}
    cases = [case._asdict() for case in CASES[num_ranks] if case.backend == backend]
    for (one, its), (other, others) in itertools.combinations(axes.items(), 2):
        found = {(case[one], case[other]) for case in cases}
        assert found == set(itertools.product(its, others)), (one, other)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_cell_equals_one_rank(table: tuple[ModelSpec, list[Results]], backend: str, num_ranks: int) -> None:
    model, results = table
    current = CurrentStep()
    load = ExpertLoad({LAYER: NUM_EXPERTS}, NUM_ADAPTER_SLOTS, torch.device("cpu"))
    one = make_layer(make_placement("linear", model, 1), 0, LocalDispatcher(), current, load)
    for case in (case for case in CASES[num_ranks] if case.backend == backend):
        for ep_rank, num_tokens in enumerate(case.num_tokens(num_ranks)):
            place = Place(ep_rank=ep_rank, num_ranks=num_ranks, counts=[num_tokens], local=tuple(range(NUM_EXPERTS)))
            expected = run_layer(one, current, case, place)
            got = results[ep_rank][str(num_ranks)][case]["y"]
            torch.testing.assert_close(
                got, expected, atol=1e-5, rtol=1e-5, msg=lambda m, c=case, r=ep_rank: f"{c}, rank {r}: {m}"
            )


@pytest.mark.parametrize("num_ranks", RANKS)
def test_bits_are_the_same_in_each_run_and_beside_adapters(
    table: tuple[ModelSpec, list[Results]], num_ranks: int
) -> None:
    _, results = table
    for case in CASES[num_ranks]:
        for ep_rank in range(num_ranks):
            mine = results[ep_rank][str(num_ranks)][case]
            assert torch.equal(mine["y"], mine["again"]), (case, ep_rank)
            slots = slots_of(case.lora, ep_rank // case.sp, num_ranks // case.sp, mine["y"].shape[0])
            base = [t for t, slot in enumerate(slots) if slot < 0]
            assert torch.equal(mine["y"][base], mine["plain"][base]), (case, ep_rank)
            # Ranks that hold the same tokens have the same results.
            other = results[ep_rank // case.sp * case.sp][str(num_ranks)][case]
            assert torch.equal(mine["y"], other["y"]), (case, ep_rank)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_all_to_all_sends_each_token_once_to_each_rank_of_its_experts(
    table: tuple[ModelSpec, list[Results]], num_ranks: int
) -> None:
    model, results = table
    for case in (case for case in CASES[num_ranks] if case.backend == "all_to_all"):
        placement = make_placement(case.placement, model, num_ranks // case.tp)
        copies, num_copies = placement.copies(LAYER), placement.num_copies(LAYER)
        owner = [r for r in range(placement.num_ranks) for _ in placement.local_experts(LAYER, r)]
        for ep_rank, num_tokens in enumerate(case.num_tokens(num_ranks)):
            chosen = tokens_of(ep_rank // case.sp, num_tokens)[1].tolist()
            mine, shift = part_of(num_tokens, ep_rank % case.sp, case.sp), ep_rank // case.tp
            pairs = {
                (t, owner[copies[expert, (shift + t) % num_copies[expert]]])
                for t in range(mine.start, mine.stop)
                for expert in chosen[t]
                if expert >= 0
            }
            expected = Counter(rank for _, rank in pairs)
            sent = results[ep_rank][str(num_ranks)][case]["sent"]
            assert sent == [expected[rank // case.tp] for rank in range(num_ranks)], (case, ep_rank)


@pytest.mark.parametrize(("case", "num_ranks"), [*itertools.product(WITH_COPIES, RANKS[1:])])
def test_rows_reach_every_copy(table: tuple[ModelSpec, list[Results]], case: Case, num_ranks: int) -> None:
    model, results = table
    placement = make_placement("explicit", model, num_ranks)
    num_tokens = case.num_tokens(num_ranks)
    total: Counter[int] = Counter()
    for ep_rank in range(num_ranks):
        num_rows = results[ep_rank][str(num_ranks)][case]["num_rows"]
        assert min(num_rows) > 0, (ep_rank, num_rows)
        for expert, count in zip(placement.local_experts(LAYER, ep_rank), num_rows, strict=True):
            total[expert] += count
    chosen = torch.cat([tokens_of(rank, count)[1] for rank, count in enumerate(num_tokens)])
    assert total == Counter(expert for expert in chosen.flatten().tolist() if expert >= 0)
    slots = torch.tensor([slot for rank, count in enumerate(num_tokens) for slot in slots_of("all", rank, 1, count)])
    for adapter_slot in range(-1, NUM_ADAPTER_SLOTS):
        by_adapter: Counter[int] = Counter()
        for ep_rank in range(num_ranks):
            counted = results[ep_rank][str(num_ranks)][case]["rows by adapter"][adapter_slot + 1]
            for expert, count in zip(placement.local_experts(LAYER, ep_rank), counted, strict=True):
                by_adapter[expert] += count
        mine = chosen[slots == adapter_slot].flatten().tolist()
        assert by_adapter == Counter(expert for expert in mine if expert >= 0)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_that_hold_the_same_tokens_get_the_same_bits(
    table: tuple[ModelSpec, list[Results]], backend: str, num_ranks: int
) -> None:
    """Where no expert has copies among which ranks would choose differently."""
    _, results = table
    outputs = [results[ep_rank][f"twins {num_ranks}"][backend] for ep_rank in range(num_ranks)]
    assert outputs[0].abs().max() > 0
    for output in outputs[1:]:
        assert torch.equal(output, outputs[0])


@pytest.mark.skipif("one_sided" not in BACKENDS, reason="its kernels need triton, and no GPU")
@pytest.mark.parametrize("num_ranks", RANKS)
def test_one_sided_writes_hidden_states_only_where_they_are_needed(
    table: tuple[ModelSpec, list[Results]], num_ranks: int
) -> None:
    _, results = table
    counts = INTERPRETED_COUNTS["ragged"][:num_ranks]
    num_rows = max(counts) + 2
    for ep_rank in range(num_ranks):
        written = results[ep_rank][f"written {num_ranks}"]
        assert written["too many"] == "CombineHandle"
        needed = (written["slot"] >= 0).any(dim=1)
        is_token = torch.cat([torch.arange(num_rows) < count for count in counts])
        assert 0 < needed.sum() < needed.numel()
        assert not (needed & ~is_token).any()
        # Bytes of 255 are NaN.
        assert written["x"].isnan().all(dim=1).tolist() == (~needed).tolist()
        x_ND = torch.cat([F.pad(tokens_of(r, count)[0], (0, 0, 0, num_rows - count)) for r, count in enumerate(counts)])
        assert torch.equal(written["x"][needed], x_ND[needed])


def test_needed_ranks() -> None:
    """The docstring's example, and a rank without experts, to which nothing goes."""
    expert_TK = torch.tensor([[0, 1], [5, -1], [-1, -1]])
    needed = needed_by_rank(expert_TK, torch.tensor([2, 4, 6]))
    assert needed.tolist() == [[True, False, False], [False, False, True], [False, False, False]]
    needed = needed_by_rank(torch.tensor([[1, 2]]), torch.tensor([2, 2, 4]))
    assert needed.tolist() == [[True, False, True]]
