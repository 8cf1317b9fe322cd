"""From a slice file in shared memory to the GPU, alone and beside decode steps. Needs a CUDA device.

The slice is what one rank of 8 needs of an adapter with the shapes of Qwen3-30B-A3B, r 16: 208 MB. In one run:

    pinned        the same bytes from pinned memory: the machine's rate
    mapped        from the mapped file as it is
    registered    from the mapped file, registered with CUDA before; and the time to register and unregister it
    register x N  chunk after chunk: N threads register the next ones while one is copied
    upload x N    N threads read chunks into pinned buffers, which are copied from (compute_worker/slice_upload.py)
    kept          from a file that the worker keeps registered (compute_worker/registered_slices.py), opening included
    stage         `AdapterPool.stage` as the worker calls it for a file's first load, and for later ones ("stage again")

Decode steps are stood in for by a CUDA graph that reads 13 GB of weights, through 96 products, and is waited for each
time.

    python -m benchmarks.cache_to_gpu --out benchmarks/results/cache_to_gpu.json
"""

from __future__ import annotations

import argparse
import json
import logging
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch

from benchmarks.command_line import end_in_order, need_cuda, shared_directory
from benchmarks.loader import make_request, write_inputs
from benchmarks.no_weights import NoWeights
from compute_worker.adapter_pool import AdapterPool
from compute_worker.registered_slices import CudaRegistrar, RegisteredSlices
from compute_worker.slice_upload import CHUNK_BYTES, SliceUploader
from epilora.load_spec import MoEEPLoadSpec
from epilora.model_spec import ModelSpec
from epilora.placement import ExpertPlacement
from epilora.settings import LoaderSettings
from epilora.slices import open_slice
from epilora.v1 import loader_service_pb2
from loader_service.build import AdapterBuilder
from loader_service.cache import SliceCache
from loader_service.writer import BuildProgress

_PORTABLE, _READ_ONLY = 0x1, 0x8
_REGISTER_BYTES = 8 << 20


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class Registered:
    """Pages of a mapped file that are registered with CUDA while the block runs."""

    def __init__(self, pages: torch.Tensor, start: int, size: int, flags: int = _PORTABLE) -> None:
        self._pointer = pages.data_ptr() + start
        self._size = size
        self._flags = flags

    def error(self) -> int:
        """Registers; 0, or CUDA's error."""
        return int(_runtime().cudaHostRegister(self._pointer, self._size, self._flags))

    def __enter__(self) -> Registered:
        error = self.error()
        assert error == 0, error
        return self

    def __exit__(self, *_: object) -> None:
        error = int(_runtime().cudaHostUnregister(self._pointer))
        assert error == 0, error


def build_slice(work: Path, directory: Path) -> loader_service_pb2.Slice:
    """The slice of rank 0 of 8, in a cache that is left as it is."""
    settings = LoaderSettings(model=work / "model", cache_dir=directory, adapter_roots=[work / "adapters"])
    cache = SliceCache(directory, settings.cache_budget_bytes)
    cache.open()
    request = make_request(work / "adapters" / "per_expert", ModelSpec.from_directory(work / "model"), 8, 1)
    builder = AdapterBuilder(settings, cache)
    return builder.build(request, builder.identify(request.source), BuildProgress(), lease="bench").slices[0]


def map_file(path: Path, *, writable: bool) -> torch.Tensor:
    """The file's pages, shared."""
    with path.open("r+b" if writable else "rb") as stream:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return torch.frombuffer(mmap.mmap(stream.fileno(), 0, access=access), dtype=torch.uint8)


def register_ways(path: Path) -> dict[str, int]:
    """CUDA's answer to registering the file, by how it is mapped and with which flags."""
    answers = {}
    for name, writable, flags in (
        ("read-only map, read-only flag", False, _PORTABLE | _READ_ONLY),
        ("read-only map, no flag", False, _PORTABLE),
        ("writable map, read-only flag", True, _PORTABLE | _READ_ONLY),
        ("writable map, no flag", True, _PORTABLE),
    ):
        pages = map_file(path, writable=writable)
        registered = Registered(pages, 0, pages.numel(), flags)
        answers[name] = registered.error()
        if answers[name] == 0:
            registered.__exit__()
        else:
            _forget_error()
    return answers


