"""Check, then time, the expert layer with and without LoRA on this GPU.

    python -m benchmarks.kernels --out benchmarks/results/kernels.json             # every cell
    python -m benchmarks.kernels --tune --configs compute_worker/kernels/configs   # tile shapes first
    python -m benchmarks.kernels --check                                           # who meets the limits, from the file
    python -m benchmarks.kernels --report --docs docs/kernels.md                   # its tables, from the file

Each cell is compared with an fp32 oracle first (signed random data) and gets a time only if the relative error is at
most 1e-2. Times are medians over replays of a CUDA graph whose calls alternate two weight sets, so weights stream from
memory. Kernels are compiled by processes of their own while the GPU measures. The output file is rewritten after every
token count, and cells already in it stay unless measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks import kernel_tune
from benchmarks.command_line import at_least, list_of, need_cuda, refuse
from benchmarks.kernel_cells import TOKENS, Bench, cells_of, plan
from benchmarks.kernel_compile import CompileAhead, shape_weights
from benchmarks.kernel_criteria import summary, summary_text
from benchmarks.kernel_layer import SHAPES, Layer, run_layer
from benchmarks.kernel_report import table, write_docs
from benchmarks.kernel_results import read_results
from compute_worker.kernels import MoEConfig, choose_config
from compute_worker.kernels.config import shape_key, token_bucket

_SAME = ("shape", "tokens", "adapters", "lora_rank", "half")
"""What makes a cell."""


def _save(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


def _ask(ahead: CompileAhead, names: list[str], tokens: list[int]) -> None:
    """Queue what the cells will launch, in the order in which they will."""
    for name in names:
        weights, top_k = shape_weights(SHAPES[name]), SHAPES[name].top_k
        for t in tokens:
            ranks = [0, *sorted({max(cell.ranks) for cell in cells_of(t)})]
            halves = [(t // 2, [0, *sorted({max(c.ranks) for c in cells_of(t) if c.half})])] if t > 1 else []
            for num_tokens, of in [(t, ranks), *halves]:
                config = choose_config(
                    weights, num_tokens=num_tokens, top_k=top_k, device_name=torch.cuda.get_device_name()
                )
                ahead.ask(name, num_tokens, of, config)


def run_tuning(layer: Layer, tokens: list[int], args: argparse.Namespace, deadline: float) -> None:
    """Tune each bucket and write the GPU's config file and the log of losers after each."""
    path = args.configs / f"{torch.cuda.get_device_name().replace(' ', '_')}.json"
    shipped = json.loads(path.read_text()) if path.exists() else {}
    log_path = args.out.with_name("kernels_tuning.json")
    logs = json.loads(log_path.read_text()) if log_path.exists() else {}
    key = shape_key(layer.weights[0], layer.shape.top_k)
    for t in tokens:
        if time.monotonic() > deadline:
            break
        config, log = kernel_tune.tune(layer, t, replays=8 if t <= 1024 else 5, deadline=deadline)
        best = min((e for e in log if "lora_us" in e), key=lambda e: e["base_us"] + e["lora_us"])
        print(
            f"tuned {layer.shape.name} {t}: base {best['base_us']:.1f} lora {best['lora_us']:.1f} of {len(log)} tried",
            flush=True,
        )
        shipped.setdefault(key, {})[str(token_bucket(t))] = config.to_dict()
        _save(path, shipped)
        logs[f"{key} {t}"] = log
        _save(log_path, logs)


def profile(bench: Bench, tokens: int, rank: int) -> None:
    """Print device time by kernel of one call with 8 adapters (rank 0: without), without a graph."""
    batches, config = bench.batches(tokens, 8, False), bench.config(tokens)
    tables = bench.tables([rank] * 8) if rank else None
    inputs = batches if tables else [b.base_only() for b in batches]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        for i, batch in enumerate(inputs * 2):
            run_layer(bench.layer, batch, i, tables, config)
        torch.cuda.synchronize()
    calls = 2 * len(inputs)
    times = {e.key[:24]: round(e.self_device_time_total / calls, 1) for e in prof.key_averages()}
    print(f"profile {bench.layer.shape.name} T={tokens} rank={rank}: {times}", flush=True)


def _line(result: dict[str, Any]) -> str:
    """One cell for the log."""
    times = ("base_us", "floor_base_us", "lora_us", "floor_lora_us")
    return " ".join(
        [
            *(f"{result[k]}" for k in _SAME),
            *(f"{k}={result[k]:.1f}" for k in times if result[k]),
            f"err={result['base_rel_error']:.1e}/{result['rel_error']:.1e}",
            f"bits={result['base_rows_bit_equal']}/{result['runs_bit_equal']}",
        ]
    )


