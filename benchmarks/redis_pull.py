"""Pulling an adapter's slices from Redis, against redis-benchmark's own GET of values of the same size in the same run.

Two loaders, each with a cache of its own: one builds and gives the slices to Redis, the other pulls them. The adapter
has the shapes of Qwen3-30B-A3B, r 16, per-expert layout, all 8 ranks. Needs redis-server and redis-benchmark.

    python -m benchmarks.redis_pull --out benchmarks/results/redis_pull.json
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from pydantic import SecretStr

from benchmarks.command_line import end_in_order, shared_directory
from benchmarks.loader import make_request, write_inputs
from epilora.model_spec import ModelSpec
from epilora.settings import LoaderSettings
from loader_service.cache import SliceCache
from loader_service.redis_tier import CHUNK_BYTES
from loader_service.request import BuildRequest
from loader_service.shared_build import SharedBuilder
from loader_service.writer import BuildProgress

_NUM_GETS = 2000


@contextmanager
def running_redis(directory: Path) -> Iterator[Path]:
    """A server on a Unix socket, in memory only."""
    socket = directory / "redis.sock"
    options = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no", "--dir", str(directory)]
    process = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        while not socket.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield socket
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def node(work: Path, url: str) -> Iterator[tuple[SharedBuilder, SliceCache]]:
    """A loader's builder and its empty cache."""
    with shared_directory() as directory:
        settings = LoaderSettings(
            model=work / "model", cache_dir=directory, adapter_roots=[work / "adapters"], cache=SecretStr(url)
        )
        cache = SliceCache(directory, settings.cache_budget_bytes)
        cache.open()
        builder = SharedBuilder(settings, cache)
        try:
            yield builder, cache
        finally:
            builder.close()
            cache.close()


def build(builder: SharedBuilder, request: BuildRequest) -> tuple[float, int]:
    """(seconds, bytes of all slices) of one build or pull."""
    start = time.perf_counter()
    built = builder.build(request, builder.identify(request.source), BuildProgress(), lease="bench")
    return time.perf_counter() - start, sum(piece.size_bytes for piece in built.slices)


def get_rate(socket: Path, num_clients: int) -> float:
    """redis-benchmark's GET, bytes per second."""
    options = ["-s", str(socket), "-t", "set,get", "-d", str(CHUNK_BYTES), "-n", str(_NUM_GETS), "--csv"]
    command = ["redis-benchmark", *options, "-c", str(num_clients)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    rows = list(csv.reader(output.splitlines()))
    rate = next(float(row[1]) for row in rows if row and row[0] == "GET")
    return rate * CHUNK_BYTES


def run(work: Path, num_layers: int, repeats: int) -> dict[str, Any]:
    """Pulls and redis-benchmark in turn."""
    write_inputs(work, num_layers)
    request = make_request(work / "adapters" / "per_expert", ModelSpec.from_directory(work / "model"), 8, 8)
    with tempfile.TemporaryDirectory(prefix="epilora-redis-") as directory, running_redis(Path(directory)) as socket:
        url = f"unix://{socket}"
        with node(work, url) as (builder, _):
            build_seconds, size = build(builder, request)
            start = time.perf_counter()
            while not builder.counters.num_pushed:
                assert not builder.counters.num_errors
                time.sleep(0.01)
            push_seconds = time.perf_counter() - start
        pulls, gets, gets_alone = [], [], []
        for _ in range(repeats):
            gets.append(get_rate(socket, 50))
            gets_alone.append(get_rate(socket, 1))
            with node(work, url) as (builder, _):
                seconds, _ = build(builder, request)
                assert builder.counters.num_pulled == 1
                pulls.append(size / seconds)
        version = redis.Redis(unix_socket_path=str(socket)).info("server")["redis_version"]
    return {
        "model": "Qwen3-30B-A3B",
        "num_layers": num_layers,
        "redis_version": version,
        "transport": "unix socket",
        "value_bytes": CHUNK_BYTES,
        "slice_bytes": size,
        "build_seconds": build_seconds,
        "push_bytes_per_second": size / push_seconds,
        "pull_bytes_per_second": statistics.median(pulls),
        "redis_benchmark_get_bytes_per_second": statistics.median(gets),
        "redis_benchmark_get_one_client_bytes_per_second": statistics.median(gets_alone),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--work", type=Path, help="directory of the inputs, kept; default: one that is removed")
    parser.add_argument("--layers", type=int, default=48, help="fewer for a trial")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    if shutil.which("redis-server") is None or shutil.which("redis-benchmark") is None:
        parser.error("redis-server and redis-benchmark are needed (Debian packages redis-server, redis-tools)")
    end_in_order()
    with tempfile.TemporaryDirectory(prefix="epilora-bench-") as temporary:
        results = run(arguments.work or Path(temporary), arguments.layers, arguments.repeats)
    pull, get = results["pull_bytes_per_second"], results["redis_benchmark_get_bytes_per_second"]
    alone = results["redis_benchmark_get_one_client_bytes_per_second"]
    print(
        f"pull {pull / 1e9:.2f} GB/s, {pull / get:.2f} x redis-benchmark's GET ({get / 1e9:.2f} GB/s with 50 clients,"
    )
    print(f"{alone / 1e9:.2f} with one); push {results['push_bytes_per_second'] / 1e9:.2f} GB/s")
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
