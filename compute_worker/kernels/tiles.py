"""Which tile a program works on, read from the route, or straight from the inputs where nothing needs sorting.

DIRECT: number of rows of a step of one token, whose experts are all different, so that each row is a tile of its own at
the position of its row id and no launch has to sort; 0 where the step was sorted.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def base_tile(route, index, num_experts, NUM_N_BLOCKS: tl.constexpr, N_FASTEST: tl.constexpr, DIRECT: tl.constexpr,
              CACHE: tl.constexpr):  # fmt: skip
    """(is there a tile, tile, n block, expert, start, count) of a program.

    N_FASTEST: programs that run together share rows of x; else (all tiles of one n block are neighbours) they share
    weights where an expert has several tiles. Either way the programs without a tile come last. All loads are inside
    their arrays whether or not there is a tile, so that none waits for another. CACHE: their cache modifier.
    """
    if DIRECT > 0:
        num_tiles = DIRECT
    else:
        num_tiles = tl.load(route.header, cache_modifier=CACHE)
    valid = index < num_tiles * NUM_N_BLOCKS
    if N_FASTEST:
        tile = index // NUM_N_BLOCKS
        n_block = index % NUM_N_BLOCKS
    else:
        n_block = index // tl.maximum(num_tiles, 1)
        tile = tl.where(valid, index - n_block * num_tiles, 0)
    expert = tl.load(route.tile_expert + tile, cache_modifier=CACHE).to(tl.int32)
    if DIRECT > 0:
        valid = valid & (expert >= 0) & (expert < num_experts)
        start = tile
        count = tl.where(valid, 1, 0)
    else:
        start = tl.load(route.tile_start + tile, cache_modifier=CACHE)
        count = tl.load(route.tile_count + tile, cache_modifier=CACHE)
    return valid, tile, n_block, expert, start, count


@triton.jit
def row_of_base_tile(route, tile, FIRST: tl.constexpr, NUM: tl.constexpr, TILE_M: tl.constexpr, TOP_K: tl.constexpr,
                     DIRECT: tl.constexpr, CACHE: tl.constexpr):  # fmt: skip
    """Row of x of rows FIRST to FIRST + NUM of a base tile, undefined past its count; int32.

    TILE_M: rows that a base tile may have. Needs nothing that is loaded, so it waits for nothing.
    """
    m = FIRST + tl.arange(0, NUM)
    if DIRECT > 0:
        x_row = tile // TOP_K + m
    else:
        x_row = tl.load(route.tile_row + tile * TILE_M + m, cache_modifier=CACHE) // TOP_K
    return x_row


@triton.jit
def pair_tile(route, entry, num_experts, slots_1, DIRECT: tl.constexpr, CACHE: tl.constexpr):
    """(bin, start, count) of a pair tile; count 0 where the entry holds none.

    All loads are inside their arrays whether or not there is a tile, so that none waits for another. CACHE: their cache
    modifier.
    """
    if DIRECT > 0:
        expert = tl.load(route.tile_expert + entry, cache_modifier=CACHE).to(tl.int32)
        slot = tl.load(route.header, cache_modifier=CACHE).to(tl.int32)
        slot = tl.where(slot < slots_1 - 1, slot, -1)
        bin_id = expert * slots_1 + slot + 1
        start = entry
        count = tl.where((expert >= 0) & (expert < num_experts), 1, 0)
    else:
        num_entries = tl.load(route.header + 1, cache_modifier=CACHE)
        count = tl.load(route.pair_count + entry, cache_modifier=CACHE)
        bin_id = tl.load(route.pair_bin + entry, cache_modifier=CACHE)
        start = tl.load(route.pair_start + entry, cache_modifier=CACHE)
        count = tl.where(entry < num_entries, count, 0)
    return bin_id, start, count


@triton.jit
def bin_of_rows(route, expert, pos, row_mask, slots_1, DIRECT: tl.constexpr, CACHE: tl.constexpr):
    """Bin of each row of a base tile; -1 past its rows."""
    if DIRECT > 0:
        slot = tl.load(route.header, cache_modifier=CACHE).to(tl.int32)
        slot = tl.where(slot < slots_1 - 1, slot, -1)
        rows_bin = tl.where(row_mask, expert * slots_1 + slot + 1, -1)
    else:
        rows_bin = tl.load(route.row_bin + pos, mask=row_mask, other=-1, cache_modifier=CACHE)
    return rows_bin


@triton.jit
def gathered_row(route, pos, row_mask, TOP_K: tl.constexpr, DIRECT: tl.constexpr):
    """Row of x: the token of the position's row, or the position itself where TOP_K is 0; int64."""
    if TOP_K == 0:
        x_row = pos
    elif DIRECT > 0:
        x_row = pos // TOP_K
    else:
        x_row = tl.load(route.sorted_row + pos, mask=row_mask, other=0) // TOP_K
    return x_row.to(tl.int64)
