"""Slice files registered with CUDA: the second load is the same adapter as the first, and the loader gets its bytes."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from worker_model_support import Prompt, Rank, prompt_tokens, random_adapter, small_config, write_model, write_slice

from compute_worker.registered_slices import CudaRegistrar, RegisteredSlices
from compute_worker.slice_upload import SliceUploader
from epilora.slices import open_slice

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SECONDS = 20.0


@pytest.fixture
def shared() -> Iterator[Path]:
    """In shared memory, as the cache is."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="epilora-test-") as folder:
        yield Path(folder)


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_free(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@pytest.mark.parametrize("size", [1, (16 << 20) - 1, (80 << 20) + 12345])
def test_all_bytes_arrive(shared: Path, size: int) -> None:
    device = torch.device("cuda")
    content = torch.randint(256, (size,), dtype=torch.uint8)
    (shared / "slice").write_bytes(content.numpy().tobytes())
    uploader = SliceUploader(device)
    registered = RegisteredSlices(CudaRegistrar(device), max_bytes=1 << 30)
    with open_slice(shared / "slice") as stream:
        registered.keep(stream)
        wait_for(lambda: registered.state().num_files == 1)
        for _ in range(3):
            with registered.borrow(stream) as chunks:
                assert chunks is not None
                image = uploader.copy(chunks)
                uploader.synchronize()
            assert torch.equal(image[:size].cpu(), content)
    with (shared / "slice").open("rb") as loader:
        assert not is_free(loader.fileno())
        os.unlink(shared / "slice")
        wait_for(lambda: is_free(loader.fileno()))
    assert registered.state().num_failures == 0
    registered.close()
    torch.ones(8, device=device).add_(1).sum().item()


@pytest.mark.parametrize("backend", ["triton", "grouped"])
def test_the_second_load_is_the_first_adapter(tmp_path: Path, shared: Path, backend: str) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 96, "num_experts": 13, "head_dim": 32}
    write_model(small_config("qwen3_moe", **sizes), tmp_path / "model")
    rank = Rank(tmp_path / "model", work=tmp_path, device="cuda", dtype="bfloat16", expert_backend=backend)
    adapters = [random_adapter(rank.spec, seed, rank_of={"gate": 16, "up": 16, "down": 8}) for seed in (1, 2)]
    paths = [write_slice(shared / f"{seed}", adapter, rank.load_spec) for seed, adapter in enumerate(adapters)]
    for generation, path in ((1, paths[0]), (2, paths[1])):
        rank.stage(path, generation=generation)
        rank.runner.pool.activate(generation, generation - 1)
    wait_for(lambda: rank.runner.memory().pinned_cache_bytes == sum(path.stat().st_size for path in paths))
    rank.stage(paths[0], generation=3)
    rank.runner.pool.activate(3, 2)
    tokens = prompt_tokens(1, 9)
    first, other, second = rank.prefill([Prompt(tokens=tokens, slot=slot) for slot in (0, 1, 2)])
    # In one batch with others a row's last bits may differ; another adapter's logits are far away.
    apart = 0.05 * (first - other).norm()
    assert apart > 0
    assert (first - second).norm() <= apart
    for slot in (0, 2):
        rank.runner.pool.retire(slot + 1)
    rank.stage(paths[0], generation=4)
    rank.runner.pool.activate(4, 0)
    (again,) = rank.prefill([Prompt(tokens=tokens, slot=0)])
    assert (first - again).norm() <= apart
    assert rank.runner.memory().num_pin_failures == 0
