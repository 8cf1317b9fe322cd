"""Check, then time, the expert layer with and without LoRA on this GPU.

    python -m benchmarks.kernels --out benchmarks/results/kernels.json            # every cell
    python -m benchmarks.kernels --tune --configs compute_worker/kernels/configs   # tile shapes first
    python -m benchmarks.kernels --report --docs docs/kernels.md                   # only the table, from the file

Each cell is compared with the fp32 reference first (signed random data) and gets a time only if the relative error is
at most 1e-2. Times are medians over replays of a CUDA graph whose calls alternate two weight sets, so weights stream
from memory. The output file is rewritten after every cell, and cells already in it stay unless measured again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks import kernel_tune
from benchmarks.kernel_layer import SHAPES, Batch, Layer, floor_us, layer_us, run_layer
from benchmarks.kernel_report import REFERENCE, reference_us, table, write_docs
from compute_worker.kernels import AdapterTable, MoEConfig, choose_config, moe_reference
from compute_worker.kernels.config import shape_key, token_bucket

MAX_RELATIVE_ERROR = 1e-2
TOKENS = (64, 256, 8, 1, 1024, 4096, 32, 16384)


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


def cells(tokens: list[int]) -> Iterator[Cell]:
    """All cells, the most telling ones first."""
    plan = [(8, (16,), False), (8, (64,), False), (32, (64,), False), (1, (16,), False), (32, (16,), False),
            (1, (64,), False), (8, (16,), True), (8, (64,), True), (8, (8, 64), False), (64, (16,), False),
            (64, (64,), False)]  # fmt: skip
    for adapters, lora_ranks, half in plan:
        for t in tokens:
            if (adapters == 64 and t != 256) or (adapters == 32 and t > 1024) or (len(lora_ranks) > 1 and t > 256):
                continue
            yield Cell(tokens=t, adapters=adapters, lora_ranks=lora_ranks, half=half)


class Bench:
    """Cells of one shape, sharing weights, routings and adapter tables."""

    def __init__(self, layer: Layer, configs: dict[int, MoEConfig]) -> None:
        self.layer, self.configs = layer, configs
        self._tables: dict[tuple[int, ...], list[AdapterTable]] = {}
        self._base_us: dict[int, float] = {}

    def config(self, tokens: int) -> MoEConfig:
        chosen = self.configs.get(token_bucket(tokens))
        return chosen or choose_config(
            self.layer.weights[0], num_tokens=tokens, top_k=self.layer.shape.top_k,
            device_name=torch.cuda.get_device_name(),
        )  # fmt: skip

    def tables(self, ranks: list[int]) -> list[AdapterTable]:
        key = tuple(ranks)
        if key not in self._tables:
            self._tables[key] = self.layer.tables(ranks)
        return self._tables[key]

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Check the cell, then time it; a cell over the error limit gets no times."""
        shape, config = self.layer.shape, self.config(cell.tokens)
        batches = self.layer.batches(
            num_tokens=cell.tokens, num_adapters=cell.adapters, half=cell.half, seed=cell.tokens
        )
        tables = self.tables(cell.ranks)
        result: dict[str, Any] = {
            "shape": shape.name, "tokens": cell.tokens, "adapters": cell.adapters, "lora_rank": cell.lora_rank,
            "half": cell.half, "base_us": None, "lora_us": None,
            "floor_base_us": floor_us(shape, batches, []), "floor_lora_us": floor_us(shape, batches, cell.ranks),
        }  # fmt: skip
        result |= self.check(batches[0], tables, config)
        if not (result["rel_error"] <= MAX_RELATIVE_ERROR and result["base_rel_error"] <= MAX_RELATIVE_ERROR):
            return result
        replays = 15 if cell.tokens <= 256 else 8
        if cell.tokens not in self._base_us:
            self._base_us[cell.tokens] = layer_us(self.layer, batches, None, config, replays)
        result["base_us"] = self._base_us[cell.tokens]
        result["lora_us"] = layer_us(self.layer, batches, tables, config, replays)
        return result

    def check(self, batch: Batch, tables: list[AdapterTable], config: MoEConfig) -> dict[str, Any]:
        """Errors against fp32, equality of base rows with the base run, equality of two runs."""

        def reference(b: Batch) -> torch.Tensor:
            return moe_reference(
                b.x_TD, b.expert_TK, b.weight_TK, b.slot_T, self.layer.weights[0], tables[0].adapters()
            )

        def error(out: torch.Tensor, expected: torch.Tensor) -> float:
            return float((out.float() - expected).norm() / expected.norm().clamp(min=1e-30))

        base_batch = batch.base_only()
        base, lora = (run_layer(self.layer, b, 0, t, config) for b, t in ((base_batch, None), (batch, tables)))
        again = run_layer(self.layer, batch, 0, tables, config)
        base_rows = batch.slot_T < 0
        return {
            "rel_error": error(lora, reference(batch)),
            "base_rel_error": error(base, reference(base_batch)),
            "base_rows_bit_equal": torch.equal(lora[base_rows], base[base_rows]),
            "runs_bit_equal": torch.equal(lora, again),
        }


