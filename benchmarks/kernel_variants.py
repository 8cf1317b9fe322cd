"""Compare settings of the expert layer in one run, on the same cells, and keep the best of each token count.

    python -m benchmarks.kernel_variants --out variants.json --configs compute_worker/kernels/configs

Each setting is checked like a cell of `benchmarks.kernels` (error against fp32, base rows and repeated runs bit-equal)
on a batch in which half of the tokens have no adapter, then timed on one in which all have. The best has the smallest
geometric mean, over the base layer and all cells, of time over floor; it replaces the shipped setting in the file of
this GPU in --configs if it is better by more than MARGIN, which is what differs between two runs of the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.kernel_cells import MAX_RELATIVE_ERROR
from benchmarks.kernel_compile import CompileAhead, shape_weights
from benchmarks.kernel_layer import SHAPES, Layer, Shape, floor_us, layer_us, run_layer
from benchmarks.kernel_oracle import Adapters, layer_fp32
from compute_worker.kernels import AdapterTable, MoEConfig, choose_config
from compute_worker.kernels.config import shape_key, token_bucket

MARGIN = 0.01
TOKENS = {"a": (1, 8, 32, 64, 256, 1024, 4096, 16384), "b": (1, 64, 256, 1024, 4096), "c": (1, 64, 256, 1024, 4096)}
_SHIPPED = "shipped"
_NEW_FIELDS: dict[str, Any] = {"delta_columns": 0, "ask_for_b": False, "early_lookups": False}
"""Fields without effect on a layer without adapters."""


def variants(shape: Shape, tokens: int, device_name: str) -> dict[str, MoEConfig]:
    """Settings by name, the shipped one first."""

    def shipped(num_tokens: int) -> MoEConfig:
        return choose_config(shape_weights(shape), num_tokens=num_tokens, top_k=shape.top_k, device_name=device_name)

    first = replace(shipped(tokens), **_NEW_FIELDS)
    out = {_SHIPPED: first}
    if first.fused:
        for columns in (64, 32):
            listed = replace(first, delta_columns=columns)
            out[f"listed {columns}"] = listed
            out[f"listed {columns}, asks"] = replace(listed, ask_for_b=True)
        out["listed 64, asks, pdl"] = replace(out["listed 64, asks"], pdl=True)
        if tokens >= 4096 and first.pair_block_m < 64:
            out["listed 64, asks, pairs of 64"] = replace(out["listed 64, asks"], pair_block_m=64)
        return out
    if first.expand_down == "combine" and first.pdl:
        out["early"] = replace(first, early_lookups=True)
        if first.span > 1:
            out["early, span 1"] = replace(out["early"], span=1)
    # The activation's loads of B were two bytes wide when these were chosen.
    for span in {1, 2, 3} - {first.span}:
        out[f"span {span}"] = replace(first, span=span)
    if shape.name == "a" and tokens == 64:
        out["fused, listed 64, asks"] = replace(shipped(256), delta_columns=64, ask_for_b=True)
    return out


def cells_of(tokens: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(adapters, ranks that they take in turn), those in which the settings can differ."""
    yield from ((8, (16,)), (8, (64,)))
    if 1 < tokens <= 4096:
        yield 8, (8,)
        yield 8, (8, 64)
    if tokens in (256, 1024):
        yield from ((32, (16,)), (32, (64,)))
    if tokens == 256:
        yield from ((64, (16,)), (64, (64,)))


