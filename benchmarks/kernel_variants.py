"""Compare settings of the expert layer in one run, on the same cells, and keep the best of each token count.

    python -m benchmarks.kernel_variants --out variants.json --configs compute_worker/kernels/configs

Each setting is checked like a cell of `benchmarks.kernels` (error against fp32, base rows and repeated runs bit-equal)
on a batch in which half of the tokens have no adapter, then timed on one in which all have, in turn with the others.
The best has the smallest geometric mean, over the base layer and all cells, of time over floor; it replaces the shipped
setting in the file of this GPU in --configs if it is better by more than MARGIN, about what differs between two runs
of the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.command_line import at_least, list_of, need_cuda, refuse
from benchmarks.kernel_cells import MAX_RELATIVE_ERROR
from benchmarks.kernel_compile import CompileAhead, shape_weights
from benchmarks.kernel_layer import SHAPES, Batch, Calls, Layer, Shape, floor_us, graphs_us, layer_calls, run_layer
from benchmarks.kernel_oracle import Adapters, layer_fp32
from benchmarks.kernel_results import read_results
from compute_worker.kernels import AdapterTable, MoEConfig, choose_config
from compute_worker.kernels.config import shape_key, token_bucket

MARGIN = 0.005
TOKENS = {"a": (1, 8, 32, 64, 256, 1024, 4096, 16384), "b": (1, 64, 256, 1024, 4096), "c": (1, 32, 64, 256, 1024, 4096)}
_SHIPPED = "shipped"


def variants(shape: Shape, tokens: int, device_name: str) -> dict[str, MoEConfig]:
    """Settings by name, the shipped one first, no two alike."""
    out = _variants(shape, tokens, device_name)
    return {name: setting for i, (name, setting) in enumerate(out.items()) if setting not in [*out.values()][:i]}


def _variants(shape: Shape, tokens: int, device_name: str) -> dict[str, MoEConfig]:
    first = choose_config(shape_weights(shape), num_tokens=tokens, top_k=shape.top_k, device_name=device_name)
    out = {_SHIPPED: first, "no pdl" if first.pdl else "pdl": replace(first, pdl=not first.pdl)}
    if not first.fused:
        for columns, span in ((64, 1), (64, 2), (64, 4), (64, 8), (128, 2), (128, 4)):
            out[f"{columns} columns, span {span}"] = replace(first, block_f=columns, span=span)
        other = "combine" if first.expand_down == "grouped" else "grouped"
        out[other] = replace(first, expand_down=other)
        if first.expand_down == "combine":
            for columns in (first.block_d // 2, 2 * first.block_d):
                out[f"combine {columns}"] = replace(first, block_d=columns)
        return out
    out["no base pdl" if first.base_pdl else "base pdl"] = replace(first, base_pdl=not first.base_pdl)
    out[f"{96 - first.delta_columns} columns"] = replace(first, delta_columns=96 - first.delta_columns)
    for block_k, stages in ((64, 3), (64, 4), (128, 3), (128, 4)):
        out[f"shrinks {block_k} x {stages}"] = replace(first, shrink_block_k=block_k, shrink_stages=stages)
    if first.shrink_splits > 1:
        for gate_up, down in ((2, 4), (2, 8), (4, 4), (4, 8)):
            out[f"splits {gate_up}, {down}"] = replace(first, shrink_splits=gate_up, down_shrink_splits=down)
    if first.block_m >= 64:
        for extra in {0, 16, 32} - {first.extra_m}:
            out[f"extra {extra}"] = replace(first, extra_m=extra)
    for rows in {16, 32, 64} - {first.pair_block_m}:
        if tokens >= 4096:
            out[f"pairs of {rows}"] = replace(first, pair_block_m=rows)
    return out


def _base_of(config: MoEConfig) -> MoEConfig:
    """The same for all settings that launch the same without adapters."""
    if not config.fused:
        return config
    return replace(config, pdl=False, delta_columns=64, pair_block_m=16, lora_extra_m=0, shrink_block_k=64,
                   shrink_stages=4, shrink_splits=1, down_shrink_splits=1)  # fmt: skip


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
    _base_out: dict[MoEConfig, torch.Tensor] = field(default_factory=dict)

    def batches(self, num_adapters: int, *, half: bool) -> list[Batch]:
        return self.layer.batches(num_tokens=self.tokens, num_adapters=num_adapters, half=half, seed=self.tokens)

    def base_out(self, config: MoEConfig) -> torch.Tensor:
        """Output of the first batch without adapters."""
        config = _base_of(config)
        if config not in self._base_out:
            batch = self.batches(0, half=False)[0].base_only()
            self._base_out[config] = run_layer(self.layer, batch, 0, None, config)
        return self._base_out[config]

    def floor(self, ranks: list[int]) -> float:
        batches = self.batches(len(ranks), half=False)
        if not ranks:
            batches = [batch.base_only() for batch in batches]
        return floor_us(self.layer.shape, batches, ranks)

    def check(self, config: MoEConfig, ranks: list[int], tables: list[AdapterTable]) -> dict[str, Any]:
        """Error of one setting in one cell; `failed` where it may not be used, or cannot be."""
        try:
            for largest in (0, max(ranks)):
                if why := self.ready(self.tokens, largest, config):
                    return {"failed": f"does not compile: {why}"}
            return self._check(config, ranks, tables)
        except Exception as error:
            torch.cuda.synchronize()  # raises if the GPU is of no use any more
            return {"failed": f"{type(error).__name__}: {error}"[:200]}

    def _check(self, config: MoEConfig, ranks: list[int], tables: list[AdapterTable]) -> dict[str, Any]:
        half = self.batches(len(ranks), half=True)[0]
        owned = tables[0].adapters()
        adapters = Adapters([owned[slot] for slot in sorted(owned)], self.layer.shape.num_experts)
        expected = layer_fp32(half, self.layer.weights[0], adapters)
        got, again = (run_layer(self.layer, half, 0, tables, config) for _ in range(2))
        error = float((got.float() - expected).norm() / expected.norm().clamp(min=1e-30))
        without = half.slot_T < 0
        result: dict[str, Any] = {"rel_error": error}
        if not error <= MAX_RELATIVE_ERROR:
            return result | {"failed": f"relative error {error:.1e}"}
        if not torch.equal(got[without], self.base_out(config)[without]):
            return result | {"failed": "base rows differ from the base layer's"}
        if not torch.equal(got, again):
            return result | {"failed": "a second run differs"}
        return result

    def times(self, settings: Mapping[str, MoEConfig], ranks: list[int], tables: list[AdapterTable]) -> dict[str, Any]:
        """base_us and lora_us of each setting, all replayed in turn."""
        full = self.batches(len(ranks), half=False)
        calls: dict[str, Calls] = {}
        for name, config in settings.items():
            calls[name] = layer_calls(self.layer, full, tables, config)
            calls[f"base {hash(_base_of(config))}"] = layer_calls(self.layer, full, None, _base_of(config))
        us = graphs_us(calls, 15 if self.tokens <= 256 else 9 if self.tokens <= 4096 else 5)
        return {
            name: {"base_us": us[f"base {hash(_base_of(config))}"], "lora_us": us[name]}
            for name, config in settings.items()
        }


def compare(case: _Case, settings: dict[str, MoEConfig], recorded: dict[Any, float]) -> dict[str, Any]:
    """Every setting in every cell; prints a line a cell."""
    shape, tokens = case.layer.shape, case.tokens
    cells = []
    for num_adapters, in_turn in cells_of(tokens):
        ranks = [in_turn[i % len(in_turn)] for i in range(num_adapters)]
        tables = case.layer.tables(ranks)
        results = {name: case.check(config, ranks, tables) for name, config in settings.items()}
        usable = {name: config for name, config in settings.items() if "failed" not in results[name]}
        for name, times in case.times(usable, ranks, tables).items():
            results[name] |= times
        name = "+".join(map(str, in_turn))
        before = recorded.get((shape.name, tokens, num_adapters, name))
        cells.append({
            "adapters": num_adapters, "lora_rank": name, "floor_us": case.floor(ranks), "recorded_us": before,
            "settings": results,
        })  # fmt: skip
        text = "; ".join(f"{n} {r['base_us']:.1f} {r['lora_us']:.1f}" if "lora_us" in r else f"{n} {r['failed']}"
                         for n, r in results.items())  # fmt: skip
        print(f"{shape.name} {tokens} n{num_adapters} r{name}: recorded {before or '-'}; {text}", flush=True)
        del tables
        torch.cuda.empty_cache()
    scores = {name: score(cells, name, case.floor([])) for name in settings}
    usable_scores = {name: value for name, value in scores.items() if value is not None}
    best = min(usable_scores, key=lambda name: usable_scores[name]) if usable_scores else None
    if best and _SHIPPED in usable_scores and usable_scores[best] > (1 - MARGIN) * usable_scores[_SHIPPED]:
        best = _SHIPPED
    print(f"{shape.name} {tokens}: best {best}; scores {scores}", flush=True)
    return {"shape": shape.name, "tokens": tokens, "best": best, "scores": scores, "cells": cells}


def score(cells: list[dict[str, Any]], name: str, base_floor_us: float) -> float | None:
    """Geometric mean of time over floor, the base layer's included; None for a setting that failed anywhere."""
    results = [cell["settings"][name] for cell in cells]
    if any("failed" in result for result in results):
        return None
    ratios = [result["lora_us"] / cell["floor_us"] for result, cell in zip(results, cells, strict=True)]
    base_us = statistics.median(result["base_us"] for result in results)
    return statistics.geometric_mean([base_us / base_floor_us, *ratios])


