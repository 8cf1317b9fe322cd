"""The cells of the expert layer's benchmark: which there are, and how one is checked and timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.kernel_layer import SHAPES, Batch, Calls, Layer, floor_us, graphs_us, layer_calls, run_layer
from benchmarks.kernel_oracle import Adapters, layer_fp32
from compute_worker.kernels import AdapterTable, MoEConfig, choose_config

MAX_RELATIVE_ERROR = 1e-2
TOKENS = (1, 8, 32, 64, 256, 1024, 4096, 16384)
_PREFILL_TOKENS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One row of the results; lora_rank lists the ranks that the adapters take in turn."""

    tokens: int
    adapters: int
    lora_ranks: tuple[int, ...]
    half: bool

    @property
    def lora_rank(self) -> int | str:
        return self.lora_ranks[0] if len(self.lora_ranks) == 1 else "+".join(map(str, self.lora_ranks))

    @property
    def ranks(self) -> list[int]:
        return [self.lora_ranks[i % len(self.lora_ranks)] for i in range(self.adapters)]


def cells_of(tokens: int) -> Iterator[Cell]:
    """All cells of a token count, those that share adapters beside each other."""
    several = (1, 8) if tokens >= _PREFILL_TOKENS else (1, 8, 32, 64) if tokens == 256 else (1, 8, 32)
    for rank in (16, 64):
        for adapters in several:
            yield Cell(tokens=tokens, adapters=adapters, lora_ranks=(rank,), half=False)
            if adapters == 8 and tokens > 1:
                yield Cell(tokens=tokens, adapters=8, lora_ranks=(rank,), half=True)
    if 8 <= tokens <= _PREFILL_TOKENS:
        for ranks in ((8,), (8, 64)):
            yield Cell(tokens=tokens, adapters=8, lora_ranks=ranks, half=False)


def plan() -> list[tuple[str, int, int, int | str, bool]]:
    """(shape, tokens, adapters, lora rank, half) of every cell."""
    return [
        (shape, cell.tokens, cell.adapters, cell.lora_rank, cell.half)
        for shape in SHAPES
        for tokens in TOKENS
        for cell in cells_of(tokens)
    ]


