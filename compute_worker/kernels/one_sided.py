"""Rows written straight into the memory of other GPUs of the host: one launch there, one launch back.

Every rank has a region of one size, which all ranks can write to; a table on each device has their addresses. At its
start are flags: word [rank, program] is written by that rank's program alone. Both kernels write to the peers, raise
the flags of the same program there, and wait until the peers have raised theirs here. So program i waits for programs i
only, and all of them have to run at once: there are at most MAX_PROGRAMS, and no more than a GPU has room for.

A flag's value is how often its program has been launched, so nothing is ever set back, and a replayed graph goes on
counting. All ranks launch the same kernels on the same numbers of rows in the same order.

Why nothing is overwritten that a peer still reads: what dispatch writes is read until the peer's combine, for whose
flags this rank waits before its next dispatch; what combine writes is read by the peer's combine itself, and the peer
raises the flags of its next dispatch, which this rank waits for before its next combine, after that.

Legend: T tokens of this rank, M rows of every rank, G ranks, N = G * M, K experts a token, X extras, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MAX_PROGRAMS = 256


@triton.jit
def _signal(table_ptr, turn, RANK: tl.constexpr, RANKS: tl.constexpr, MAX: tl.constexpr):
    """Tells the same program of every other rank that this one has written."""
    # The flag follows the writes of all threads, not just of the one that raises it.
    tl.debug_barrier()
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            flags = tl.load(table_ptr + peer).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(flags + RANK * MAX + tl.program_id(0), turn, sem="release", scope="sys")


@triton.jit
def _wait(table_ptr, turn, RANK: tl.constexpr, RANKS: tl.constexpr, MAX: tl.constexpr):
    """Waits for the same program of every other rank."""
    flags = tl.load(table_ptr + RANK).to(tl.pointer_type(tl.int32))
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            # The difference stays right when the count passes the largest int32.
            while tl.atomic_add(flags + peer * MAX + tl.program_id(0), 0, sem="acquire", scope="sys") - turn < 0:
                pass
    tl.debug_barrier()


@triton.jit
def _needs(expert, first_ptr, end_ptr, rank):
    """Whether any of a token's experts is on a rank."""
    here = (expert >= tl.load(first_ptr + rank)) & (expert < tl.load(end_ptr + rank))
    return tl.max(here.to(tl.int32), axis=0) > 0


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def dispatch_kernel(x_ptr, weight_ptr, expert_ptr, extra_ptr, first_ptr, end_ptr, table_ptr, turn_ptr, num_tokens,
                    num_rows, x_stride, x_at, slot_at, weight_at, extra_at, RANK: tl.constexpr, RANKS: tl.constexpr,
                    X_WORDS: tl.constexpr, K: tl.constexpr, X: tl.constexpr, SMALL: tl.constexpr,
                    BLOCK: tl.constexpr, MAX: tl.constexpr):  # fmt: skip
    """See send_tokens."""
    BLOCKS: tl.constexpr = (X_WORDS + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    turn = tl.load(turn_ptr + program) + 1
    k = tl.arange(0, SMALL)
    for task in range(program, num_rows * BLOCKS, tl.num_programs(0)):
        row = tl.cast(task // BLOCKS, tl.int64)
        block = task % BLOCKS
        is_token = row < num_tokens
        word = block * BLOCK + tl.arange(0, BLOCK)
        inside = (word < X_WORDS) & is_token
        x = tl.load(x_ptr + row * x_stride + word, mask=inside, other=0)
        expert = tl.load(expert_ptr + row * K + k, mask=(k < K) & is_token, other=-1).to(tl.int64)
        # What goes with a token is sent with its first block.
        with_first = (k < K) & (block == 0)
        weight = tl.load(weight_ptr + row * K + k, mask=with_first & is_token, other=0.0).to(tl.float32)
        # Before the stores, which it would wait for.
        if X > 0:
            extra = tl.load(extra_ptr + row * X + k, mask=(k < X) & (block == 0) & is_token, other=-1).to(tl.int32)
        place = row + RANK * num_rows
        for peer in tl.static_range(RANKS):
            region, first = tl.load(table_ptr + peer), tl.load(first_ptr + peer)
            here = (expert >= first) & (expert < tl.load(end_ptr + peer))
            needed = tl.max(here.to(tl.int32), axis=0) > 0
            x_out = tl.multiple_of((region + x_at).to(tl.pointer_type(tl.int32)), 16)
            tl.store(x_out + place * X_WORDS + word, x, mask=inside & needed)
            slot_out = tl.multiple_of((region + slot_at).to(tl.pointer_type(tl.int64)), 16)
            tl.store(slot_out + place * K + k, tl.where(here, expert - first, -1), mask=with_first)
            weight_out = tl.multiple_of((region + weight_at).to(tl.pointer_type(tl.float32)), 16)
            tl.store(weight_out + place * K + k, weight, mask=with_first)
            if X > 0:
                extra_out = tl.multiple_of((region + extra_at).to(tl.pointer_type(tl.int32)), 16)
                extra_places = k * (RANKS * num_rows).to(tl.int64) + place
                tl.store(extra_out + extra_places, extra, mask=(k < X) & (block == 0))
    _signal(table_ptr, turn, RANK, RANKS, MAX)
    _wait(table_ptr, turn, RANK, RANKS, MAX)
    tl.store(turn_ptr + program, turn)


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def combine_kernel(y_ptr, slot_ptr, expert_ptr, first_ptr, end_ptr, table_ptr, turn_ptr, out_ptr, num_tokens, num_rows,
                   part_at, RANK: tl.constexpr, RANKS: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
                   SMALL: tl.constexpr, BLOCK: tl.constexpr, MAX: tl.constexpr):  # fmt: skip
    """See send_parts."""
    BLOCKS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    turn = tl.load(turn_ptr + program) + 1
    k = tl.arange(0, SMALL)
    for task in range(program, num_rows * BLOCKS, tl.num_programs(0)):
        row = tl.cast(task // BLOCKS, tl.int64)
        d = (task % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                place = row + peer * num_rows
                part = tl.load(y_ptr + place * D + d, mask=d < D, other=0.0)
                slot = tl.load(slot_ptr + place * K + k, mask=k < K, other=-1)
                part_out = (tl.load(table_ptr + peer) + part_at).to(tl.pointer_type(y_ptr.dtype.element_ty))
                part_out = tl.multiple_of(part_out, 16)
                # A row without an expert here adds nothing.
                needed = tl.max(slot, axis=0) >= 0
                tl.store(part_out + (row + RANK * num_rows) * D + d, part, mask=(d < D) & needed)
    _signal(table_ptr, turn, RANK, RANKS, MAX)
    _wait(table_ptr, turn, RANK, RANKS, MAX)
    part_in = (tl.load(table_ptr + RANK) + part_at).to(tl.pointer_type(y_ptr.dtype.element_ty))
    part_in = tl.multiple_of(part_in, 16)
    for task in range(program, num_tokens * BLOCKS, tl.num_programs(0)):
        row = tl.cast(task // BLOCKS, tl.int64)
        d = (task % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        expert = tl.load(expert_ptr + row * K + k, mask=k < K, other=-1).to(tl.int64)
        total = tl.zeros((BLOCK,), tl.float32)
        for rank in tl.static_range(RANKS):
            inside = (d < D) & _needs(expert, first_ptr, end_ptr, rank)
            place = row + rank * num_rows
            if rank == RANK:
                part = tl.load(y_ptr + place * D + d, mask=inside, other=0.0)
            else:
                # Not from the first cache, which does not see what others write.
                part = tl.load(part_in + place * D + d, mask=inside, other=0.0, cache_modifier=".cg")
            total += part.to(tl.float32)
        tl.store(out_ptr + row * D + d, total.to(out_ptr.dtype.element_ty), mask=d < D)
    tl.store(turn_ptr + program, turn)


@dataclass(frozen=True, kw_only=True, slots=True)
class Peers:
    """What the kernels know of the ranks.

    Attributes:
        rank: this one, of 0 to num_ranks - 1.
        num_ranks: G.
        table_G: int64; address of each rank's region, as this device sees it; multiples of 16.
        turn_P: int32 [MAX_PROGRAMS], of this rank alone; 0 before the first launch.
    """

    rank: int
    num_ranks: int
    table_G: torch.Tensor
    turn_P: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """How the work is divided; the same on every rank.

    Attributes:
        block_bytes: of a row that a program takes at a time, at most; a power of two.
        warps: of a program.
        max_programs: of a launch.
    """

    block_bytes: int = 8192
    warps: int = 8
    max_programs: int = MAX_PROGRAMS

    def block(self, row_bytes: int) -> int:
        """Bytes of a block of such rows."""
        return int(min(self.block_bytes, triton.next_power_of_2(row_bytes)))

    def programs(self, num_rows: int, row_bytes: int) -> int:
        """Programs of a launch."""
        num_blocks = num_rows * -(-row_bytes // self.block(row_bytes))
        if num_blocks > self.max_programs:
            return self.max_programs
        # Each program has flags to raise and to wait for, which takes longer than a second block.
        return min(num_blocks, max(self.max_programs // 2, 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Areas:
    """Bytes from a region's start to each of its parts; multiples of 16.

    Attributes:
        x: hidden states [N, D].
        slot: int64 [N, K].
        weight: float32 [N, K].
        extra: int32 [X, N].
        part: partial results [N, D].
    """

    x: int
    slot: int
    weight: int
    extra: int
    part: int


def send_tokens(
    peers: Peers,
    areas: Areas,
    tiles: Tiles,
    *,
    x_TD: torch.Tensor,
    weight_TK: torch.Tensor,
    expert_TK: torch.Tensor,
    extra_TX: torch.Tensor,
    first_G: torch.Tensor,
    end_G: torch.Tensor,
    num_rows: int,
) -> None:
    """Writes tokens into the regions of all ranks, row rank * M + t for token t, and waits for the others' tokens.

    Semantics: on rank g: slot[n, k] = expert[t, k] - first[g] if first[g] <= expert[t, k] < end[g], else -1;
    x[n] = x[t] if some slot[n, k] >= 0, else as it was. Rows of padding, t >= T, hold slots and extras -1.

    Args:
        peers: the ranks.
        areas: where the parts are.
        tiles: see Tiles.
        x_TD: rows of whole words of 4 bytes, each contiguous.
        weight_TK: any float type, contiguous.
        expert_TK: int32 or int64, contiguous; -1 for none.
        extra_TX: int32 or int64, contiguous.
        first_G: int64; first expert of each rank.
        end_G: int64; expert after the last one of each.
        num_rows: M >= T, the same on all ranks, at least 1.
    """
    x_words = x_TD.view(torch.int32)
    top_k, num_extras = expert_TK.shape[1], extra_TX.shape[1]
    if x_TD.shape[0] > num_rows or expert_TK.shape[0] != x_TD.shape[0]:
        raise ValueError(f"x {tuple(x_TD.shape)}, experts {tuple(expert_TK.shape)}, expected at most {num_rows} tokens")
    dispatch_kernel[(tiles.programs(num_rows, x_words.shape[1] * 4),)](
        x_words, weight_TK, expert_TK, extra_TX, first_G, end_G, peers.table_G, peers.turn_P, x_TD.shape[0], num_rows,
        x_words.stride(0), areas.x, areas.slot, areas.weight, areas.extra, RANK=peers.rank, RANKS=peers.num_ranks,
        X_WORDS=x_words.shape[1], K=top_k, X=num_extras, SMALL=triton.next_power_of_2(max(top_k, num_extras, 1)),
        BLOCK=tiles.block(x_words.shape[1] * 4) // 4, MAX=MAX_PROGRAMS, num_warps=tiles.warps,
    )  # fmt: skip


def send_parts(
    peers: Peers,
    areas: Areas,
    tiles: Tiles,
    *,
    y_ND: torch.Tensor,
    slot_NK: torch.Tensor,
    expert_TK: torch.Tensor,
    first_G: torch.Tensor,
    end_G: torch.Tensor,
    num_rows: int,
) -> torch.Tensor:
    """Brings the parts of all ranks home and adds them in order of rank, in float32; y_TD in the dtype of y.

    Semantics: y[t] = sum over ranks g that hold one of t's experts of y_g[rank * M + t].

    Args:
        peers: the ranks.
        areas: where the parts are.
        tiles: those of send_tokens.
        y_ND: this rank's part of each token that arrived, contiguous.
        slot_NK: what send_tokens left here; read before any other rank may write there again.
        expert_TK: as send_tokens had it.
        first_G: likewise.
        end_G: likewise.
        num_rows: M.
    """
    num_tokens, top_k = expert_TK.shape
    width, item = y_ND.shape[1], y_ND.element_size()
    if y_ND.shape[0] != num_rows * peers.num_ranks:
        raise ValueError(f"y {tuple(y_ND.shape)}, expected {num_rows * peers.num_ranks} rows")
    out_TD = y_ND.new_empty((num_tokens, width))
    combine_kernel[(tiles.programs(num_rows, width * item),)](
        y_ND, slot_NK, expert_TK, first_G, end_G, peers.table_G, peers.turn_P, out_TD, num_tokens, num_rows, areas.part,
        RANK=peers.rank, RANKS=peers.num_ranks, D=width, K=top_k, SMALL=triton.next_power_of_2(top_k),
        BLOCK=tiles.block(width * item) // item, MAX=MAX_PROGRAMS, num_warps=tiles.warps,
    )  # fmt: skip
    return out_TD
