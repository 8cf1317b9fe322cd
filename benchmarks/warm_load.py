"""LoadAdapter of the service on a GPU with a warm cache, alone and beside decode steps of another adapter.

    python -m benchmarks.warm_load --out benchmarks/results/warm_load.json

Starts `epilora serve` with a random-weight Qwen3-30B-A3B on one GPU, loads one adapter (1.69 GB on that one rank) and
then loads and unloads it under another name again and again: first with nothing else to do, then while 8 sequences
generate. A token's distance to the one before it is a step; those that a load overlaps are set against the others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import torch

from benchmarks import qwen3_30b
from benchmarks.command_line import end_in_order, need_cuda
from benchmarks.gpu_service import Answer, generate, make_answers, running_service
from epilora.v1 import adapter_service_pb2, adapter_service_pb2_grpc

_BATCH, _PROMPT_TOKENS = 8, 40
_PAUSE_SECONDS = 0.15
_SETTLE_SECONDS = 1.5


def pinned_bytes_per_second() -> float:
    """Of a copy of 256 MiB from pinned memory to the GPU; the best of five."""
    source = torch.ones(256 << 20, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(source, device="cuda")
    best = 0.0
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, source.numel() / (time.perf_counter() - start))
    return best


class Loads:
    """Loads and unloads one adapter under a second name."""

    def __init__(self, channel: grpc.Channel, source: Path) -> None:
        self._stub: Any = adapter_service_pb2_grpc.AdapterServiceStub(channel)
        self._source = str(source)
        self.spans: list[tuple[float, float]] = []
        self.resident_bytes = 0

    def load(self, name: str) -> float:
        """Seconds of one LoadAdapter."""
        start = time.perf_counter()
        request = adapter_service_pb2.LoadAdapterRequest(name=name, source=self._source)
        response = self._stub.LoadAdapter(request, timeout=120)
        end = time.perf_counter()
        self.resident_bytes = response.adapter.resident_bytes
        self.spans.append((start, end))
        return end - start

    def again(self, count: int) -> list[float]:
        """Seconds of some loads, each undone after a pause."""
        seconds = []
        for _ in range(count):
            seconds.append(self.load("second"))
            time.sleep(_PAUSE_SECONDS)
            self._stub.UnloadAdapter(adapter_service_pb2.UnloadAdapterRequest(name="second"), timeout=60)
            time.sleep(_PAUSE_SECONDS)
        return seconds


def step_times(answers: list[Answer], spans: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Milliseconds between the tokens of one sequence: those that a load overlaps, and those that none comes near."""
    during, apart = [], []
    times = answers[0].times
    for earlier, later in itertools.pairwise(times[20:]):
        if any(earlier < end and later > start for start, end in spans):
            during.append((later - earlier) * 1e3)
        elif all(later < start - 0.05 or earlier > end + 2 * _PAUSE_SECONDS for start, end in spans):
            apart.append((later - earlier) * 1e3)
    return during, apart


def stages_of(log: Path) -> list[dict[str, Any]]:
    """What the worker says of its part of each load: milliseconds of reading the header, and of the copy."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if '"adapter staged"' in line]
    return [{"plan_ms": line["plan_seconds"] * 1e3, "copy_ms": line["copy_seconds"] * 1e3} for line in lines]


def measure(address: str, source: Path, num_loads: int, num_tokens: int) -> dict[str, Any]:
    """All numbers; milliseconds."""
    with grpc.insecure_channel(address) as channel:
        loads = Loads(channel, source)
        cold = loads.load("first")
        # The worker has its slice registered meanwhile, so that what follows are loads of a file that it keeps.
        time.sleep(_SETTLE_SECONDS)
        alone = loads.again(num_loads)
        answers = make_answers(_BATCH, _PROMPT_TOKENS, 1, ["first"])
        generate(channel, make_answers(_BATCH, _PROMPT_TOKENS, 2, ["first"]), 30)
        base = make_answers(_BATCH, _PROMPT_TOKENS, 3, ["first"])
        generate(channel, base, num_tokens // 4)
        undisturbed, _ = step_times(base, [(0.0, float("inf"))])
        loads.spans.clear()
        generating = threading.Thread(target=generate, args=(channel, answers, num_tokens))
        generating.start()
        time.sleep(0.5)
        beside = loads.again(num_loads)
        generating.join()
        during, apart = step_times(answers, loads.spans)
    return {
        "resident_bytes": loads.resident_bytes,
        "cold_load_ms": cold * 1e3,
        "warm_load_ms": statistics.median(alone) * 1e3,
        "warm_load_beside_ms": statistics.median(beside) * 1e3,
        "warm_loads_ms": [value * 1e3 for value in alone],
        "warm_loads_beside_ms": [value * 1e3 for value in beside],
        "step_ms": statistics.median(undisturbed),
        "step_mean_ms": statistics.mean(undisturbed),
        "step_apart_ms": statistics.median(apart) if apart else None,
        "step_during_ms": statistics.median(during),
        "step_during_mean_ms": statistics.mean(during),
        "step_during_worst_ms": max(during),
        "num_steps_during": len(during),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=qwen3_30b.NUM_LAYERS, help="fewer for a trial")
    parser.add_argument("--loads", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=800, help="that each sequence generates beside the loads")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    arguments = parser.parse_args()
    need_cuda(parser)
    end_in_order()
    with tempfile.TemporaryDirectory(prefix="epilora-bench-") as folder:
        work = Path(folder)
        qwen3_30b.write_model(work / "model", num_layers=arguments.layers)
        with running_service(work / "model", work, 1) as service:
            qwen3_30b.write_adapter(work / "adapter", "per_expert", seed=1, num_layers=arguments.layers)
            ready = service.wait_ready()
            found = measure(ready["address"], work / "adapter", arguments.loads, arguments.tokens)
        found["stages"] = stages_of(work / "serve.log")
    rate = pinned_bytes_per_second()
    found["pinned_bytes_per_second"] = rate
    found["copy_ms"] = found["resident_bytes"] / rate * 1e3
    found["limit_ms"] = 2 * found["copy_ms"] + 2 * found["step_ms"] + 20
    print(json.dumps(found, indent=1))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
