"""Sort the rows of a step once, by (local expert, adapter slot), and cut the order into two kinds of tiles.

A row is one (token, k) with a local expert; its id is token * K + k. Rows are ordered by
`bin = expert * (num_slots + 1) + adapter_slot + 1`: all rows of an expert are neighbours (base tiles, expert-uniform,
BLOCK_M rows, an expert's last up to EXTRA_M more) and, inside it, all rows of an adapter (pair tiles, adapter-uniform,
PAIR_BLOCK_M rows). Rows of remote experts (-1) sort last and belong to no tile.

Example: K = 1, 2 slots, experts [1, 0, 1, 1], adapter slots [0, -1, -1, 0], BLOCK_M = 2:
    bin = [4, 0, 3, 4], sorted_row = [1, 2, 0, 3], row_pos = [2, 0, 1, 3]
    base tiles (expert, start, count): (0, 0, 1), (1, 1, 2), (1, 3, 1)
    pair tiles (bin, start, count): (0, 0, 1), (3, 1, 1), (4, 2, 2)

Up to SMALL_ROWS rows one launch does it: every program ranks a few rows by comparing them with all rows, so nothing
waits for anything. Above, a counting sort with atomics (four launches); there the order inside a bin may differ from
run to run, which moves rows between tile lines but changes no value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from compute_worker.kernels.lora import let_next_launch, wait_for_data

SMALL_ROWS = 2048
_ALL_COUNTERS = 16384
"""Most counters that the scan holds at once."""


class Route(NamedTuple):
    """Device int32 tensors. Positions index the sorted order; entries past the counts in `header` are undefined."""

    header: torch.Tensor
    """[2]: number of base tiles, number of pair tile entries."""
    sorted_row: torch.Tensor
    """[n]: row id at each position."""
    row_pos: torch.Tensor
    """[n]: position of each row id; -1 for a remote row."""
    row_bin: torch.Tensor
    """[n]: bin at each position."""
    tile_expert: torch.Tensor
    tile_start: torch.Tensor
    tile_count: torch.Tensor
    tile_done: torch.Tensor
    """0: programs whose part of the tile is complete count themselves here (`first_tiles`)."""
    tile_row: torch.Tensor
    """[base tiles * (BLOCK_M + EXTRA_M)]: row ids by base tile: a program finds its rows by its number alone."""
    pair_bin: torch.Tensor
    pair_start: torch.Tensor
    pair_count: torch.Tensor
    """0 in entries that hold no tile (the one-launch path leaves gaps)."""
    pair_done: torch.Tensor
    """0: programs that share a pair tile count themselves here, and the last leaves 0 again."""


@triton.jit
def _row_bin(expert_ptr, slot_ptr, row, in_range, num_experts, slots_1, TOP_K: tl.constexpr):
    """(expert, bin) of each row; (num_experts, num_experts * slots_1) for a remote or out-of-range one."""
    expert = tl.load(expert_ptr + row, mask=in_range, other=-1).to(tl.int32)
    slot = tl.load(slot_ptr + row // TOP_K, mask=in_range, other=-1).to(tl.int32)
    slot = tl.where(slot < slots_1 - 1, slot, -1)  # no such slot: combine answers NaN
    local = (expert >= 0) & (expert < num_experts)
    expert = tl.where(local, expert, num_experts)
    return expert, expert * slots_1 + tl.where(local, slot + 1, 0)


@triton.jit
def _num_tiles(count, BLOCK_M: tl.constexpr, EXTRA_M: tl.constexpr):
    """Base tiles of an expert with so many rows."""
    return tl.where(count > 0, tl.maximum((count - EXTRA_M + BLOCK_M - 1) // BLOCK_M, 1), 0)


@triton.jit
def _write_rows(route, row, pos, bin_id, expert_start, expert_count, tile_first, mask, slots_1, BLOCK_M: tl.constexpr,
                EXTRA_M: tl.constexpr):  # fmt: skip
    """Scatter what each row knows: its place, in its base tile too, and, if it starts one, that tile."""
    tl.store(route.sorted_row + pos, row, mask=mask)
    tl.store(route.row_pos + row, pos, mask=mask)
    tl.store(route.row_bin + pos, bin_id, mask=mask)
    rank_in_expert = pos - expert_start
    last = _num_tiles(expert_count, BLOCK_M, EXTRA_M) - 1
    nth = tl.minimum(rank_in_expert // BLOCK_M, last)
    tile = tile_first + nth
    rank_in_tile = rank_in_expert - nth * BLOCK_M
    tl.store(route.tile_row + tile * (BLOCK_M + EXTRA_M) + rank_in_tile, row, mask=mask)
    starts = mask & (rank_in_tile == 0)
    tl.store(route.tile_expert + tile, bin_id // slots_1, mask=starts)
    tl.store(route.tile_start + tile, pos, mask=starts)
    tl.store(route.tile_done + tile, 0, mask=starts)
    tl.store(route.tile_count + tile, tl.where(nth == last, expert_count - nth * BLOCK_M, BLOCK_M), mask=starts)


@triton.jit(do_not_specialize=["num_rows", "num_experts", "slots_1"])
def route_small_kernel(expert_ptr, slot_ptr, route, num_rows, num_experts, slots_1, TOP_K: tl.constexpr,
                       ALL_ROWS: tl.constexpr, ALL_EXPERTS: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
                       BLOCK_M: tl.constexpr, EXTRA_M: tl.constexpr, PAIR_BLOCK_M: tl.constexpr,
                       PDL: tl.constexpr):  # fmt: skip
    """Each program places BLOCK_I rows by counting, over all rows, those that sort before them."""
    wait_for_data(PDL)
    let_next_launch(PDL)
    row = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    in_range = row < num_rows
    expert_i, bin_i = _row_bin(expert_ptr, slot_ptr, row, in_range, num_experts, slots_1, TOP_K)
    # Two counts share an integer (each at most SMALL_ROWS), summed over rows only at the end.
    lower_and_earlier = tl.zeros([BLOCK_I, BLOCK_J], tl.int32)
    same_and_expert_lower = tl.zeros([BLOCK_I, BLOCK_J], tl.int32)
    same_expert = tl.zeros([BLOCK_I, BLOCK_J], tl.int32)
    for j0 in range(0, num_rows, BLOCK_J):
        j = j0 + tl.arange(0, BLOCK_J)
        in_j = (j < num_rows)[None, :]
        expert_j, bin_j = _row_bin(expert_ptr, slot_ptr, j, j < num_rows, num_experts, slots_1, TOP_K)
        same = (bin_j[None, :] == bin_i[:, None]) & in_j
        earlier = same & (j[None, :] < row[:, None])
        lower_and_earlier += (bin_j[None, :] < bin_i[:, None]).to(tl.int32) + earlier.to(tl.int32) * 65536
        expert_lower = expert_j[None, :] < expert_i[:, None]
        same_and_expert_lower += same.to(tl.int32) + expert_lower.to(tl.int32) * 65536
        same_expert += ((expert_j[None, :] == expert_i[:, None]) & in_j).to(tl.int32)
    lower_and_earlier_sum = tl.sum(lower_and_earlier, 1)
    same_and_expert_lower_sum = tl.sum(same_and_expert_lower, 1)
    expert_count = tl.sum(same_expert, 1)
    rank_in_bin = lower_and_earlier_sum // 65536
    pos = lower_and_earlier_sum % 65536 + rank_in_bin
    bin_count = same_and_expert_lower_sum % 65536
    expert_start = same_and_expert_lower_sum // 65536

    # Base tiles before each expert, from a histogram of all rows (remote ones land in bin num_experts).
    j = tl.arange(0, ALL_ROWS)
    expert_all, _ = _row_bin(expert_ptr, slot_ptr, j, j < num_rows, num_experts, slots_1, TOP_K)
    tiles_of_expert = _num_tiles(tl.histogram(expert_all, ALL_EXPERTS), BLOCK_M, EXTRA_M)
    experts = tl.arange(0, ALL_EXPERTS)
    tile_first = tl.sum(tl.where(experts[None, :] < expert_i[:, None], tiles_of_expert[None, :], 0), 1)
    if tl.program_id(0) == 0:
        tl.store(route.header, tl.sum(tl.where(experts < num_experts, tiles_of_expert, 0)))
        tl.store(route.header + 1, num_rows)

    local = in_range & (expert_i < num_experts)
    _write_rows(route, row, pos, bin_i, expert_start, expert_count, tile_first, local, slots_1, BLOCK_M, EXTRA_M)
    tl.store(route.row_pos + row, -1, mask=in_range & (expert_i == num_experts))
    # The pair tile that starts at a position sits at that index; other indices hold an empty entry.
    starts_pair = local & (rank_in_bin % PAIR_BLOCK_M == 0)
    pair_count = tl.where(starts_pair, tl.minimum(bin_count - rank_in_bin, PAIR_BLOCK_M), 0)
    tl.store(route.pair_bin + pos, bin_i, mask=in_range)
    tl.store(route.pair_start + pos, pos, mask=in_range)
    tl.store(route.pair_count + pos, pair_count, mask=in_range)
    tl.store(route.pair_done + pos, 0, mask=in_range)


@triton.jit(do_not_specialize=["num_rows", "num_experts", "slots_1"])
def count_kernel(expert_ptr, slot_ptr, bin_count_ptr, rank_ptr, num_rows, num_experts, slots_1, TOP_K: tl.constexpr,
                 BLOCK_I: tl.constexpr, COUNTERS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """rank[row] = how many rows of its bin this counter had before it; bin_count [COUNTERS, bins], zeros.

    The programs take a bin's counters in turn: additions to one address wait for each other.
    """
    wait_for_data(PDL)
    let_next_launch(PDL)
    row = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    in_range = row < num_rows
    _, bin_id = _row_bin(expert_ptr, slot_ptr, row, in_range, num_experts, slots_1, TOP_K)
    local = bin_id < num_experts * slots_1
    counter = tl.program_id(0) % COUNTERS
    rank = tl.atomic_add(bin_count_ptr + counter * (num_experts * slots_1) + bin_id, 1, mask=local)
    tl.store(rank_ptr + row, rank, mask=in_range)


@triton.jit(do_not_specialize=["num_experts", "slots_1"])
def scan_kernel(bin_count_ptr, bin_start_ptr, pair_first_ptr, tile_first_ptr, header_ptr, num_experts, slots_1,
                COUNTERS: tl.constexpr, BLOCK_B: tl.constexpr, ALL_EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr,
                EXTRA_M: tl.constexpr, PAIR_BLOCK_M: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One program: exclusive sums over bins of rows and pair tiles, then over experts of base tiles.

    In bin_count each counter becomes the sum of those before it.
    """
    wait_for_data(PDL)
    let_next_launch(PDL)
    num_bins = num_experts * slots_1
    rows_before = tl.zeros([1], tl.int32)
    pairs_before = tl.zeros([1], tl.int32)
    for b0 in range(0, num_bins, BLOCK_B):
        b = b0 + tl.arange(0, BLOCK_B)
        own_ptrs = bin_count_ptr + tl.arange(0, COUNTERS)[:, None] * num_bins + b[None, :]
        own = tl.load(own_ptrs, mask=(b < num_bins)[None, :], other=0)
        tl.store(own_ptrs, tl.cumsum(own, 0) - own, mask=(b < num_bins)[None, :])
        count = tl.sum(own, 0)
        pairs = (count + PAIR_BLOCK_M - 1) // PAIR_BLOCK_M
        tl.store(bin_start_ptr + b, rows_before + tl.cumsum(count, 0) - count, mask=b < num_bins)
        tl.store(pair_first_ptr + b, pairs_before + tl.cumsum(pairs, 0) - pairs, mask=b < num_bins)
        rows_before += tl.sum(count, 0)
        pairs_before += tl.sum(pairs, 0)
    one = tl.arange(0, 1)
    tl.store(bin_start_ptr + num_bins + one, rows_before)
    tl.store(header_ptr + 1 + one, pairs_before)
    tl.debug_barrier()
    e = tl.arange(0, ALL_EXPERTS)
    start = tl.load(bin_start_ptr + e * slots_1, mask=e < num_experts, other=0)
    end = tl.load(bin_start_ptr + (e + 1) * slots_1, mask=e < num_experts, other=0)
    tiles = _num_tiles(end - start, BLOCK_M, EXTRA_M)
    tl.store(tile_first_ptr + e, tl.cumsum(tiles, 0) - tiles, mask=e < num_experts)
    tl.store(header_ptr, tl.sum(tiles, 0))