@dataclass(kw_only=True, slots=True)
class _Case:
    """One shape and token count."""

    layer: Layer
    tokens: int
    ready: Callable[[int, int, MoEConfig], str]
    _base: dict[MoEConfig, tuple[torch.Tensor, float]] = field(default_factory=dict)

    def base(self, config: MoEConfig) -> tuple[torch.Tensor, float]:
        """(output of the first batch, us) without adapters."""
        config = replace(config, **_NEW_FIELDS)
        if config not in self._base:
            batches = self.layer.batches(num_tokens=self.tokens, num_adapters=0, half=False, seed=self.tokens)
            out = run_layer(self.layer, batches[0].base_only(), 0, None, config)
            self._base[config] = out, layer_us(self.layer, batches, None, config, self._replays())
        return self._base[config]

    def floor(self, ranks: list[int]) -> float:
        batches = self.layer.batches(num_tokens=self.tokens, num_adapters=len(ranks), half=False, seed=self.tokens)
        if not ranks:
            batches = [batch.base_only() for batch in batches]
        return floor_us(self.layer.shape, batches, ranks)

    def measure(self, config: MoEConfig, ranks: list[int], tables: list[AdapterTable]) -> dict[str, Any]:
        """Times of one setting in one cell; `failed` instead of them where it may not be used."""
        for largest in (0, max(ranks)):
            if why := self.ready(self.tokens, largest, config):
                return {"failed": f"does not compile: {why}"}
        base_out, base_us = self.base(config)
        half = self.layer.batches(num_tokens=self.tokens, num_adapters=len(ranks), half=True, seed=self.tokens)[0]
        owned = tables[0].adapters()
        adapters = Adapters([owned[slot] for slot in sorted(owned)], self.layer.shape.num_experts)
        expected = layer_fp32(half, self.layer.weights[0], adapters)
        got, again = (run_layer(self.layer, half, 0, tables, config) for _ in range(2))
        error = float((got.float() - expected).norm() / expected.norm().clamp(min=1e-30))
        without = half.slot_T < 0
        result: dict[str, Any] = {"rel_error": error}
        if not error <= MAX_RELATIVE_ERROR:
            return result | {"failed": f"relative error {error:.1e}"}
        if not torch.equal(got[without], base_out[without]):
            return result | {"failed": "base rows differ from the base layer's"}
        if not torch.equal(got, again):
            return result | {"failed": "a second run differs"}
        full = self.layer.batches(num_tokens=self.tokens, num_adapters=len(ranks), half=False, seed=self.tokens)
        return result | {
            "base_us": base_us, "lora_us": layer_us(self.layer, full, tables, config, self._replays()),
        }  # fmt: skip

    def _replays(self) -> int:
        return 25 if self.tokens <= 256 else 13 if self.tokens <= 4096 else 7


def attempt(case: _Case, config: MoEConfig, ranks: list[int], tables: list[AdapterTable]) -> dict[str, Any]:
    """As `measure`; a setting that cannot be launched is an answer too."""
    try:
        return case.measure(config, ranks, tables)
    except Exception as error:
        torch.cuda.synchronize()  # raises if the GPU is of no use any more
        return {"failed": f"{type(error).__name__}: {error}"[:200]}


def compare(case: _Case, settings: dict[str, MoEConfig], recorded: dict[Any, float]) -> dict[str, Any]:
    """Every setting in every cell; prints a line a cell."""
    shape, tokens = case.layer.shape, case.tokens
    cells = []
    for num_adapters, in_turn in cells_of(tokens):
        ranks = [in_turn[i % len(in_turn)] for i in range(num_adapters)]
        tables = case.layer.tables(ranks)
        results = {name: attempt(case, config, ranks, tables) for name, config in settings.items()}
        name = "+".join(map(str, in_turn))
        before = recorded.get((shape.name, tokens, num_adapters, name))
        cells.append({
            "adapters": num_adapters, "lora_rank": name, "floor_us": case.floor(ranks), "recorded_us": before,
            "settings": results,
        })  # fmt: skip
        times = "; ".join(f"{n} {r['lora_us']:.1f}" if "lora_us" in r else f"{n} {r['failed']}"
                          for n, r in results.items())  # fmt: skip
        print(f"{shape.name} {tokens} n{num_adapters} r{name}: recorded {before or '-'}; {times}", flush=True)
        del tables
        torch.cuda.empty_cache()
    scores = {name: score(cells, name, case.floor([])) for name in settings}
    usable = {name: value for name, value in scores.items() if value is not None}
    best = min(usable, key=lambda name: usable[name]) if usable else None
    if best and _SHIPPED in usable and usable[best] > (1 - MARGIN) * usable[_SHIPPED]:
        best = _SHIPPED
    print(f"{shape.name} {tokens}: best {best}; scores {scores}", flush=True)
    return {"shape": shape.name, "tokens": tokens, "best": best, "scores": scores, "cells": cells}


