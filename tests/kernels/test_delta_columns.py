"""The lists of extra K columns, against lists made by plain Python, and epilogues that go by them."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

import triton
import triton.language as tl

from compute_worker.kernels import moe, moe_reference
from compute_worker.kernels.delta_columns import GROUP, Columns, list_columns, max_groups
from compute_worker.kernels.route import build_route, max_base_tiles
from tests.kernels.cases import (
    DEVICE,
    DTYPE,
    TOLERANCE,
    Shape,
    make_adapter,
    make_batch,
    make_table,
    make_weights,
    relative_error,
)
from tests.kernels.test_moe import CONFIGS

BLOCK_M = 32
NUM_SLOTS = 40
LISTED = CONFIGS["fused_32_columns"]
SETTINGS = {
    "32": LISTED,
    "64_rows": dataclasses.replace(LISTED, block_m=64, tail_m=16, delta_columns=64),
}


@triton.jit
def _list_kernel(route, gate_up, down, table, num_tiles, num_experts, slots_1, max_groups, B_STEP: tl.constexpr,
                 BLOCK_M: tl.constexpr, ITEM_BYTES: tl.constexpr):  # fmt: skip
    list_columns(tl.program_id(0), route, gate_up, down, table, num_tiles, num_experts, slots_1, max_groups, B_STEP,
                 BLOCK_M, ITEM_BYTES, 0)  # fmt: skip


def _ranks(rank, num_experts=4):
    """gate and down of this rank everywhere; up has it on even experts, half of it (or one) on odd ones."""
    up = [rank if expert % 2 == 0 else max(rank // 2, 1) for expert in range(num_experts)]
    return {"gate": [rank] * num_experts, "up": up, "down": [rank] * num_experts}


def _adapters(shape, ranks_of_slot):
    return {slot: make_adapter(shape, _ranks(rank), seed=slot + 1) for slot, rank in ranks_of_slot.items()}


def _tiles(expert_TK, slot_T):
    """(expert, slots of its rows in order) of each base tile."""
    rows = sorted((int(expert), int(slot_T[t])) for t, experts in enumerate(expert_TK.tolist()) for expert in experts)
    tiles = []
    for expert in sorted({e for e, _ in rows}):
        slots = [slot for e, slot in rows if e == expert]
        tiles += [(expert, slots[i : i + BLOCK_M]) for i in range(0, len(slots), BLOCK_M)]
    return tiles


@pytest.mark.parametrize("interleaved", [False, True])
def test_lists_hold_the_adapters_of_each_tile_and_no_other(interleaved):
    """3 of 40 slots and base rows on 2 experts, tiles that end inside an adapter's rows, gate and up of one A."""
    shape = Shape(num_experts=2, top_k=1, interleaved=interleaved)
    ranks = {3: {"gate_up": [40, 8], "down": [16, 0]}, 17: {"gate": [8, 64], "up": [24, 16], "down": [3, 64]},
             39: {"down": [16, 16]}}  # fmt: skip
    table = make_table(shape, {s: make_adapter(shape, r, seed=s) for s, r in ranks.items()}, NUM_SLOTS)
    slot_T = torch.tensor([-1] * 12 + [3] * 30 + [17] * 11 + [39] * 17, dtype=torch.int32)
    expert_TK = torch.tensor([[t % 2] for t in range(70)], dtype=torch.int32)
    route = build_route(
        expert_TK.to(DEVICE), slot_T.to(DEVICE), num_experts=2, num_slots=NUM_SLOTS, block_m=BLOCK_M, pair_block_m=16
    )
    tiles, groups = max_base_tiles(70, 2, BLOCK_M), max_groups(BLOCK_M, NUM_SLOTS, 64)
    step = 2 if interleaved else 1
    item = torch.empty(0, dtype=DTYPE).element_size()
    gate_up, down = (
        Columns(
            torch.empty(tiles, dtype=torch.int32, device=DEVICE),
            torch.empty((tiles, groups, projections, 2), dtype=torch.int64, device=DEVICE),
        )
        for projections in (2, 1)
    )
    _list_kernel[(2 * tiles,)](
        route, gate_up, down, table.for_kernels, tiles, 2, NUM_SLOTS + 1, groups, B_STEP=step, BLOCK_M=BLOCK_M,
        ITEM_BYTES=item,
    )  # fmt: skip
    for columns, first, projections in ((gate_up, 0, 2), (down, 2, 1)):
        for tile, (expert, slots) in enumerate(_tiles(expert_TK, slot_T)):
            expected = []
            for slot in sorted(set(slots) - {-1}):
                rank = table.pointers.lora_rank[slot, expert, first : first + projections].tolist()
                a = table.pointers.a_address[slot, expert].tolist()
                b = table.pointers.b_address[slot, expert, first : first + projections].tolist()
                shared = first == 0 and a[0] == a[1]
                for j in range(-(-max(rank) // GROUP)):
                    expected.append([
                        (b[p] + j * GROUP * item, expert * (NUM_SLOTS + 1) + slot + 1,
                         rank[p] * (step if shared else 1), min(max(rank[p] - j * GROUP, 0), GROUP), j,
                         0 if shared else p)
                        for p in range(projections)
                    ])  # fmt: skip
            assert int(columns.num_groups[tile]) == len(expected)
            got = [
                [(address, second & 0xFFFFFFFF, second >> 32 & 2047, second >> 43 & 31, second >> 48 & 31, second >> 53)
                 for address, second in group]
                for group in columns.words[tile, : len(expected)].tolist()
            ]  # fmt: skip
            assert got == expected


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    "ranks_of_slot",
    [
        dict.fromkeys(range(0, NUM_SLOTS, 2), 16),
        {0: 8, 7: 64, 8: 8, 21: 24, 38: 64, 39: 8},
        {1: 5, 2: 64, 30: 16, 39: 33},
    ],
    ids=["many_of_16", "8_beside_64", "odd"],
)
def test_many_adapters_in_a_tile_match_reference(setting, ranks_of_slot):
    """Rows of most adapters in every tile, slots absent between them, base rows, a tail tile."""
    shape = Shape(top_k=1)
    slots = [-1, *ranks_of_slot, -1]
    x, expert, weight, slot = make_batch(shape, 77, slots)
    expert = (torch.arange(77, dtype=torch.int32)[:, None] % 3 // 2).to(DEVICE)
    weights, adapters = make_weights(shape), _adapters(shape, ranks_of_slot)
    table = make_table(shape, adapters, NUM_SLOTS)
    config = SETTINGS[setting]
    got = moe(x, expert, weight, slot, weights, table, config=config)
    assert relative_error(got, moe_reference(x, expert, weight, slot, weights, adapters)) < TOLERANCE
    base = slot == -1
    alone = moe(x, expert, weight, torch.full_like(slot, -1), weights, table, config=config)
    assert torch.equal(got[base], alone[base])
    without = moe(x, expert, weight, torch.full_like(slot, -1), weights, None, config=config)
    assert torch.equal(got[base], without[base])


@pytest.mark.parametrize("slots", [[4], [-1], [-1, -1, -1, -1, 4]], ids=["one_run", "base_only", "base_first"])
def test_tiles_with_one_run_or_none(slots):
    shape = Shape(top_k=1)
    x, expert, weight, slot = make_batch(shape, 40, slots)
    expert = torch.zeros_like(expert)
    weights, adapters = make_weights(shape), _adapters(shape, {4: 24, 9: 64})
    got = moe(x, expert, weight, slot, weights, make_table(shape, adapters, NUM_SLOTS), config=LISTED)
    assert relative_error(got, moe_reference(x, expert, weight, slot, weights, adapters)) < TOLERANCE


def test_no_b_is_read_that_no_row_of_the_tile_needs():
    """A resident adapter without rows, between two that have some, may hold anything."""
    shape = Shape(top_k=1)
    x, expert, weight, slot = make_batch(shape, 12, [2, -1, 6])
    weights, adapters = make_weights(shape), _adapters(shape, {2: 16, 4: 16, 6: 64})
    for piece in adapters[4].values():
        piece.b.fill_(float("nan"))
    got = moe(x, expert, weight, slot, weights, make_table(shape, adapters, NUM_SLOTS), config=LISTED)
    assert relative_error(got, moe_reference(x, expert, weight, slot, weights, adapters)) < TOLERANCE


def test_an_adapters_rows_do_not_depend_on_other_adapters():
    """Its ranks begin at a multiple of 16 columns, whatever stands before them."""
    shape = Shape(top_k=1)
    x, expert, weight, slot = make_batch(shape, 12, [3, 5, 3])
    expert = torch.zeros_like(expert)
    weights, adapters = make_weights(shape), _adapters(shape, {3: 24, 5: 8, 9: 40})
    table = make_table(shape, adapters, NUM_SLOTS)
    first = moe(x, expert, weight, slot, weights, table, config=LISTED)
    others = torch.where(slot == 5, slot, 9)
    second = moe(x, expert, weight, others, weights, table, config=LISTED)
    own = slot == 5
    if DEVICE.type == "cuda":
        assert torch.equal(first[own], second[own])
    else:  # numpy sums a product's columns in an order of its own
        assert relative_error(first[own], second[own]) < TOLERANCE
