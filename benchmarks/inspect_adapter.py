"""`epilora inspect` on an adapter of 36,864 tensors, and how long each part of understanding it takes.

The adapter has the shapes of Qwen3-30B-A3B, r 16, one pair for each expert: 1.66 GB. Only its header is written, the
rest is a hole in the file, since nothing else is read. The command is timed whole, as a user runs it, wall and
processor; the parts in this process, processor time alone. Medians.

    python -m benchmarks.inspect_adapter --out benchmarks/results/inspect_adapter.json
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.command_line import end_in_order
from benchmarks.qwen3_30b import HIDDEN, INTERMEDIATE, LORA_RANK, NUM_EXPERTS, NUM_LAYERS, write_model
from epilora.adapters.keys import pair_tensors
from epilora.adapters.open_adapter import open_adapter
from epilora.adapters.slice_plan import SliceSpec, plan_slices
from epilora.load_spec import MoEEPLoadSpec
from epilora.model_spec import ModelSpec
from epilora.placement import ExpertPlacement
from epilora.slices import LAYOUT_VERSION, SliceMetadata

EP_RANKS = 8


def write_hollow_adapter(directory: Path) -> int:
    """An adapter whose values are a hole; returns the number of tensors."""
    directory.mkdir(parents=True)
    widths = {
        "gate_proj": (HIDDEN, INTERMEDIATE),
        "up_proj": (HIDDEN, INTERMEDIATE),
        "down_proj": (INTERMEDIATE, HIDDEN),
    }
    shapes = {
        f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}.lora_{side}.weight": shape
        for layer in range(NUM_LAYERS)
        for expert in range(NUM_EXPERTS)
        for name, (fan_in, fan_out) in widths.items()
        for side, shape in (("A", [LORA_RANK, fan_in]), ("B", [fan_out, LORA_RANK]))
    }
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(shapes):
        begin, end = end, end + 2 * shapes[name][0] * shapes[name][1]
        entries[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [begin, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    with (directory / "adapter_model.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + end)
    config = {"peft_type": "LORA", "r": LORA_RANK, "lora_alpha": 2 * LORA_RANK, "peft_version": "0.17.1"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return len(shapes)


def _median_seconds(work: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 1):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    # The first one warms up.
    return statistics.median(seconds[1:])


def command_seconds(arguments: list[str], repeats: int) -> dict[str, float]:
    """The command as a user runs it, once the files it reads are in memory."""
    command = [sys.executable, "-m", "epilora.cli", *arguments]
    wall, processor = [], []
    for _ in range(repeats + 1):
        start, used = time.perf_counter(), _processor_seconds_of_children()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        wall.append(time.perf_counter() - start)
        processor.append(_processor_seconds_of_children() - used)
    return {"wall": statistics.median(wall[1:]), "processor": statistics.median(processor[1:])}


def _processor_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def part_seconds(adapter: Path, model: ModelSpec, repeats: int) -> dict[str, float]:
    """Header, pairs, normal form and plan, one after the other, without collection of cycles as in the loader."""
    placement = ExpertPlacement.make("linear", model, EP_RANKS)
    specs = [MoEEPLoadSpec.make(model, placement, rank) for rank in range(EP_RANKS)]
    slices = [SliceSpec(layers=spec.layers, metadata=_metadata(spec)) for spec in specs]
    gc.disable()
    with open_adapter(adapter) as opened:
        paired = pair_tensors(opened.header.tensors)
        form = opened.resolve(model, paired=paired)
        return {
            "header": _median_seconds(opened.weights.tensors, repeats),
            "pairs": _median_seconds(lambda: pair_tensors(opened.header.tensors), repeats),
            "normal form": _median_seconds(lambda: opened.resolve(model, paired=paired), repeats),
            f"plan for {EP_RANKS} ranks": _median_seconds(lambda: plan_slices(form, slices), repeats),
        }


def _metadata(spec: MoEEPLoadSpec) -> SliceMetadata:
    return SliceMetadata(
        layout_version=LAYOUT_VERSION,
        model_digest=spec.model_digest,
        placement_id=spec.placement_id,
        ep_rank=spec.ep_rank,
    )


def run(work: Path, repeats: int) -> dict[str, Any]:
    """All numbers."""
    load = os.getloadavg()[0]
    num_tensors = write_hollow_adapter(work / "adapter")
    write_model(work / "model")
    with_model = ["inspect", str(work / "adapter"), "--model", str(work / "model"), "--ep", str(EP_RANKS)]
    return {
        "hardware": f"{os.cpu_count()} CPU cores",
        "load_average_before": load,
        "num_tensors": num_tensors,
        "file_bytes": (work / "adapter" / "adapter_model.safetensors").stat().st_size,
        "command_seconds": {
            "epilora version": command_seconds(["version"], repeats),
            "epilora inspect ADAPTER": command_seconds(["inspect", str(work / "adapter")], repeats),
            f"epilora inspect ADAPTER --model M --ep {EP_RANKS}": command_seconds(with_model, repeats),
        },
        "part_seconds": part_seconds(work / "adapter", ModelSpec.from_directory(work / "model"), repeats),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    end_in_order()
    with tempfile.TemporaryDirectory(prefix="epilora-bench-") as work:
        results = run(Path(work), arguments.repeats)
    print(json.dumps(results, indent=1))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
