"""Building slices in shared memory against `cp` of the file to the same place, and against what one would write first.

The adapter has the shapes of Qwen3-30B-A3B, r 16: 36,864 tensors of experts in the per-expert layout. Every cell is a
process of its own that repeats build and copy in turn, with the file in the page cache, and reports the best of each:
what else runs on a machine makes both slower, and never faster.

    python -m benchmarks.loader --out benchmarks/results/loader.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.command_line import end_in_order, output_of, shared_directory
from epilora.adapters.layout_hints import NO_HINTS
from epilora.adapters.normal_form import AdapterTarget
from epilora.adapters.weights import WEIGHTS_NAME
from epilora.families import family_of
from epilora.load_spec import MoEEPLoadSpec
from epilora.model_spec import ModelSpec
from epilora.placement import ExpertPlacement
from epilora.process_memory import anonymous_bytes
from epilora.settings import LoaderSettings
from loader_service.build import AdapterBuilder
from loader_service.cache import SliceCache
from loader_service.request import BuildRequest
from loader_service.writer import BuildProgress

LAYOUTS = ("per_expert", "target_parameters")


class AnonymousPeak:
    """Largest RssAnon of this process while the block runs, sampled every millisecond."""

    def __enter__(self) -> AnonymousPeak:
        self._stop = threading.Event()
        self._start = self._peak = anonymous_bytes()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(0.001):
            self._peak = max(self._peak, anonymous_bytes())

    @property
    def growth_bytes(self) -> int:
        """Against the beginning of the block."""
        return self._peak - self._start


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def copy_seconds(source: Path) -> float:
    """`cp` of the weights to shared memory."""
    with shared_directory() as directory:
        return _seconds(lambda: subprocess.run(["cp", source, directory], check=True))


def obvious_seconds(source: Path, specs: list[MoEEPLoadSpec], layout: str) -> float:
    """Per rank: open the file, take the tensors of local experts, stack them, save them."""
    from benchmarks.loader_obvious import save_rank  # torch is not in the loader's memory

    with shared_directory() as directory:

        def save() -> None:
            for spec in specs:
                save_rank(source, spec, layout, directory / f"{spec.ep_rank}")

        return _seconds(save)


def make_request(source: Path, model: ModelSpec, ep_ranks: int, ranks_built: int) -> BuildRequest:
    """Slices for the first ranks of a linear placement."""
    placement = ExpertPlacement.make("linear", model, ep_ranks)
    specs = tuple(MoEEPLoadSpec.make(model, placement, rank) for rank in range(ranks_built))
    layers = [layer.moe for layer in specs[0].layers]
    family = family_of(model.model_type, layers[0].gate_up_layout)
    target = AdapterTarget.make(family, layers, model.dense_modules)
    return BuildRequest(source=str(source), load_specs=specs, target=target, allow_partial=False, hints=NO_HINTS)


def build_once(request: BuildRequest, model: Path) -> tuple[float, int]:
    """(seconds, bytes read) of one build into an empty cache."""
    with shared_directory() as directory:
        settings = LoaderSettings(model=model, cache_dir=directory, adapter_roots=[Path(request.source).parent])
        cache = SliceCache(directory, settings.cache_budget_bytes)
        cache.open()
        try:
            builder = AdapterBuilder(settings, cache)
            start = time.perf_counter()
            built = builder.build(request, builder.identify(request.source), BuildProgress(), lease="bench")
            return time.perf_counter() - start, built.report.bytes_read
        finally:
            cache.close()


def measure(work: Path, layout: str, ep_ranks: int, ranks_built: int, repeats: int) -> dict[str, Any]:
    """One cell: build, copy and build again in turn; the obvious way once, last."""
    source, model = work / "adapters" / layout, ModelSpec.from_directory(work / "model")
    weights = source / WEIGHTS_NAME
    request = make_request(source, model, ep_ranks, ranks_built)
    copy_seconds(weights)
    # The first build of a process, since later ones find memory that it gave back; and none that counts, since to ask
    # a thousand times a second takes time.
    with AnonymousPeak() as peak:
        _, bytes_read = build_once(request, work / "model")
    copies, builds = [], []
    for _ in range(repeats):
        copies.append(copy_seconds(weights))
        builds.append(build_once(request, work / "model")[0])
    # Of each layout's expert tensors a rank needs its share, and all of the others.
    size = weights.stat().st_size
    dense = 2 * 2 * 16 * (2048 + 4096) * len(model.moe_layers)
    needed = dense + (size - dense) * ranks_built // ep_ranks
    return {
        "layout": layout,
        "ep_ranks": ep_ranks,
        "ranks_built": ranks_built,
        "seconds": min(builds),
        "cp_seconds": min(copies),
        "obvious_seconds": obvious_seconds(weights, list(request.load_specs), layout),
        "peak_rss_growth_bytes": peak.growth_bytes,
        "bytes_read": bytes_read,
        "bytes_needed": needed,
    }


def write_inputs(work: Path, num_layers: int) -> None:
    """The model's config and both adapters, where they are not there yet."""
    script = (
        "import sys; from pathlib import Path; from benchmarks.qwen3_30b import write_adapter, write_model\n"
        "work, layers = Path(sys.argv[1]), int(sys.argv[2]); write_model(work / 'model', num_layers=layers)\n"
        f"for layout in {LAYOUTS}:\n"
        "    path = work / 'adapters' / layout\n"
        "    path.exists() or write_adapter(path, layout, seed=1, num_layers=layers)"
    )
    subprocess.run([sys.executable, "-c", script, str(work), str(num_layers)], check=True)


def run(work: Path, num_layers: int, repeats: int) -> dict[str, Any]:
    """All cells, each in a process of its own."""
    write_inputs(work, num_layers)
    cells = []
    for layout in LAYOUTS:
        for ranks_built in (8, 1):
            arguments = ["--work", str(work), "--cell", layout, str(ranks_built), "--repeats", str(repeats)]
            command = [sys.executable, "-m", "benchmarks.loader", *arguments]
            cell = json.loads(output_of(command))
            cells.append(cell)
            print(_line(cell), flush=True)
    return {"model": "Qwen3-30B-A3B", "num_layers": num_layers, "cpu": _processor(), "cells": cells}


def _processor() -> str:
    """Model and number of cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def _line(cell: dict[str, Any]) -> str:
    ours, obvious = (cell[key] / cell["cp_seconds"] for key in ("seconds", "obvious_seconds"))
    return (
        f"{cell['layout']}, {cell['ranks_built']} of {cell['ep_ranks']}: {cell['seconds']:.2f} s, {ours:.2f} x cp, "
        f"obvious way {obvious:.2f} x cp, +{cell['peak_rss_growth_bytes'] >> 20} MiB, "
        f"read / needed {cell['bytes_read'] / cell['bytes_needed']:.3f}"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--work", type=Path, help="directory of the inputs, kept; default: one that is removed")
    parser.add_argument("--layers", type=int, default=48, help="fewer for a trial")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cell", nargs=2, metavar=("LAYOUT", "RANKS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    end_in_order()
    if arguments.cell:
        layout, ranks_built = arguments.cell
        print(json.dumps(measure(arguments.work, layout, 8, int(ranks_built), arguments.repeats)))
        return
    with tempfile.TemporaryDirectory(prefix="epilora-bench-") as temporary:
        results = run(arguments.work or Path(temporary), arguments.layers, arguments.repeats)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