def _compile_share(share: tuple[int, int, list[str], list[int], bool]) -> None:
    """Launch every `count`-th configuration once, so that the compiler's disk cache has its kernels."""
    index, count, names, tokens, tuning = share
    device = torch.device("cuda")
    for name in names:
        layer = Layer.random(SHAPES[name], device)
        weights, top_k = layer.weights[0], layer.shape.top_k
        jobs: dict[str, tuple[int, MoEConfig, int]] = {}
        for t in tokens:
            chosen = choose_config(weights, num_tokens=t, top_k=top_k, device_name=torch.cuda.get_device_name())
            candidates = kernel_tune.all_candidates(weights, top_k, t) if tuning else [chosen]
            for config in candidates:
                for rank in (16,) if tuning else (0, 16, 64):
                    jobs.setdefault(f"{config.to_dict()} {rank}", (t, config, rank))
        for t, config, rank in list(jobs.values())[index::count]:
            batch = layer.batches(num_tokens=t, num_adapters=1, half=False, seed=0)[0]
            for tables in (None, layer.tables([rank])) if tuning else (layer.tables([rank]) if rank else None,):
                try:
                    run_layer(layer, batch if tables else batch.base_only(), 0, tables, config)
                    torch.cuda.synchronize()
                except Exception as error:  # does not fit this GPU: the tuner will see the same and skip it
                    print(f"compile {name} {t}: {type(error).__name__} {error}"[:200], file=sys.stderr)
        del layer, weights


def compile_ahead(names: list[str], tokens: list[int], processes: int, *, tuning: bool) -> None:
    """Compile the cells' configurations, or the tuner's candidates, in parallel processes."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes) as pool:
        pool.map(_compile_share, [(i, processes, names, tokens, tuning) for i in range(processes)], chunksize=1)


def _save(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


def run_tuning(layer: Layer, tokens: list[int], args: argparse.Namespace, deadline: float) -> dict[int, MoEConfig]:
    """Tune each bucket and write the GPU's config file and the log of losers after each."""
    path = args.configs / f"{torch.cuda.get_device_name().replace(' ', '_')}.json"
    shipped = json.loads(path.read_text()) if path.exists() else {}
    log_path = args.out.with_name("kernels_tuning.json")
    logs = json.loads(log_path.read_text()) if log_path.exists() else {}
    key = shape_key(layer.weights[0], layer.shape.top_k)
    configs: dict[int, MoEConfig] = {}
    for t in tokens:
        if time.monotonic() > deadline:
            break
        configs[token_bucket(t)], log = kernel_tune.tune(layer, t, replays=8 if t <= 1024 else 5, deadline=deadline)
        best = min((e for e in log if "lora_us" in e), key=lambda e: e["base_us"] + e["lora_us"])
        print(
            f"tuned {layer.shape.name} {t}: base {best['base_us']:.1f} lora {best['lora_us']:.1f} of {len(log)} tried",
            flush=True,
        )
        shipped.setdefault(key, {})[str(token_bucket(t))] = configs[token_bucket(t)].to_dict()
        _save(path, shipped)
        logs[f"{key} {t}"] = log
        _save(log_path, logs)
    return configs


