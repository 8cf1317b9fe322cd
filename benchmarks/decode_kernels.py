"""Check, then time, the small kernels of a decode step on this GPU, each beside the torch ops that it stands for.

    python -m benchmarks.decode_kernels --out benchmarks/results/decode_kernels.json

Sizes are those of one layer of Qwen3-30B-A3B with 64 sequences. Times are medians over replays of a CUDA graph of
several calls on data of their own. The floor is the bytes that must move over the copy rate of one H200. A cell whose
error is over its limit gets no times.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton

from benchmarks.command_line import need_cuda
from benchmarks.kernel_layer import COPY_BYTES_PER_SECOND, graph_us
from compute_worker.dense_lora import DensePair
from compute_worker.kernels.decode_attention import decode_attention, decode_attention_reference
from compute_worker.kernels.dense_lora import DenseTable, add_delta, add_delta_reference
from compute_worker.kernels.rms_norm import rms_norm, rms_norm_reference
from compute_worker.kernels.rotary import rotary, rotary_reference

_DEVICE, _DTYPE = torch.device("cuda"), torch.bfloat16
_TOKENS, _HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK, _ADAPTERS = 64, 32, 4, 128, 16, 8
_CALLS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One comparison.

    Attributes:
        name: kernel and sizes.
        ours: calls of the kernel, each on its own data.
        theirs: the same work in torch ops.
        num_bytes: that one call must move.
        error: of the first call against its reference.
        max_error: that error may have.
    """

    name: str
    ours: Sequence[Callable[[], object]]
    theirs: Sequence[Callable[[], object]]
    num_bytes: int
    error: Callable[[], float]
    max_error: float


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=_DTYPE, device=_DEVICE)


def _relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.float() - expected.float()).norm() / expected.float().norm())