def keep(path: Path, shape: Shape, tokens: int, config: MoEConfig) -> None:
    """Put a setting into the file of this GPU."""
    shipped = json.loads(path.read_text()) if path.exists() else {}
    buckets = shipped.setdefault(shape_key(shape_weights(shape), shape.top_k), {})
    buckets[str(token_bucket(tokens))] = config.to_dict()
    path.write_text(json.dumps(shipped, indent=1) + "\n")


def _recorded(path: Path) -> dict[Any, float]:
    cells = read_results(path)["cells"] if path.exists() else []
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
    parser.add_argument("--shapes", type=list_of(SHAPES), default=list(SHAPES), help=f"some of {','.join(SHAPES)}")
    parser.add_argument("--tokens", type=list_of(sorted({*chain(*TOKENS.values())})), help="default: all of the shapes")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting new token counts after this long")
    parser.add_argument("--compile-processes", type=at_least(1), default=12)
    args = parser.parse_args()
    of_shapes = sorted({*chain(*(TOKENS[name] for name in args.shapes))})
    if wrong := [tokens for tokens in args.tokens or () if tokens not in of_shapes]:
        choices = ", ".join(map(str, of_shapes))
        parser.error(f"argument --tokens: with these shapes {wrong[0]} is none of {choices}")
    try:
        recorded = _recorded(args.recorded)
    except ValueError as error:
        refuse(parser, str(error))
    need_cuda(parser)
    start, device_name = time.monotonic(), torch.cuda.get_device_name()
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