def grouped_mm_layer(layer: Layer, batch: Batch, index: int) -> torch.Tensor:
    """The base layer by torch: sort rows by expert, two grouped products, unsort, weighted sum. All experts local."""
    weights, (num_tokens, top_k) = layer.weights[index % 2], batch.expert_TK.shape
    order = batch.expert_TK.flatten().argsort(stable=True)
    experts = torch.arange(weights.num_experts, device=order.device)
    ends = (batch.expert_TK.flatten() <= experts[:, None]).sum(1).to(torch.int32)
    x = batch.x_TD[order // top_k]
    gate, up = torch._grouped_mm(x, weights.gate_up_eND.transpose(1, 2), offs=ends).chunk(2, 1)
    y = torch._grouped_mm(torch.nn.functional.silu(gate) * up, weights.down_eDF.transpose(1, 2), offs=ends)
    out = torch.empty_like(y)
    out[order] = y
    weighted = out.view(num_tokens, top_k, -1) * batch.weight_TK[..., None].to(y.dtype)
    return weighted.sum(1)


class Bench:
    """Cells of one shape, sharing weights, routings and adapters.

    Args:
        layer: of the shape.
        ready: called with (tokens, largest rank or 0, config) before kernels are first launched.
    """

    def __init__(self, layer: Layer, ready: Callable[[int, int, MoEConfig], None]) -> None:
        self.layer, self._ready = layer, ready
        self._tables: tuple[tuple[int, ...], list[AdapterTable], dict[str, int]] = ((), [], {})
        self._base: dict[int, dict[str, Any]] = {}

    def config(self, tokens: int) -> MoEConfig:
        return choose_config(
            self.layer.weights[0], num_tokens=tokens, top_k=self.layer.shape.top_k,
            device_name=torch.cuda.get_device_name(),
        )  # fmt: skip

    def tables(self, ranks: Sequence[int]) -> list[AdapterTable]:
        """Tables of the last ranks asked for: 64 adapters of rank 64 are too many gigabytes to keep them all."""
        key = tuple(ranks)
        if self._tables[0] != key:
            self._tables = ((), [], {})
            before = torch.cuda.memory_allocated()
            tables = self.layer.tables(ranks)
            own = sum(p.a.nbytes + p.b.nbytes for t in tables for a in t.adapters().values() for p in a.values())
            memory = {"adapter_bytes": own, "allocated_bytes": torch.cuda.memory_allocated() - before}
            self._tables = (key, tables, memory)
        return self._tables[1]

    def batches(self, tokens: int, adapters: int, half: bool) -> list[Batch]:
        return self.layer.batches(num_tokens=tokens, num_adapters=adapters, half=half, seed=tokens)

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Check the cell, then time it; a cell over the error limit gets no times."""
        shape, config = self.layer.shape, self.config(cell.tokens)
        base = self.base(cell.tokens)
        batches = self.batches(cell.tokens, cell.adapters, cell.half)
        tables = self.tables(cell.ranks)
        self._ready(cell.tokens, max(cell.ranks), config)
        floor_lora_us, floor_pairs_us = (floor_us(shape, batches, cell.ranks, base=b) for b in (True, False))
        result: dict[str, Any] = {
            "shape": shape.name, "tokens": cell.tokens, "adapters": cell.adapters, "lora_rank": cell.lora_rank,
            "half": cell.half, "base_us": None, "lora_us": None, "floor_base_us": base["floor_us"],
            "floor_lora_us": floor_lora_us, "floor_pairs_us": floor_pairs_us, "base_rel_error": base["rel_error"],
        }  # fmt: skip
        result |= self._check(batches[0], tables, config, base["out"])
        if not (result["rel_error"] <= MAX_RELATIVE_ERROR and base["rel_error"] <= MAX_RELATIVE_ERROR):
            return result
        # In turn: a GPU that is warm from one cell is slower in the next, and what is compared is often a difference.
        calls = {"base_us": self._calls(cell.tokens, None), "lora_us": self._calls(cell.tokens, cell)}
        if cell.half:
            whole = replace(cell, half=False)
            calls |= {"base_half_us": self._calls(cell.tokens // 2, None),
                      "lora_half_us": self._calls(cell.tokens // 2, whole)}  # fmt: skip
        if shape.name == "c" and cell.tokens >= 1024:
            calls["grouped_mm_us"] = [partial(grouped_mm_layer, self.layer, b, i) for i, b in enumerate(batches)]
        result |= graphs_us(calls, _replays(cell.tokens))
        if len(cell.lora_ranks) > 1:
            result |= self._tables[2]
        return result

    def _calls(self, tokens: int, adapters: Cell | None) -> Calls:
        """A graph's calls of the base layer, or with the adapters of a cell, on a batch of so many tokens."""
        config = self.config(tokens)
        self._ready(tokens, max(adapters.ranks) if adapters else 0, config)
        if adapters is None:
            return layer_calls(self.layer, self.batches(tokens, 0, False), None, config)
        batches = self.batches(tokens, adapters.adapters, adapters.half)
        return layer_calls(self.layer, batches, self.tables(adapters.ranks), config)

    def base(self, tokens: int) -> dict[str, Any]:
        """Floor and checked output (of the first batch) of the base layer, computed once a token count."""
        if tokens not in self._base:
            config = self.config(tokens)
            self._ready(tokens, 0, config)
            batches = [b.base_only() for b in self.batches(tokens, 0, False)]
            out = run_layer(self.layer, batches[0], 0, None, config)
            error = _error(out, self._oracle(batches[0], None))
            floor = floor_us(self.layer.shape, batches, [])
            self._base[tokens] = {"rel_error": error, "floor_us": floor, "out": out}
        return self._base[tokens]

    def _oracle(self, batch: Batch, tables: Sequence[AdapterTable] | None) -> torch.Tensor:
        weights = self.layer.weights[0]
        adapters = None
        if tables:
            owned = tables[0].adapters()
            adapters = Adapters([owned[slot] for slot in sorted(owned)], weights.num_experts)
        return layer_fp32(batch, weights, adapters)

    def _check(
        self, batch: Batch, tables: Sequence[AdapterTable], config: MoEConfig, base_out: torch.Tensor
    ) -> dict[str, Any]:
        """Error against fp32, equality of base rows with the base run, equality of two runs."""
        lora, again = (run_layer(self.layer, batch, 0, tables, config) for _ in range(2))
        base_rows = batch.slot_T < 0
        return {
            "rel_error": _error(lora, self._oracle(batch, tables)),
            "base_rows_bit_equal": torch.equal(lora[base_rows], base_out[base_rows]),
            "runs_bit_equal": torch.equal(lora, again),
        }


def _error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.float() - expected).norm() / expected.norm().clamp(min=1e-30))


def _replays(tokens: int) -> int:
    return 15 if tokens <= 256 else 9 if tokens <= 4096 else 5