def score(cells: list[dict[str, Any]], name: str, base_floor_us: float) -> float | None:
    """Geometric mean of time over floor, the base layer's included; None for a setting that failed anywhere."""
    results = [cell["settings"][name] for cell in cells]
    if any("failed" in result for result in results):
        return None
    ratios = [result["lora_us"] / cell["floor_us"] for result, cell in zip(results, cells, strict=True)]
    return statistics.geometric_mean([results[0]["base_us"] / base_floor_us, *ratios])


def keep(path: Path, shape: Shape, tokens: int, config: MoEConfig) -> None:
    """Put a setting into the file of this GPU."""
    shipped = json.loads(path.read_text()) if path.exists() else {}
    buckets = shipped.setdefault(shape_key(shape_weights(shape), shape.top_k), {})
    buckets[str(token_bucket(tokens))] = config.to_dict()
    path.write_text(json.dumps(shipped, indent=1) + "\n")


def _recorded(path: Path) -> dict[Any, float]:
    cells = json.loads(path.read_text())["cells"] if path.exists() else []
    return {
        (c["shape"], c["tokens"], c["adapters"], str(c["lora_rank"])): round(c["lora_us"], 1)
        for c in cells
        if c["lora_us"] and not c["half"]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--configs", type=Path, help="folder whose file of this GPU takes the best settings")
    parser.add_argument("--recorded", type=Path, default=Path("benchmarks/results/kernels.json"))
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=list(SHAPES))
    parser.add_argument("--tokens", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting new token counts after this long")
    parser.add_argument("--compile-processes", type=int, default=12)
    args = parser.parse_args()
    start, device_name = time.monotonic(), torch.cuda.get_device_name()
    recorded = _recorded(args.recorded)
    cases = [
        (name, tokens, variants(SHAPES[name], tokens, device_name))
        for name in args.shapes
        for tokens in TOKENS[name]
        if args.tokens is None or tokens in args.tokens
    ]
    ahead = CompileAhead(args.compile_processes)
    results: dict[str, Any] = {
        "hardware": device_name, "versions": {"torch": torch.__version__, "triton": triton.__version__}, "cases": [],
    }  # fmt: skip
    try:
        for name, tokens, settings in cases:
            largest = [0, *sorted({max(ranks) for _, ranks in cells_of(tokens)})]
            for config in settings.values():
                ahead.ask(name, tokens, largest, config)
        layers: dict[str, Layer] = {}
        for name, tokens, settings in cases:
            if time.monotonic() - start > args.seconds:
                print(f"out of time before {name} {tokens}", flush=True)
                break
            if name not in layers:
                layers.clear()
                torch.cuda.empty_cache()
                layers[name] = Layer.random(SHAPES[name], torch.device("cuda"))
            case = _Case(layer=layers[name], tokens=tokens, ready=partial(ahead.wait, name))
            result = compare(case, settings, recorded)
            results["cases"].append(result)
            args.out.write_text(json.dumps(results, indent=1) + "\n")
            if args.configs and result["best"] not in (None, _SHIPPED):
                keep(args.configs / f"{device_name.replace(' ', '_')}.json", SHAPES[name], tokens,
                     settings[result["best"]])  # fmt: skip
    finally:
        ahead.close()


if __name__ == "__main__":
    main()
