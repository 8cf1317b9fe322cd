"""From a slice file in shared memory to the GPU: what registering it with CUDA costs and gives. Needs a CUDA device.

The slice is what one rank of 8 needs of an adapter with the shapes of Qwen3-30B-A3B, r 16: 208 MB. In one run:

    pinned      the same bytes from pinned memory: the machine's rate
    mapped      from the mapped file as it is
    registered  from the mapped file, registered with CUDA before; and the time to register and unregister
    pipelined   chunk after chunk: one thread registers the next while this one is copied, on a side stream
    staged      `AdapterPool.stage` as the worker calls it, cast included

    python -m benchmarks.cache_to_gpu --out benchmarks/results/cache_to_gpu.json
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.loader import make_request, shared_directory, write_inputs
from compute_worker.adapter_pool import AdapterPool
from epilora.load_spec import MoEEPLoadSpec
from epilora.model_spec import ModelSpec
from epilora.placement import ExpertPlacement
from epilora.settings import LoaderSettings
from epilora.v1 import loader_service_pb2
from loader_service.build import AdapterBuilder
from loader_service.cache import SliceCache
from loader_service.writer import BuildProgress

_PORTABLE, _READ_ONLY = 0x1, 0x8
_CHUNK_BYTES = 16 << 20


class Registered:
    """A mapped file whose pages are registered with CUDA while the block runs."""

    def __init__(self, pages: torch.Tensor, start: int, size: int) -> None:
        self._pointer = pages.data_ptr() + start
        self._size = size

    def __enter__(self) -> Registered:
        cudart = torch.cuda.cudart()
        error = cudart.cudaHostRegister(self._pointer, self._size, _PORTABLE | _READ_ONLY)
        if int(error) != 0:
            error = cudart.cudaHostRegister(self._pointer, self._size, _PORTABLE)
        assert int(error) == 0, error
        return self

    def __exit__(self, *_: object) -> None:
        error = torch.cuda.cudart().cudaHostUnregister(self._pointer)
        assert int(error) == 0, error


def build_slice(work: Path, directory: Path) -> loader_service_pb2.Slice:
    """The slice of rank 0 of 8, in a cache that is left as it is."""
    settings = LoaderSettings(model=work / "model", cache_dir=directory, adapter_roots=[work / "adapters"])
    cache = SliceCache(directory, settings.cache_budget_bytes)
    cache.open()
    request = make_request(work / "adapters" / "per_expert", ModelSpec.from_directory(work / "model"), 8, 1)
    builder = AdapterBuilder(settings, cache)
    return builder.build(request, builder.identify(request.source), BuildProgress(), lease="bench").slices[0]


def map_file(path: Path) -> torch.Tensor:
    """The file's pages, shared and writable: CUDA pins pages for writing unless the driver can do without."""
    with path.open("r+b") as stream:
        return torch.frombuffer(mmap.mmap(stream.fileno(), 0), dtype=torch.uint8)


def seconds(work: Callable[[], object]) -> float:
    """Of a call, the GPU's work included."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def pipelined(pages: torch.Tensor, target: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Copies in chunks, each registered while the one before is copied."""
    starts = range(0, pages.numel(), _CHUNK_BYTES)

    def register(start: int) -> Registered:
        return Registered(pages, start, min(_CHUNK_BYTES, pages.numel() - start)).__enter__()

    with ThreadPoolExecutor(1) as thread, ExitStack() as stack:
        waiting = [thread.submit(register, start) for start in starts]
        for start, future in zip(starts, waiting, strict=True):
            stack.push(future.result().__exit__)
            end = min(start + _CHUNK_BYTES, pages.numel())
            with torch.cuda.stream(stream):
                target[start:end].copy_(pages[start:end], non_blocking=True)
        stream.synchronize()


def measure(work: Path, repeats: int) -> dict[str, Any]:
    """All rows; medians."""
    model = ModelSpec.from_directory(work / "model")
    load_spec = MoEEPLoadSpec.make(model, ExpertPlacement.make("linear", model, 8), 0)
    device = torch.device("cuda")
    with shared_directory() as directory:
        piece = build_slice(work, directory)
        pages = map_file(Path(piece.path))
        target = torch.empty_like(pages, device=device)
        pinned = pages.clone().pin_memory()
        stream = torch.cuda.Stream()
        times: dict[str, list[float]] = {}

        def note(name: str, work: Callable[[], object]) -> None:
            times.setdefault(name, []).append(seconds(work))

        for number in range(repeats + 1):
            note("pinned", lambda: target.copy_(pinned, non_blocking=True))
            note("mapped", lambda: target.copy_(pages, non_blocking=True))
            registered = Registered(pages, 0, pages.numel())
            note("register", registered.__enter__)
            target.zero_()
            note("registered", lambda: target.copy_(pages, non_blocking=True))
            assert torch.equal(target.cpu(), pinned), "the bytes arrived"
            note("unregister", registered.__exit__)
            target.zero_()
            note("pipelined", lambda: pipelined(pages, target, stream))
            assert torch.equal(target.cpu(), pinned), "the bytes arrived"
            pool = AdapterPool(
                model=model,
                load_spec=load_spec,
                dtype=torch.bfloat16,
                device=device,
                max_bytes=8 << 30,
                rank_multiple=0,
            )
            note(
                "staged",
                lambda pool=pool: pool.stage(
                    name="a", generation=1, path=Path(piece.path), placement_id=load_spec.placement_id
                ),
            )
            pool.discard(1)
            if number == 0:
                times.clear()
    size = pages.numel()
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "gpu": torch.cuda.get_device_name(),
        "slice_bytes": size,
        "seconds": medians,
        "bytes_per_second": {name: size / value for name, value in medians.items()},
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--work", type=Path, help="directory of the inputs, kept; default: one that is removed")
    parser.add_argument("--layers", type=int, default=48, help="fewer for a trial")
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed")
    with tempfile.TemporaryDirectory(prefix="epilora-bench-") as temporary:
        work = arguments.work or Path(temporary)
        write_inputs(work, arguments.layers)
        results = measure(work, arguments.repeats)
    rates = results["bytes_per_second"]
    for name, rate in rates.items():
        print(
            f"{name:11s} {results['seconds'][name] * 1e3:8.1f} ms {rate / 1e9:6.1f} GB/s {rate / rates['pinned']:5.2f}"
        )
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
