"""Beginning on the first base tiles of a kernel's output while its last tiles still run.

Under programmatic dependent launch a kernel's programs launch once every program of the one before has begun, as
multiprocessors become free: the last tiles of the gate/up GEMM leave most of them free for half of a tile's time. Its
first tiles are complete by then, and have been counted by its programs as they ended, so that programs that need no
other wait for their tile's count instead of the kernel's end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compute_worker.kernels.lora import wait_for_data

_EARLY_WARPS = 3200


def num_first_tiles(n_blocks: int, num_warps: int) -> int:
    """Base tiles to count for a kernel of so many programs a tile: about three rounds of programs on a large GPU."""
    return int(triton.cdiv(_EARLY_WARPS, num_warps * n_blocks))


@triton.jit
def count_tile(route, tile, first_tiles):
    """What this program has stored of a base tile is complete; counts it if the tile is one of the first."""
    if tile < first_tiles:
        tl.debug_barrier()
        tl.atomic_add(route.tile_done + tile, 1, sem="release", scope="gpu")


@triton.jit
def wait_for_tile(route, tile, first_tiles, programs, PDL: tl.constexpr):
    """Wait until a base tile is complete, which so many programs of the kernel before count; past the first tiles, and
    the last one that there is, until that kernel has ended."""
    counted = tile < first_tiles
    if counted:
        counted = tile < tl.load(route.header, cache_modifier=".cg")
    if counted:
        done = tl.atomic_add(route.tile_done + tile, 0, sem="acquire", scope="gpu")
        while done < programs:
            done = tl.atomic_add(route.tile_done + tile, 0, sem="acquire", scope="gpu")
    else:
        wait_for_data(PDL)