@triton.jit(do_not_specialize=["num_rows", "num_experts", "slots_1"])
def place_kernel(expert_ptr, slot_ptr, bin_count_ptr, bin_start_ptr, pair_first_ptr, tile_first_ptr, rank_ptr, route,
                 num_rows, num_experts, slots_1, TOP_K: tl.constexpr, BLOCK_I: tl.constexpr, COUNTERS: tl.constexpr,
                 BLOCK_M: tl.constexpr, EXTRA_M: tl.constexpr, PAIR_BLOCK_M: tl.constexpr,
                 PDL: tl.constexpr):  # fmt: skip
    """Turn (bin, rank in bin) into positions and tile entries."""
    wait_for_data(PDL)
    let_next_launch(PDL)
    row = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    in_range = row < num_rows
    _, bin_id = _row_bin(expert_ptr, slot_ptr, row, in_range, num_experts, slots_1, TOP_K)
    local = bin_id < num_experts * slots_1
    tl.store(route.row_pos + row, -1, mask=in_range & (bin_id >= num_experts * slots_1))
    counter = tl.program_id(0) % COUNTERS
    rank = tl.load(rank_ptr + row, mask=local, other=0)
    rank += tl.load(bin_count_ptr + counter * (num_experts * slots_1) + bin_id, mask=local, other=0)
    start = tl.load(bin_start_ptr + bin_id, mask=local, other=0)
    count = tl.load(bin_start_ptr + bin_id + 1, mask=local, other=0) - start
    pos = start + rank
    expert = bin_id // slots_1
    expert_start = tl.load(bin_start_ptr + expert * slots_1, mask=local, other=0)
    expert_end = tl.load(bin_start_ptr + (expert + 1) * slots_1, mask=local, other=0)
    tile_first = tl.load(tile_first_ptr + expert, mask=local, other=0)
    _write_rows(route, row, pos, bin_id, expert_start, expert_end - expert_start, tile_first, local, slots_1, BLOCK_M,
                EXTRA_M)  # fmt: skip
    pair = tl.load(pair_first_ptr + bin_id, mask=local, other=0) + rank // PAIR_BLOCK_M
    starts_pair = local & (rank % PAIR_BLOCK_M == 0)
    tl.store(route.pair_bin + pair, bin_id, mask=starts_pair)
    tl.store(route.pair_start + pair, pos, mask=starts_pair)
    tl.store(route.pair_count + pair, tl.minimum(count - rank, PAIR_BLOCK_M), mask=starts_pair)
    tl.store(route.pair_done + pair, 0, mask=starts_pair)