def measure(
    args: argparse.Namespace, results: dict[str, Any], ahead: CompileAhead | None, start: float
) -> dict[str, Any]:
    """All cells asked for, shape by shape; stops before a token count that would begin after --seconds."""
    results["hardware"] = torch.cuda.get_device_name()
    results["versions"] = {"torch": torch.__version__, "triton": triton.__version__}
    for name in args.shapes:
        layer = Layer.random(SHAPES[name], torch.device("cuda"))
        if args.tune:
            run_tuning(layer, args.tokens, args, start + args.tune_seconds)

        def ready(tokens: int, rank: int, config: MoEConfig, name: str = name) -> None:
            if ahead is not None and (why := ahead.wait(name, tokens, rank, config)):
                raise RuntimeError(f"{name} {tokens} rank {rank}: {config} does not compile: {why}")

        bench = Bench(layer, ready)
        for tokens in args.tokens:
            for rank in (0, 16, 64) if tokens in args.profile else ():
                profile(bench, tokens, rank)
            if time.monotonic() - start > args.seconds:
                print(f"out of time before {name} {tokens}")
                break
            for cell in cells_of(tokens):
                result = bench.measure(cell)
                results["cells"] = [c for c in results["cells"] if any(c[k] != result[k] for k in _SAME)] + [result]
                print(_line(result), f"t={time.monotonic() - start:.0f}", flush=True)
            _save(args.out, results)
        del bench, layer
        torch.cuda.empty_cache()
    return results


def merge(args: argparse.Namespace) -> None:
    """Put another run's cells of the shapes and token counts asked for into --out."""
    results, other = read_results(args.out), read_results(args.merge)
    taken = [c for c in other["cells"] if c["shape"] in args.shapes and c["tokens"] in args.tokens]
    keys = {tuple(c[k] for k in _SAME) for c in taken}
    results["cells"] = [c for c in results["cells"] if tuple(c[k] for k in _SAME) not in keys] + taken
    results["limits"] = summary(results["cells"], plan())
    _save(args.out, results)
    print(f"{len(taken)} cells of {args.merge} are now in {args.out}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kernels.json"))
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting new token counts after this long")
    parser.add_argument("--shapes", type=list_of(SHAPES), default=list(SHAPES), help=f"some of {','.join(SHAPES)}")
    parser.add_argument(
        "--tokens", type=list_of(TOKENS), default=list(TOKENS), help=f"some of {','.join(map(str, TOKENS))}"
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--tune", action="store_true", help="search tile shapes first and write them to --configs")
    parser.add_argument("--tune-seconds", type=float, default=1e9, help="time for the search, of all shapes together")
    parser.add_argument("--configs", type=Path, default=Path("compute_worker/kernels/configs"))
    parser.add_argument("--compile-processes", type=at_least(0), default=8, help="processes that compile (0: none)")
    parser.add_argument("--profile", type=list_of(TOKENS), default=[], help="token counts to break down by kernel")
    modes.add_argument(
        "--merge", type=Path, help="only take over the cells of --shapes and --tokens from this file of another run"
    )
    modes.add_argument(
        "--check",
        action="store_true",
        help="only say which cells of --out meet their limits; exit status 1 if a cell of the plan is not measured, 0"
        " if all are: a limit that is missed is printed, and is no failure",
    )
    modes.add_argument("--report", action="store_true", help="only print the table of --out")
    parser.add_argument("--docs", type=Path, help="with --report: file whose tables are replaced")
    return parser


def report(args: argparse.Namespace) -> None:
    """Print the table of --out, and put it into --docs."""
    results = read_results(args.out)
    if args.docs:
        write_docs(results, args.docs)
    print(table(results))


def check(args: argparse.Namespace) -> int:
    """Print who meets the limits; the exit status: 1 if a cell of the plan is not measured."""
    found = summary(read_results(args.out)["cells"], plan())
    print(summary_text(found))
    return 1 if found["not_measured"] else 0


def main() -> None:
    """See the module."""
    parser = _parser()
    args = parser.parse_args()
    if args.docs and not args.report:
        parser.error("argument --docs: expected with --report only")
    try:
        if args.merge:
            return merge(args)
        if args.report:
            return report(args)
        if args.check:
            sys.exit(check(args))
        results = read_results(args.out) if args.out.exists() else {"cells": []}
    except ValueError as error:
        refuse(parser, str(error))
    need_cuda(parser)
    start = time.monotonic()
    ahead = CompileAhead(args.compile_processes) if args.compile_processes else None
    try:
        if ahead is not None:
            _ask(ahead, args.shapes, args.tokens)
        results = measure(args, results, ahead, start)
    finally:
        if ahead is not None:
            ahead.close()
    results["limits"] = summary(results["cells"], plan())
    _save(args.out, results)
    print(summary_text(results["limits"]))


if __name__ == "__main__":
    main()
