"""The slice cache for minutes: many adapters through a budget that holds few, and a crowd that wants one.

EPILORA_SOAK_SECONDS sets another duration of the first.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import xxhash

from epilora.errors import ResourceExhaustedError
from epilora.placement import ExpertPlacement
from epilora.v1 import loader_service_pb2 as pb
from tests.loader.loader_harness import (
    LoaderClient,
    big_adapter,
    build_request,
    loader_settings,
    running_loader,
    wide_model,
)
from tests.service.harness import REPOSITORY, Service

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

SECONDS = float(os.environ.get("EPILORA_SOAK_SECONDS", "120"))
NUM_NAMES, NUM_HELD, NUM_TASKS = 50, 5, 8
FIXTURES = REPOSITORY / "tests" / "fixtures"


class _Peak:
    """Most bytes that lay in a directory at one time, looked at all the time.

    Two looks a sample: what both have seen was there between them, with at least the bytes of the first. One look alone
    would count a file that goes while it lasts, and another that comes in its place.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stop = threading.Event()
        self.bytes = 0
        self.num_samples = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            before, after = _files_in(self._directory), _files_in(self._directory)
            self.bytes = max(self.bytes, sum(size for file, size in before.items() if file in after))
            self.num_samples += 1


def _files_in(directory: Path) -> dict[int, int]:
    """Inode -> bytes that it takes."""
    found = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                status = os.lstat(os.path.join(folder, name))
            except FileNotFoundError:  # renamed or removed meanwhile
                continue
            found[status.st_ino] = status.st_blocks * 512
    return found


class _Client:
    """Loads a random adapter, reads its slices, holds them for a moment and gives them back."""

    def __init__(self, loader: LoaderClient, requests: list[pb.BuildSlicesRequest], expected: list[list[str]]) -> None:
        self._loader = loader
        self._requests = requests
        self._expected = expected
        self.counts: Counter[str] = Counter()

    async def run(self, seed: int, end: float) -> None:
        rng = random.Random(seed)
        while asyncio.get_running_loop().time() < end:
            number = rng.randrange(NUM_NAMES)
            try:
                result = await self._loader.build(self._requests[number])
            except ResourceExhaustedError:
                self.counts["full"] += 1
                await asyncio.sleep(rng.random() * 0.02)
                continue
            self.counts["hit" if result.report.cache_hit else "built"] += 1
            digests = await asyncio.to_thread(_digests, result)
            assert digests == self._expected[number] == [piece.digest for piece in result.slices]
            await asyncio.sleep(rng.random() * 0.05)
            assert await asyncio.to_thread(_digests, result) == digests, "still whole, and still there"
            await self._loader.release(result.lease_id)


def _digests(result: pb.BuildResult) -> list[str]:
    return [xxhash.xxh3_128_hexdigest(Path(piece.path).read_bytes()) for piece in result.slices]


async def test_fifty_adapters_in_a_budget_for_five(tmp_path: Path) -> None:
    model = wide_model(tmp_path / "model")
    placement = ExpertPlacement.make("linear", model, 2)
    requests = [
        build_request(big_adapter(tmp_path / "adapters" / f"{n}", lora_rank=2, seed=n), model, placement)
        for n in range(NUM_NAMES)
    ]
    async with running_loader(loader_settings(tmp_path, [tmp_path / "adapters"])) as loader:
        expected = []
        for request in requests:
            result = await loader.build(request)
            expected.append(_digests(result))
            await loader.release(result.lease_id)
    assert len({digest for digests in expected for digest in digests}) == 2 * NUM_NAMES
    size = sum(piece.size_bytes for piece in result.slices)
    # Whole pages are what counts in the filesystem.
    budget = NUM_HELD * (size + 2 * 4096)
    settings = loader_settings(tmp_path, [tmp_path / "adapters"], cache_budget_bytes=budget, cache_idle_bytes=3 * size)
    peak = _Peak(tmp_path / "cache")
    async with running_loader(settings) as loader:
        client = _Client(loader, requests, expected)
        end = asyncio.get_running_loop().time() + SECONDS
        with peak.watching():
            await asyncio.gather(*(client.run(seed, end) for seed in range(NUM_TASKS)))
        print(dict(client.counts), f"peak {peak.bytes} of {budget} in {peak.num_samples} samples")
        state = await loader.cache()
        assert state.num_leases == 0
        assert state.used_bytes == _bytes_of_files(tmp_path / "cache") <= 3 * size
    assert min(client.counts[kind] for kind in ("hit", "built")) > SECONDS / 4
    assert 3 * size < peak.bytes <= budget, "never passed, not for a moment"
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [".lock"]


def _bytes_of_files(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def test_a_hundred_names_of_one_cold_adapter_are_one_build() -> None:
    source = FIXTURES / "adapters" / "peft-0.21.2" / "qwen3moe-T-both"
    environment = {"EPILORA_NUM_ADAPTER_SLOTS": "128"}
    with (
        Service(
            FIXTURES / "models" / "qwen3moe-T", adapter_roots=[FIXTURES / "adapters"], environment=environment
        ) as service,
        ThreadPoolExecutor(100) as threads,
    ):
        adapters = list(threads.map(lambda number: service.load(f"name-{number}", source), range(100)))
        assert len({adapter.generation for adapter in adapters}) == 100
        assert len({adapter.digest for adapter in adapters}) == 1
        reports = [adapter.report for adapter in adapters]
        assert len({report.num_tensors for report in reports}) == 1
        time.sleep(2)  # the gateway asks the loader for its numbers twice a second
        metrics = urllib.request.urlopen(f"http://{service.metrics_address}/metrics", timeout=10).read().decode()
        assert "\nepilora_loader_builds_total 1.0\n" in metrics
        prompt = [1, 2, 3]
        answers = {tuple(service.tokens(prompt, f"name-{number}", max_tokens=4)) for number in (0, 50, 99)}
        assert len(answers) == 1