def max_base_tiles(num_rows: int, num_experts: int, block_m: int) -> int:
    """Most base tiles that num_rows rows can need: each expert may leave one tile part full."""
    return min(num_rows, num_experts + num_rows // block_m)


def max_pair_tiles(num_rows: int, num_experts: int, num_slots: int, pair_block_m: int) -> int:
    """Most pair tile entries that num_rows rows can need."""
    if num_rows <= SMALL_ROWS:
        return num_rows
    return min(num_rows, num_experts * (num_slots + 1) + num_rows // pair_block_m)


def unsorted_route(topk_expert_1K: torch.Tensor, adapter_slot_1: torch.Tensor) -> Route:
    """The inputs of a step of one token in the fields that `tiles` reads with DIRECT; launches nothing.

    A token's experts are all different, so every row is a tile of its own and keeps its place.
    """
    experts = topk_expert_1K.flatten()
    return Route(*([experts] * len(Route._fields)))._replace(header=adapter_slot_1)


def build_route(
    topk_expert_TK: torch.Tensor,
    adapter_slot_T: torch.Tensor,
    *,
    num_experts: int,
    num_slots: int,
    block_m: int,
    pair_block_m: int,
    extra_m: int = 0,
    pdl: bool = False,
) -> Route:
    """Sort and tile the rows of one step; launches only, never waits for the device.

    topk_expert_TK: int32 or int64 [T, K], -1 where the expert is elsewhere. adapter_slot_T: int [T], -1 without one.
    block_m, extra_m, pair_block_m, pdl: see MoEConfig.
    """
    n, top_k = topk_expert_TK.numel(), topk_expert_TK.shape[1]
    device, slots_1 = topk_expert_TK.device, num_slots + 1
    num_tiles = max_base_tiles(n, num_experts, block_m)
    num_pairs = max_pair_tiles(n, num_experts, num_slots, pair_block_m)
    sizes = [2, n, n, n, *[num_tiles] * 4, num_tiles * (block_m + extra_m), *[num_pairs] * 4]
    # One allocation; every part starts at a multiple of 4 integers so that kernels see aligned pointers.
    padded = [triton.cdiv(size, 4) * 4 for size in sizes]
    buffer = torch.empty(sum(padded), dtype=torch.int32, device=device)
    route = Route(*(part[:size] for part, size in zip(buffer.split(padded), sizes, strict=True)))
    all_experts = triton.next_power_of_2(num_experts + 1)
    if n <= SMALL_ROWS:
        block_i, all_rows = 4, triton.next_power_of_2(n)
        route_small_kernel[(triton.cdiv(n, block_i),)](
            topk_expert_TK, adapter_slot_T, route, n, num_experts, slots_1, TOP_K=top_k,
            ALL_ROWS=all_rows, ALL_EXPERTS=all_experts, BLOCK_I=block_i, BLOCK_J=min(512, max(128, all_rows)),
            BLOCK_M=block_m, EXTRA_M=extra_m, PAIR_BLOCK_M=pair_block_m, PDL=pdl, launch_pdl=pdl,
            num_warps=1 if n <= 128 else 4,
        )  # fmt: skip
        return route
    num_bins = num_experts * slots_1
    counters = 1 << max(2, min(6, (_ALL_COUNTERS // num_bins).bit_length() - 1))
    bin_count = torch.zeros((counters, num_bins), dtype=torch.int32, device=device)
    bin_start = torch.empty(num_bins + 1, dtype=torch.int32, device=device)
    pair_first = torch.empty(num_bins, dtype=torch.int32, device=device)
    tile_first = torch.empty(num_experts, dtype=torch.int32, device=device)
    rank = torch.empty(n, dtype=torch.int32, device=device)
    block_i = 256
    grid = (triton.cdiv(n, block_i),)
    count_kernel[grid](
        topk_expert_TK, adapter_slot_T, bin_count, rank, n, num_experts, slots_1, TOP_K=top_k, BLOCK_I=block_i,
        COUNTERS=counters, PDL=pdl, launch_pdl=pdl,
    )  # fmt: skip
    scan_kernel[(1,)](
        bin_count, bin_start, pair_first, tile_first, route.header, num_experts, slots_1,
        COUNTERS=counters, BLOCK_B=min(_ALL_COUNTERS // counters, triton.next_power_of_2(num_bins)),
        ALL_EXPERTS=all_experts, BLOCK_M=block_m, EXTRA_M=extra_m, PAIR_BLOCK_M=pair_block_m, PDL=pdl, launch_pdl=pdl,
        num_warps=8,
    )  # fmt: skip
    place_kernel[grid](
        topk_expert_TK, adapter_slot_T, bin_count, bin_start, pair_first, tile_first, rank, route, n, num_experts,
        slots_1, TOP_K=top_k, BLOCK_I=block_i, COUNTERS=counters, BLOCK_M=block_m, EXTRA_M=extra_m,
        PAIR_BLOCK_M=pair_block_m, PDL=pdl, launch_pdl=pdl,
    )  # fmt: skip
    return route
