"""LoRA deltas of linear maps and embeddings outside the routed experts, row by row, for batches of few rows.

Each row may use another adapter. A table holds, for every (adapter slot, module), the device addresses of A and B, the
lora rank and the scale; kernels read it when they run, so a captured CUDA graph serves what the table holds then. Two
launches a module: the shrink A x, its sum over I cut into parts of fixed length, and the expand, which sums the parts
in their order, multiplies by B and the scale, and adds to y. All arithmetic is fp32, with one rounding to y's dtype,
and a row's bits depend on nothing but the row.

Legend: T rows, I input and O output features, r lora rank, P parts of I, V rows of an embedding, D its width.

Example: I = 2048: parts of 256, P = 8; I = 10000: parts of 512, P = 20.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl

from compute_worker.kernels.lora import aligned_pointer

MAX_LORA_RANK = 512
_MAX_PARTS = 32
_BLOCK_K = 256
_BLOCK_R = 16


class Pair(Protocol):
    """An adapter's pair for one module, on the table's device: delta = scale * B (A x)."""

    @property
    def a(self) -> torch.Tensor:
        """[r, I], contiguous."""

    @property
    def b(self) -> torch.Tensor:
        """[O, r], contiguous."""

    @property
    def scale(self) -> float:
        """Factor of the delta."""


class DensePointers(NamedTuple):
    """The device tensors, [num_slots, modules] each, as the kernels take them."""

    lora_rank: torch.Tensor
    """int32; 0: the adapter has no pair for the module."""
    a_address: torch.Tensor
    b_address: torch.Tensor
    scale: torch.Tensor


class DenseTable:
    """Addresses of the pairs of up to num_slots resident adapters for a model's dense modules."""

    def __init__(
        self, modules: Mapping[str, tuple[int, int]], num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """modules: path -> (in, out) features; (V, D) of an embedding. dtype: of every A and B."""
        self.modules = dict(modules)
        self.num_slots, self.dtype = num_slots, dtype
        self._index = {module: i for i, module in enumerate(self.modules)}
        shape = (num_slots, len(self.modules))
        self.pointers = DensePointers(
            lora_rank=torch.zeros(shape, dtype=torch.int32, device=device),
            a_address=torch.zeros(shape, dtype=torch.int64, device=device),
            b_address=torch.zeros(shape, dtype=torch.int64, device=device),
            scale=torch.zeros(shape, dtype=torch.float32, device=device),
        )
        self._owned: dict[int, Mapping[str, Pair]] = {}

    def index(self, module: str) -> int:
        """Column of a module. Raises ValueError if the table does not have it."""
        if module not in self._index:
            raise ValueError(f"unknown module {module!r}: the table has {len(self.modules)}, see DenseTable.modules")
        return self._index[module]

    def set_slot(self, adapter_slot: int, pairs: Mapping[str, Pair]) -> None:
        """Point adapter_slot at an adapter's pairs; ordered on the current stream like any other write, never waits.

        The table keeps the pairs alive until clear_slot or the next set_slot. Raises ValueError for a slot, module,
        shape, dtype or rank that does not fit, before anything changes.
        """
        self.set_rows(adapter_slot, pairs, self.rows_of(pairs))

    def rows_of(self, pairs: Mapping[str, Pair]) -> DensePointers:
        """What the table is to hold of an adapter, [modules] each, on the device once the current stream gets there.

        Any thread. Raises ValueError as set_slot does.
        """
        size = len(self.modules)
        lora_rank, a_address, b_address, scale = [0] * size, [0] * size, [0] * size, [0.0] * size
        for module, pair in pairs.items():
            column = self.index(module)
            self._check_pair(module, pair)
            lora_rank[column], scale[column] = pair.a.shape[0], pair.scale
            a_address[column], b_address[column] = pair.a.data_ptr(), pair.b.data_ptr()
        values = (lora_rank, a_address, b_address, scale)
        rows = [torch.tensor(value, dtype=own.dtype) for value, own in zip(values, self.pointers, strict=True)]
        device = self.pointers.scale.device
        if device.type == "cuda":
            # Pinned, or the copy would wait for the device; the allocator keeps the row until the copy is done.
            rows = [row.pin_memory().to(device, non_blocking=True) for row in rows]
        return DensePointers(*rows)

    def set_rows(self, adapter_slot: int, pairs: Mapping[str, Pair], rows: DensePointers) -> None:
        """The same as set_slot with what `rows_of` made of the pairs."""
        self._check_slot(adapter_slot)
        for target, row in zip(self.pointers, rows, strict=True):
            target[adapter_slot].copy_(row)
        self._owned[adapter_slot] = dict(pairs)

    def clear_slot(self, adapter_slot: int) -> None:
        """Make the slot an adapter without any pair, whose rows stay as they are."""
        self._check_slot(adapter_slot)
        self.pointers.lora_rank[adapter_slot].zero_()
        self._owned.pop(adapter_slot, None)

    def adapters(self) -> Mapping[int, Mapping[str, Pair]]:
        """Resident adapters by slot, for the reference implementation."""
        return dict(self._owned)

    def _check_slot(self, adapter_slot: int) -> None:
        if not 0 <= adapter_slot < self.num_slots:
            raise ValueError(f"adapter_slot must be 0..{self.num_slots - 1}, got {adapter_slot}")

    def _check_pair(self, module: str, pair: Pair) -> None:
        in_size, out_size = self.modules[module]
        rank, device = pair.a.shape[0], self.pointers.scale.device
        if tuple(pair.a.shape) != (rank, in_size) or tuple(pair.b.shape) != (out_size, rank):
            raise ValueError(
                f"{module}: expected A [r, {in_size}] and B [{out_size}, r], "
                f"got {tuple(pair.a.shape)} and {tuple(pair.b.shape)}"
            )
        if not 1 <= rank <= MAX_LORA_RANK:
            raise ValueError(f"{module}: lora rank must be 1..{MAX_LORA_RANK}, got {rank}")
        if pair.a.dtype != self.dtype or pair.b.dtype != self.dtype:
            raise ValueError(
                f"{module}: the table holds A and B of {self.dtype}, got {pair.a.dtype} and {pair.b.dtype}"
            )
        if pair.a.device != device or pair.b.device != device:
            raise ValueError(f"{module}: expected A and B on {device}, got {pair.a.device} and {pair.b.device}")
        if not (pair.a.is_contiguous() and pair.b.is_contiguous()):
            raise ValueError(f"{module}: A and B must be contiguous")


@triton.jit
def _shrink_part(x_row, a, h_row, lora_rank, start, K: tl.constexpr, PART_K: tl.constexpr, BLOCK_K: tl.constexpr,
                 BLOCK_R: tl.constexpr):  # fmt: skip
    """h_row[r] = sum over k in [start, start + PART_K) of x_row[k] * a[r, k], fp32."""
    r = tl.arange(0, BLOCK_R)
    for r0 in range(0, lora_rank, BLOCK_R):
        r_mask = (r0 + r) < lora_rank
        acc = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
        for k0 in tl.static_range(0, PART_K, BLOCK_K):
            k = start + k0 + tl.arange(0, BLOCK_K)
            x_K = tl.load(x_row + k, mask=k < K, other=0.0).to(tl.float32)
            a_ptrs = a + (r0 + r).to(tl.int64)[:, None] * K + k[None, :]
            a_RK = tl.load(a_ptrs, mask=r_mask[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)
            acc += a_RK * x_K[None, :]
        tl.store(h_row + r0 + r, tl.sum(acc, 1), mask=r_mask)


@triton.jit(do_not_specialize=["module", "num_modules", "num_slots"])
def _shrink_kernel(x_ptr, slot_ptr, h_ptr, table, module, num_modules, num_slots, x_stride, PAIR: tl.constexpr,
                   K: tl.constexpr, PART_K: tl.constexpr, MAX_RANK: tl.constexpr, BLOCK_K: tl.constexpr,
                   BLOCK_R: tl.constexpr):  # fmt: skip
    """h[t, p, r] of one row and one part of K; nothing for rows without a pair."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slot_ptr + row).to(tl.int32)
    present = (slot >= 0) & (slot < num_slots)
    record = slot * num_modules + module
    # All loads before the branch, so that they are in flight together.
    lora_rank = tl.load(table.lora_rank + record, mask=present, other=0)
    address = tl.load(table.a_address + record, mask=present, other=0)
    if lora_rank > 0:
        x_row = x_ptr + row * x_stride
        h_row = h_ptr + (row * tl.num_programs(1) + part) * MAX_RANK
        if (address % 16 == 0) & (K % 8 == 0):
            _shrink_part(x_row, aligned_pointer(address, PAIR), h_row, lora_rank, part * PART_K, K, PART_K, BLOCK_K,
                         BLOCK_R)  # fmt: skip
        else:
            _shrink_part(x_row, address.to(tl.pointer_type(PAIR)), h_row, lora_rank, part * PART_K, K, PART_K, BLOCK_K,
                         BLOCK_R)  # fmt: skip


@triton.jit
def _expand_row(h, b, n, n_mask, lora_rank, stride_p, stride_r, EMBEDDING: tl.constexpr, PARTS: tl.constexpr,
                BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr):  # fmt: skip
    """sum over r of h[r] * b[n, r], fp32 [BLOCK_N]; h[r] is summed over parts, or one column of A."""
    r = tl.arange(0, BLOCK_R)
    p = tl.arange(0, BLOCK_P)
    acc = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    for r0 in range(0, lora_rank, BLOCK_R):
        r_mask = (r0 + r) < lora_rank
        if EMBEDDING:
            h_R = tl.load(h + (r0 + r).to(tl.int64) * stride_r, mask=r_mask, other=0.0).to(tl.float32)
        else:
            h_ptrs = h + p[:, None] * stride_p + (r0 + r)[None, :]
            h_R = tl.sum(tl.load(h_ptrs, mask=(p < PARTS)[:, None] & r_mask[None, :], other=0.0), 0)
        b_ptrs = b + n.to(tl.int64)[:, None] * lora_rank + (r0 + r)[None, :]
        b_NR = tl.load(b_ptrs, mask=n_mask[:, None] & r_mask[None, :], other=0.0).to(tl.float32)
        acc += b_NR * h_R[None, :]
    return tl.sum(acc, 1)


@triton.jit(do_not_specialize=["module", "num_modules", "num_slots"])
def _expand_kernel(source_ptr, slot_ptr, y_ptr, table, module, num_modules, num_slots, y_stride, PAIR: tl.constexpr,
                   IN_SIZE: tl.constexpr, OUT_SIZE: tl.constexpr, EMBEDDING: tl.constexpr, PARTS: tl.constexpr,
                   MAX_RANK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
                   BLOCK_R: tl.constexpr):  # fmt: skip
    """y[t, n] += scale * sum over r of h[t, r] * B[n, r] for BLOCK_N columns of one row.

    source: the shrink's parts [T, P, MAX_RANK] or, of an embedding, the ids [T]. A slot that the table does not have
    gives NaN rather than a base answer; a row without a pair is not written.
    """
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n < OUT_SIZE
    slot = tl.load(slot_ptr + row).to(tl.int32)
    y_ptrs = y_ptr + row * y_stride + n
    if slot >= num_slots:
        nan = tl.full([BLOCK_N], float("nan"), tl.float32)
        tl.store(y_ptrs, nan.to(y_ptr.dtype.element_ty), mask=n_mask)
    present = (slot >= 0) & (slot < num_slots)
    record = slot * num_modules + module
    lora_rank = tl.load(table.lora_rank + record, mask=present, other=0)
    address = tl.load(table.b_address + record, mask=present, other=0)
    scale = tl.load(table.scale + record, mask=present, other=0.0)
    if lora_rank > 0:
        if EMBEDDING:
            h = tl.load(table.a_address + record).to(tl.pointer_type(PAIR)) + tl.load(source_ptr + row)
        else:
            h = source_ptr + row * (PARTS * MAX_RANK)
        if (lora_rank % 8 == 0) & (address % 16 == 0):
            delta = _expand_row(h, aligned_pointer(address, PAIR), n, n_mask, (lora_rank // 8) * 8, MAX_RANK, IN_SIZE,
                                EMBEDDING, PARTS, BLOCK_P, BLOCK_N, BLOCK_R)  # fmt: skip
        else:
            delta = _expand_row(h, address.to(tl.pointer_type(PAIR)), n, n_mask, lora_rank, MAX_RANK, IN_SIZE,
                                EMBEDDING, PARTS, BLOCK_P, BLOCK_N, BLOCK_R)  # fmt: skip
        y = tl.load(y_ptrs, mask=n_mask, other=0.0).to(tl.float32) + scale * delta
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=n_mask)


_TRITON_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def _check_rows(table: DenseTable, module: str, y: torch.Tensor, slot_T: torch.Tensor) -> tuple[int, int]:
    """(in, out) of the module, after checking what its kernels are given."""
    in_size, out_size = table.modules[module]
    if y.dim() != 2 or y.shape[1] != out_size or y.stride(1) != 1:
        raise ValueError(f"{module}: expected y of contiguous rows [T, {out_size}], got {tuple(y.shape)}")
    if tuple(slot_T.shape) != (y.shape[0],) or not slot_T.is_contiguous() or slot_T.dtype.is_floating_point:
        raise ValueError(
            f"adapter_slot_T: expected contiguous int [{y.shape[0]}], got {slot_T.dtype} {tuple(slot_T.shape)}"
        )
    return in_size, out_size


def _expand(table: DenseTable, module: str, source: torch.Tensor, y: torch.Tensor, slot_T: torch.Tensor,
            parts: int) -> None:  # fmt: skip
    in_size, out_size = table.modules[module]
    block_n = min(256, max(16, triton.next_power_of_2(out_size)))
    _expand_kernel[(y.shape[0], triton.cdiv(out_size, block_n))](
        source, slot_T, y, table.pointers, table.index(module), len(table.modules), table.num_slots, y.stride(0),
        PAIR=_TRITON_DTYPE[table.dtype], IN_SIZE=in_size, OUT_SIZE=out_size, EMBEDDING=parts == 0, PARTS=parts,
        MAX_RANK=MAX_LORA_RANK, BLOCK_P=triton.next_power_of_2(max(parts, 1)), BLOCK_N=block_n, BLOCK_R=_BLOCK_R,
        num_warps=4,
    )  # fmt: skip


def add_delta(
    table: DenseTable, module: str, x_TI: torch.Tensor, y_TO: torch.Tensor, adapter_slot_T: torch.Tensor
) -> None:
    """Adds each row's delta to y = linear(x), in place; launches only, never waits.

    Semantics: y[t] += scale * B (A x[t]) with the pair of (adapter_slot[t], module); products and sums fp32, one
    rounding of the sum to y's dtype. Rows of slot -1, and of adapters without a pair for the module, are not written.

    Args:
        table: where the pairs are.
        module: path.
        x_TI: [T, I], float of any kind, contiguous rows at any stride.
        y_TO: [T, O], the same; may be another dtype than x.
        adapter_slot_T: int32 or int64 [T], -1 without an adapter; a slot that the table does not have gives NaN.

    Raises:
        ValueError: unknown module, or a shape or stride does not fit.
    """
    table.index(module)
    in_size, _ = _check_rows(table, module, y_TO, adapter_slot_T)
    tokens = y_TO.shape[0]
    if tuple(x_TI.shape) != (tokens, in_size) or x_TI.stride(1) != 1:
        raise ValueError(f"{module}: expected x of contiguous rows {(tokens, in_size)}, got {tuple(x_TI.shape)}")
    if tokens == 0:
        return
    part_k = triton.cdiv(triton.cdiv(in_size, _MAX_PARTS), _BLOCK_K) * _BLOCK_K
    parts = triton.cdiv(in_size, part_k)
    h_TPR = torch.empty((tokens, parts, MAX_LORA_RANK), dtype=torch.float32, device=x_TI.device)
    _shrink_kernel[(tokens, parts)](
        x_TI, adapter_slot_T, h_TPR, table.pointers, table.index(module), len(table.modules), table.num_slots,
        x_TI.stride(0), PAIR=_TRITON_DTYPE[table.dtype], K=in_size, PART_K=part_k, MAX_RANK=MAX_LORA_RANK,
        BLOCK_K=_BLOCK_K, BLOCK_R=_BLOCK_R, num_warps=4,
    )  # fmt: skip
    _expand(table, module, h_TPR, y_TO, adapter_slot_T, parts)


def add_embedding_delta(
    table: DenseTable, module: str, ids_T: torch.Tensor, y_TD: torch.Tensor, adapter_slot_T: torch.Tensor
) -> None:
    """Adds each row's delta to y = embedding(ids), in place; launches only, never waits.

    Semantics: y[t] += scale * B A[:, ids[t]] with the pair of (adapter_slot[t], module); else as add_delta.

    Args:
        table: where the pairs are; A is [r, V], B is [D, r].
        module: path.
        ids_T: int32 or int64 [T], contiguous, each in 0..V - 1.
        y_TD: [T, D], contiguous rows at any stride.
        adapter_slot_T: as in add_delta.

    Raises:
        ValueError: unknown module, or a shape or stride does not fit.
    """
    table.index(module)
    _check_rows(table, module, y_TD, adapter_slot_T)
    if ids_T.shape != adapter_slot_T.shape or not ids_T.is_contiguous() or ids_T.dtype.is_floating_point:
        raise ValueError(f"ids_T: expected contiguous int [{y_TD.shape[0]}], got {ids_T.dtype} {tuple(ids_T.shape)}")
    if y_TD.shape[0]:
        _expand(table, module, ids_T, y_TD, adapter_slot_T, 0)


def add_delta_reference(
    table: DenseTable, module: str, x_TI: torch.Tensor, y_TO: torch.Tensor, adapter_slot_T: torch.Tensor
) -> torch.Tensor:
    """What add_delta leaves in y_TO, before the rounding: fp32 [T, O], row by row."""
    out_TO = y_TO.to(torch.float32, copy=True)
    for t, slot in enumerate(adapter_slot_T.tolist()):
        pair = table.adapters().get(slot, {}).get(module)
        if pair is not None:
            out_TO[t] += pair.scale * (pair.b.float() @ (pair.a.float() @ x_TI[t].float()))
        if slot >= table.num_slots:
            out_TO[t] = torch.nan
    return out_TO
