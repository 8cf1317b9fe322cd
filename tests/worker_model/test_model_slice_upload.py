"""Slice files brought over in one piece: the same adapter as tensor by tensor, and exact bytes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from worker_model_support import random_adapter, small_config, write_model, write_slice

from benchmarks.no_weights import NoWeights
from compute_worker.adapter_buffers import AdapterTensors
from compute_worker.adapter_pool import AdapterPool
from compute_worker.dense_lora import DensePair
from compute_worker.expert_shard import ExpertShard
from compute_worker.registered_slices import RegisteredSlices
from compute_worker.slice_upload import SliceUploader, image_bytes
from epilora.errors import InternalError, ResourceExhaustedError, StalePlacementError, UnavailableError
from epilora.load_spec import MoEEPLoadSpec
from epilora.model_spec import ModelSpec
from epilora.placement import ExpertPlacement

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return ModelSpec.from_directory(write_model(small_config("qwen2_moe"), tmp_path_factory.mktemp("model")))


@pytest.fixture
def load_spec(spec: ModelSpec) -> MoEEPLoadSpec:
    return MoEEPLoadSpec.make(spec, ExpertPlacement.make("linear", spec, 2), 1)


@pytest.mark.parametrize("size", [1, 64, 1000, 1001, 4096, 12345])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_all_bytes_arrive(tmp_path: Path, size: int, num_threads: int) -> None:
    content = bytes((7 * place + place // 251) % 256 for place in range(size))
    path = tmp_path / "file"
    path.write_bytes(content)
    uploader = SliceUploader(CPU, chunk_bytes=1000, num_threads=num_threads)
    for _ in range(2):
        with path.open("rb") as stream:
            image = uploader.upload(stream)
        assert image.numel() == image_bytes(path) == -(-size // 4) * 4
        assert bytes(image[:size].tolist()) == content


def test_a_file_that_shrinks_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1" * 5000)
    uploader = SliceUploader(CPU, chunk_bytes=1000, num_threads=2)
    with path.open("rb") as stream:
        before = uploader._run

        def shrink_first(*arguments: object) -> None:
            path.open("r+b").truncate(3500)
            before(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(uploader, "_run", shrink_first)
        # Whichever thread is first to come to the end.
        with pytest.raises(InternalError, match=r"ended at byte (3500|4000)"):
            uploader.upload(stream)


@pytest.mark.parametrize(
    "options, as_stored",
    [
        ({}, True),
        ({"dtype": None}, True),
        ({"dtype": torch.bfloat16}, False),
        ({"rank_multiple": 8}, False),
        ({"shard": ExpertShard(index=1, count=2)}, False),
    ],
    ids=["as-stored", "file-dtype", "cast", "padded", "sharded"],
)
def test_the_same_adapter_either_way(
    spec: ModelSpec, load_spec: MoEEPLoadSpec, tmp_path: Path, options: dict[str, Any], as_stored: bool
) -> None:
    adapter = random_adapter(spec, 1, rank_of={"gate": 3, "up": 3, "down": 2}, vary_ranks=True)
    path = write_slice(tmp_path / "slice", adapter, load_spec)
    found: list[AdapterTensors] = []
    for uploader in (None, SliceUploader(CPU, chunk_bytes=4096, num_threads=2)):
        pool = AdapterPool(
            model=spec,
            load_spec=load_spec,
            device=CPU,
            max_bytes=1 << 30,
            base=NoWeights(),
            uploader=uploader,
            **{"dtype": torch.float32, "rank_multiple": 0, **options},
        )
        size = pool.stage(name="a", generation=1, path=path, placement_id=load_spec.placement_id)
        assert size == pool.num_bytes()
        assert (size == image_bytes(path)) == (as_stored and uploader is not None)
        pool.activate(1, 0)
        found.append(pool.active()[0])
    plain, uploaded = found
    assert plain.layers.keys() == uploaded.layers.keys()
    for layer, pairs in plain.layers.items():
        assert pairs.keys() == uploaded.layers[layer].keys()
        for projection, pair in pairs.items():
            other = uploaded.layers[layer][projection]
            assert (pair.lora_rank, pair.out_features) == (other.lora_rank, other.out_features)
            for part in ("a", "b", "scale_e"):
                torch.testing.assert_close(getattr(pair, part), getattr(other, part), rtol=0, atol=0)
    assert plain.dense.keys() == uploaded.dense.keys()
    for module, dense in plain.dense.items():
        other_dense = uploaded.dense[module]
        assert isinstance(dense, DensePair)
        assert isinstance(other_dense, DensePair)
        assert dense.scale == other_dense.scale
        torch.testing.assert_close(dense.a, other_dense.a, rtol=0, atol=0)
        torch.testing.assert_close(dense.b, other_dense.b, rtol=0, atol=0)


class AnyPages:
    """A device that needs no registering: the CPU."""

    def enter_thread(self) -> None:
        pass

    def register(self, pages: torch.Tensor) -> int:
        return 0

    def unregister(self, pages: torch.Tensor) -> int:
        return 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as-stored", "cast"])
def test_later_loads_of_a_file(spec: ModelSpec, load_spec: MoEEPLoadSpec, tmp_path: Path, dtype: torch.dtype) -> None:
    """Read once, then copied from the pages that are kept; what it is checked against is checked each time."""
    path = write_slice(tmp_path / "slice", random_adapter(spec, 1, rank_of={"gate_up": 3, "down": 2}), load_spec)
    registered = RegisteredSlices(AnyPages(), max_bytes=1 << 30, chunk_bytes=4096)
    uploader = SliceUploader(CPU, chunk_bytes=4096, num_threads=1)
    prepared: list[AdapterTensors] = []
    pool = AdapterPool(
        model=spec,
        load_spec=load_spec,
        dtype=dtype,
        device=CPU,
        max_bytes=1 << 30,
        base=NoWeights(),
        rank_multiple=0,
        uploader=uploader,
        registered=registered,
        prepare=lambda adapter: prepared.append(adapter) or adapter,  # type: ignore[func-returns-value]
    )
    uploads: list[object] = []
    upload = uploader.upload
    uploader.upload = lambda stream: uploads.append(stream) or upload(stream)  # type: ignore[method-assign, func-returns-value]
    for generation in (1, 2, 3):
        pool.stage(name="a", generation=generation, path=path, placement_id=load_spec.placement_id)
        deadline = time.monotonic() + 10
        while registered.state().num_files == 0:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    assert len(uploads) == 1
    first, second, third = ([buffer.clone() for buffer in adapter.buffers] for adapter in prepared)
    for other in (second, third):
        for mine, its in zip(first, other, strict=True):
            assert torch.equal(mine.view(torch.uint8), its.view(torch.uint8))
    with pytest.raises(StalePlacementError):
        pool.stage(name="a", generation=4, path=path, placement_id="another")
    path.unlink()
    with pytest.raises(UnavailableError, match="is gone"):
        pool.stage(name="a", generation=4, path=path, placement_id=load_spec.placement_id)
    registered.close()


def test_room_is_checked_before_anything_is_copied(spec: ModelSpec, load_spec: MoEEPLoadSpec, tmp_path: Path) -> None:
    adapter = random_adapter(spec, 1, rank_of={"gate": 3, "up": 3, "down": 2})
    path = write_slice(tmp_path / "slice", adapter, load_spec)
    pool = AdapterPool(
        model=spec,
        load_spec=load_spec,
        dtype=torch.float32,
        device=CPU,
        max_bytes=image_bytes(path) - 1,
        base=NoWeights(),
        rank_multiple=0,
        uploader=SliceUploader(CPU, chunk_bytes=4096, num_threads=1),
    )
    with pytest.raises(ResourceExhaustedError, match=f"needs {image_bytes(path)} bytes"):
        pool.stage(name="a", generation=1, path=path, placement_id=load_spec.placement_id)