def _forget_error() -> None:
    """A call that failed leaves its error for whatever asks next; torch does so at a launch."""
    try:
        torch.ones(8, device="cuda").add_(1)
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"as expected: {str(error).splitlines()[0]}")


class Copies:
    """All ways to bring the bytes over; each ends when they are there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pages = map_file(path, writable=True)
        self.target = torch.empty_like(self.pages, device="cuda")
        self.pinned = self.pages.clone().pin_memory()
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._threads = ThreadPoolExecutor(8)

    def copy(self, source: torch.Tensor) -> None:
        """One copy."""
        with torch.cuda.stream(self.stream):
            self.target.copy_(source, non_blocking=True)
        self.stream.synchronize()

    def register_and_copy(self, num_threads: int) -> None:
        """Registers in threads, chunk after chunk, and copies each when it is registered."""
        starts = range(0, self.pages.numel(), _REGISTER_BYTES)
        limit = threading.Semaphore(num_threads)

        def register(start: int) -> Registered:
            with limit:
                return Registered(self.pages, start, min(_REGISTER_BYTES, self.pages.numel() - start)).__enter__()

        with ExitStack() as stack:
            waiting = [self._threads.submit(register, start) for start in starts]
            for start, future in zip(starts, waiting, strict=True):
                stack.push(future.result().__exit__)
                end = min(start + _REGISTER_BYTES, self.pages.numel())
                with torch.cuda.stream(self.stream):
                    self.target[start:end].copy_(self.pages[start:end], non_blocking=True)
            self.stream.synchronize()


class Steps:
    """What stands for decode steps: one graph a step, and its result taken to the host."""

    def __init__(self) -> None:
        self._x = torch.randn(8, 8192, device="cuda", dtype=torch.bfloat16)
        weights = torch.randn(24, 8192, 8192, device="cuda", dtype=torch.bfloat16) * 0.01
        weights = weights.repeat(4, 1, 1)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._y = self._forward(weights)
        stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._y = self._forward(weights)
        self._weights = weights

    def _forward(self, weights: torch.Tensor) -> torch.Tensor:
        y = self._x
        for weight in weights:
            y = torch.tanh(y @ weight)
        return y

    def run(self, seconds: float) -> list[float]:
        """Steps for so long; the seconds that each took on the host."""
        times, end = [], time.perf_counter() + seconds
        while (start := time.perf_counter()) < end:
            self._graph.replay()
            self._y.max(dim=-1).indices.tolist()
            times.append(time.perf_counter() - start)
        return times


def keep(kept: RegisteredSlices, path: Path) -> None:
    """Has a file registered, and waits for that."""
    with open_slice(path) as stream:
        kept.keep(stream)
    deadline = time.monotonic() + 30
    while kept.state().num_files == 0:
        assert time.monotonic() < deadline, "registered in time"
        time.sleep(0.005)


def median_seconds(work: Callable[[], object], repeats: int) -> float:
    """Of a call that waits for the device itself; the first one is not counted."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def beside(steps: Steps, work: Callable[[], object] | None, seconds: float) -> dict[str, float]:
    """Steps while another thread calls `work` again and again, or does nothing."""
    stop, calls = threading.Event(), []

    def call() -> None:
        while work is not None and not stop.is_set():
            start = time.perf_counter()
            work()
            calls.append(time.perf_counter() - start)

    thread = threading.Thread(target=call)
    thread.start()
    times = sorted(steps.run(seconds))
    stop.set()
    thread.join()
    found = {"median_step_ms": statistics.median(times) * 1e3, "p95_step_ms": times[len(times) * 95 // 100] * 1e3}
    if calls:
        found["median_call_ms"] = statistics.median(calls) * 1e3
    return found


def measure(work: Path, repeats: int, step_seconds: float) -> dict[str, Any]:
    """All rows."""
    model = ModelSpec.from_directory(work / "model")
    load_spec = MoEEPLoadSpec.make(model, ExpertPlacement.make("linear", model, 8), 0)
    device = torch.device("cuda")
    with shared_directory() as directory:
        path = Path(build_slice(work, directory).path)
        ways = register_ways(path)
        copies = Copies(path)
        size = copies.pages.numel()
        sizes = [(1, CHUNK_BYTES), (2, CHUNK_BYTES), (4, CHUNK_BYTES), (8, CHUNK_BYTES), (8, 1 << 20), (8, 16 << 20)]
        uploaders = {
            (number, chunk): SliceUploader(device, num_threads=number, chunk_bytes=chunk) for number, chunk in sizes
        }

        def upload(uploader: SliceUploader) -> torch.Tensor:
            with path.open("rb") as stream:
                return uploader.upload(stream)

        for uploader in uploaders.values():
            assert torch.equal(upload(uploader)[:size].cpu(), copies.pinned), "the bytes arrived"
        copies.register_and_copy(4)
        assert torch.equal(copies.target.cpu(), copies.pinned), "the bytes arrived"

        def stage(pool: AdapterPool) -> None:
            pool.stage(name="a", generation=1, path=path, placement_id=load_spec.placement_id)
            pool.discard(1)

        kept = RegisteredSlices(CudaRegistrar(device), max_bytes=1 << 30)
        keep(kept, path)
        pools = {
            name: AdapterPool(
                model=model,
                load_spec=load_spec,
                dtype=torch.bfloat16,
                device=device,
                max_bytes=8 << 30,
                base=NoWeights(),
                rank_multiple=0,
                uploader=SliceUploader(device),
                registered=registered,
            )
            for name, registered in (("stage", None), ("stage again", kept))
        }

        def copy_kept() -> None:
            uploader = uploaders[8, CHUNK_BYTES]
            with open_slice(path) as stream, kept.borrow(stream) as chunks:
                assert chunks is not None
                image = uploader.copy(chunks)
                uploader.synchronize()
            assert image.numel() >= size

        rows: dict[str, Callable[[], object]] = {
            "pinned": lambda: copies.copy(copies.pinned),
            "mapped": lambda: copies.copy(copies.pages),
        }
        for number in (1, 2, 4, 8):
            rows[f"register x {number}"] = partial(copies.register_and_copy, number)
        for (number, chunk), uploader in uploaders.items():
            rows[f"upload x {number}, {chunk >> 20} MiB"] = partial(upload, uploader)
        rows["kept"] = copy_kept
        for name, pool in pools.items():
            rows[name] = partial(stage, pool)
        seconds = {name: median_seconds(call, repeats) for name, call in rows.items()}
        registered = Registered(copies.pages, 0, size)
        seconds["register"] = median_seconds(lambda: registered.__enter__().__exit__(), repeats)
        with registered:
            seconds["registered"] = median_seconds(lambda: copies.copy(copies.pages), repeats)
        steps = Steps()
        steps.run(0.2)
        names = [
            "pinned",
            "register x 1",
            "register x 4",
            "upload x 4, 4 MiB",
            "upload x 8, 4 MiB",
            "stage",
            "kept",
            "stage again",
        ]
        decode = {"nothing": beside(steps, None, step_seconds)}
        decode |= {name: beside(steps, rows[name], step_seconds) for name in names}
        decode["nothing again"] = beside(steps, None, step_seconds)
    return {
        "gpu": torch.cuda.get_device_name(),
        "cpu_cores": os.cpu_count(),
        "slice_bytes": size,
        "registering": ways,
        "seconds": seconds,
        "bytes_per_second": {name: size / value for name, value in seconds.items()},
        "steps_beside": decode,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--work", type=Path, help="directory of the inputs, kept; default: one that is removed")
    parser.add_argument("--layers", type=int, default=48, help="fewer for a trial")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--step-seconds", type=float, default=1.5, help="of decode steps beside each row")
    arguments = parser.parse_args()
    need_cuda(parser)
    end_in_order()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with tempfile.TemporaryDirectory(prefix="epilora-bench-") as temporary:
        work = arguments.work or Path(temporary)
        write_inputs(work, arguments.layers)
        results = measure(work, arguments.repeats, arguments.step_seconds)
    rates = results["bytes_per_second"]
    for name, rate in rates.items():
        milliseconds = results["seconds"][name] * 1e3
        print(f"{name:22s} {milliseconds:8.1f} ms {rate / 1e9:6.1f} GB/s {rate / rates['pinned']:5.2f}")
    for name, found in results["steps_beside"].items():
        print(f"steps beside {name:20s} " + ", ".join(f"{key} {value:.2f}" for key, value in found.items()))
    print(results["registering"])
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