def profile(bench: Bench, tokens: int) -> None:
    """Print device time by kernel of one with-LoRA call (8 adapters, rank 16), without a graph."""
    batches = bench.layer.batches(num_tokens=tokens, num_adapters=8, half=False, seed=tokens)
    tables, config = bench.tables([16] * 8), bench.config(tokens)
    for label, used in (("base", None), ("lora", tables)):
        inputs = batches if used else [b.base_only() for b in batches]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
            for i, batch in enumerate(inputs * 2):
                run_layer(bench.layer, batch, i, used, config)
            torch.cuda.synchronize()
        calls = 2 * len(inputs)
        times = {e.key[:24]: round(e.self_device_time_total / calls, 1) for e in prof.key_averages()}
        print(f"profile {bench.layer.shape.name} T={tokens} {label}: {times}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kernels.json"))
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting new cells after this long")
    parser.add_argument("--shapes", default="a,b,c")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--tune", action="store_true", help="search tile shapes first and write them to --configs")
    parser.add_argument("--tune-tokens", default="1,8,32,64,256,1024,4096,16384")
    parser.add_argument("--tune-seconds", type=float, default=1e9, help="time for the search, of all shapes together")
    parser.add_argument("--configs", type=Path, default=Path("compute_worker/kernels/configs"))
    parser.add_argument("--compile-processes", type=int, default=0)
    parser.add_argument("--compile-only", action="store_true", help="stop after --compile-processes have done theirs")
    parser.add_argument("--profile", default="", help="token counts to break down by kernel")
    parser.add_argument("--report", action="store_true", help="only print the table of --out")
    parser.add_argument("--docs", type=Path, help="with --report: file whose table is replaced")
    return parser.parse_args()


def main() -> None:
    args = _arguments()
    if args.report:
        results = json.loads(args.out.read_text())
        print(table(results))
        if args.docs:
            write_docs(results, args.docs)
        return
    start = time.monotonic()
    tokens = [int(t) for t in args.tokens.split(",")]
    tune_tokens = [int(t) for t in args.tune_tokens.split(",")]
    names = args.shapes.split(",")
    if args.compile_processes:
        compile_ahead(names, tune_tokens if args.tune else tokens, args.compile_processes, tuning=args.tune)
        print(f"compiled ahead by {time.monotonic() - start:.0f} s", flush=True)
    if args.compile_only:
        return
    results = json.loads(args.out.read_text()) if args.out.exists() else {"cells": []}
    results["hardware"] = torch.cuda.get_device_name()
    results["versions"] = {"torch": torch.__version__, "triton": triton.__version__}
    reference = json.loads(REFERENCE.read_text())["cells"]
    for i, name in enumerate(names):
        layer = Layer.random(SHAPES[name], torch.device("cuda"))
        configs: dict[int, MoEConfig] = {}
        if args.tune:
            configs = run_tuning(layer, tune_tokens, args, start + args.tune_seconds * (i + 1) / len(names))
            print(f"tuned {name} by {time.monotonic() - start:.0f} s")
        bench = Bench(layer, configs)
        for t in [int(t) for t in args.profile.split(",") if t]:
            profile(bench, t)
        for cell in cells(tokens):
            if time.monotonic() - start > args.seconds * (i + 1) / len(names):
                print(f"shape {name}: out of time before {cell}")
                break
            result = bench.measure(cell)
            same = ("shape", "tokens", "adapters", "lora_rank", "half")
            results["cells"] = [c for c in results["cells"] if any(c[k] != result[k] for k in same)] + [result]
            _save(args.out, results)
            ref_base, ref_lora = reference_us(reference, result)
            print(
                *(f"{result[k]}" for k in same),
                *(
                    f"{k}={result[k]:.1f}"
                    for k in ("base_us", "floor_base_us", "lora_us", "floor_lora_us")
                    if result[k]
                ),
                f"ref={ref_base}/{ref_lora} err={result['base_rel_error']:.1e}/{result['rel_error']:.1e}",
                f"bits={result['base_rows_bit_equal']}/{result['runs_bit_equal']} t={time.monotonic() - start:.0f}",
                flush=True,
            )
        del bench, layer
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