def attention_cell(name: str, sequences: int, longest: int, kv_lens: Sequence[int]) -> Cell:
    """kv_lens positions of each sequence; tables as wide as `longest` positions, blocks spread over the cache."""
    width = -(-longest // _BLOCK)
    num_blocks = 2 * width * sequences
    k_cache, v_cache = (_random(num_blocks * _BLOCK, _KV_HEADS, _HEAD_DIM) for _ in range(2))
    kv_len_S = torch.tensor(kv_lens, dtype=torch.int32, device=_DEVICE)
    scaling = _HEAD_DIM**-0.5
    context = max(kv_lens)
    position_C = torch.arange(context, device=_DEVICE)
    mask = (position_C < kv_len_S[:, None])[:, None, None]
    ours, theirs, errors = [], [], []
    for _ in range(4):
        q = _random(sequences, _HEADS, _HEAD_DIM)
        table = torch.randperm(num_blocks, device=_DEVICE)[: width * sequences].view(sequences, width).to(torch.int32)
        slot_SC = (table.long()[:, position_C // _BLOCK]) * _BLOCK + position_C % _BLOCK
        given = (q, k_cache, v_cache, table, kv_len_S)

        def ours_call(given: tuple[torch.Tensor, ...] = given) -> torch.Tensor:
            return decode_attention(*given, block_size=_BLOCK, scaling=scaling)

        def gather_and_attend(q: torch.Tensor = q, slot_SC: torch.Tensor = slot_SC) -> torch.Tensor:
            k, v = k_cache[slot_SC].transpose(1, 2), v_cache[slot_SC].transpose(1, 2)
            grouped = q.view(sequences, _KV_HEADS, -1, _HEAD_DIM)
            return F.scaled_dot_product_attention(
                grouped, k, v, attn_mask=mask.expand(-1, -1, grouped.shape[2], -1), scale=scaling
            )

        def error(given: tuple[torch.Tensor, ...] = given) -> float:
            expected = decode_attention_reference(*given, block_size=_BLOCK, scaling=scaling)
            return _relative_error(decode_attention(*given, block_size=_BLOCK, scaling=scaling), expected)

        ours.append(ours_call)
        theirs.append(gather_and_attend)
        errors.append(error)
    num_bytes = 2 * _KV_HEADS * _HEAD_DIM * 2 * sum(kv_lens)
    return Cell(name=name, ours=ours, theirs=theirs, num_bytes=num_bytes, error=errors[0], max_error=1e-2)


def lora_cell(name: str, in_size: int, out_size: int, rank: int, tokens: int) -> Cell:
    """`tokens` rows over eight adapters in turn, several modules of one table."""
    modules = {f"{name}.{i}": (in_size, out_size) for i in range(_CALLS)}
    table = DenseTable(modules, _ADAPTERS, _DTYPE, _DEVICE)
    for slot in range(_ADAPTERS):
        table.set_slot(
            slot, {m: DensePair(a=_random(rank, in_size), b=_random(out_size, rank), scale=1 / rank) for m in modules}
        )
    x = _random(tokens, in_size) / in_size**0.5
    slot_T = torch.arange(tokens, device=_DEVICE, dtype=torch.int32) % _ADAPTERS
    rows = [(slot_T == slot).nonzero().flatten() for slot in range(_ADAPTERS)]
    results = {module: _random(tokens, out_size) for module in modules}

    def by_adapter(module: str) -> None:
        y = results[module]
        for slot, row in enumerate(rows):
            pair = table.adapters()[slot][module]
            y.index_copy_(0, row, torch.addmm(y[row], x[row] @ pair.a.t(), pair.b.t(), alpha=pair.scale))

    def error() -> float:
        module, y = next(iter(results.items()))
        before, expected = y.float(), add_delta_reference(table, module, x, y, slot_T)
        add_delta(table, module, x, y, slot_T)
        return _relative_error(y - before, expected - before)

    distinct = min(tokens, _ADAPTERS)
    return Cell(
        name=name,
        ours=[partial(add_delta, table, m, x, results[m], slot_T) for m in modules],
        theirs=[partial(by_adapter, m) for m in modules],
        num_bytes=2 * (distinct * rank * (in_size + out_size) + tokens * (in_size + 2 * out_size)),
        error=error,
        max_error=2e-2,
    )


def norm_cell(name: str, *shape: int) -> Cell:
    """RMS norm of rows of the last dim."""
    rows, weight = [_random(*shape) for _ in range(_CALLS)], _random(shape[-1])
    return Cell(
        name=name,
        ours=[partial(rms_norm, x, weight, 1e-6) for x in rows],
        theirs=[partial(rms_norm_reference, x, weight, 1e-6) for x in rows],
        num_bytes=4 * rows[0].numel(),
        error=lambda: _relative_error(rms_norm(rows[0], weight, 1e-6), rms_norm_reference(rows[0], weight, 1e-6)),
        max_error=1e-3,  # one result in a hundred may be the next number
    )


def rotary_cell(name: str) -> Cell:
    """Rotary embedding of a layer's queries and keys."""
    given = [
        (
            _random(1, _TOKENS, _HEADS, _HEAD_DIM).transpose(1, 2),
            _random(1, _TOKENS, _KV_HEADS, _HEAD_DIM).transpose(1, 2),
            _random(1, _TOKENS, _HEAD_DIM),
            _random(1, _TOKENS, _HEAD_DIM),
        )
        for _ in range(_CALLS)
    ]

    def error() -> float:
        ours, theirs = rotary(*given[0]), rotary_reference(*given[0])
        return max(_relative_error(a, b) for a, b in zip(ours, theirs, strict=True))

    return Cell(
        name=name,
        ours=[partial(rotary, *g) for g in given],
        theirs=[partial(rotary_reference, *g) for g in given],
        num_bytes=4 * _TOKENS * (_HEADS + _KV_HEADS) * _HEAD_DIM,
        error=error,
        max_error=0.0,
    )


def cells() -> Iterator[Cell]:
    """All cells, one after another, so that each one's data is gone before the next one's is made."""
    g = torch.Generator().manual_seed(0)
    mixed = torch.randint(1, 4097, (_TOKENS,), generator=g).tolist()
    yield attention_cell("decode_attention 64 sequences to 4096", _TOKENS, 4096, mixed)
    yield attention_cell("decode_attention 64 sequences of 512", _TOKENS, 1024, [512] * _TOKENS)
    yield attention_cell("decode_attention 64 sequences of 128, table of 4096", _TOKENS, 4096, [128] * _TOKENS)
    yield attention_cell("decode_attention 1 sequence of 4096", 1, 4096, [4096])
    yield lora_cell("dense_lora q 2048 to 4096, rank 16", 2048, 4096, 16, _TOKENS)
    yield lora_cell("dense_lora k 2048 to 512, rank 16", 2048, 512, 16, _TOKENS)
    yield lora_cell("dense_lora o 4096 to 2048, rank 16", 4096, 2048, 16, _TOKENS)
    yield lora_cell("dense_lora router 2048 to 128, rank 16", 2048, 128, 16, _TOKENS)
    yield lora_cell("dense_lora q 2048 to 4096, rank 64", 2048, 4096, 64, _TOKENS)
    yield lora_cell("dense_lora q 2048 to 4096, rank 16, 1 row", 2048, 4096, 16, 1)
    yield norm_cell("rms_norm 64 x 2048", _TOKENS, 2048)
    yield norm_cell("rms_norm 64 x 32 x 128", _TOKENS, _HEADS, _HEAD_DIM)
    yield rotary_cell("rotary 64 tokens, 32 + 4 heads of 128")


def measure(cell: Cell, replays: int) -> dict[str, Any]:
    """Error, then times in microseconds; torch's ops are timed in the same way."""
    error = cell.error()
    result: dict[str, Any] = {"name": cell.name, "error": error, "us": None, "torch_us": None}
    result["floor_us"] = 1e6 * cell.num_bytes / COPY_BYTES_PER_SECOND
    if error <= cell.max_error:
        result["us"], result["torch_us"] = graph_us(cell.ours, replays), graph_us(cell.theirs, replays)
    return result


def main() -> None:
    """Measures all cells; the file is written at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/decode_kernels.json"))
    parser.add_argument("--replays", type=int, default=50)
    args = parser.parse_args()
    need_cuda(parser)
    start, results = time.monotonic(), []
    for cell in cells():
        result = measure(cell, args.replays)
        results.append(result)
        print(json.dumps(result), f"t={time.monotonic() - start:.0f}", flush=True)
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    report = {"hardware": torch.cuda.get_device_name(), "versions": versions, "cells": results}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
