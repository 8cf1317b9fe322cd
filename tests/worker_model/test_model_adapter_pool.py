"""The adapter pool: exact bytes, memory that comes back, refusals."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from worker_model_support import Adapter, random_adapter, small_config, write_model, write_slice

from compute_worker.adapter_pool import AdapterPool
from epilora.errors import FailedPreconditionError, InternalError, ResourceExhaustedError, StalePlacementError
from epilora.load_spec import MoEEPLoadSpec
from epilora.model_spec import ModelSpec
from epilora.placement import ExpertPlacement
from epilora.process_memory import anonymous_bytes

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return ModelSpec.from_directory(write_model(small_config("qwen2_moe"), tmp_path_factory.mktemp("model")))


@pytest.fixture
def load_spec(spec: ModelSpec) -> MoEEPLoadSpec:
    return MoEEPLoadSpec.make(spec, ExpertPlacement.make("linear", spec, 2), 1)


class RandomWeights:
    """A model's weights, drawn when they are asked for."""

    def __init__(self, spec: ModelSpec) -> None:
        self._dense = {module.module: module for module in spec.dense_modules}
        self._layers = {moe.layer: moe for moe in spec.moe_layers}

    def dense(self, module: str) -> torch.Tensor:
        return torch.randn(self._dense[module].out_features, self._dense[module].in_features)

    def has_bias(self, module: str) -> bool:
        return module.endswith("q_proj")

    def expert(self, layer: int, projection: str, expert: int) -> torch.Tensor:
        moe = self._layers[layer]
        assert expert < moe.num_experts
        sizes = (moe.hidden_size, moe.intermediate_size)
        return torch.randn(sizes if projection == "down" else sizes[::-1])


def _pool(
    spec: ModelSpec,
    load_spec: MoEEPLoadSpec,
    *,
    dtype: torch.dtype | None = torch.float32,
    max_bytes: int = 1 << 30,
    rank_multiple: int = 0,
) -> AdapterPool:
    return AdapterPool(
        model=spec,
        load_spec=load_spec,
        dtype=dtype,
        device=CPU,
        max_bytes=max_bytes,
        base=RandomWeights(spec),
        rank_multiple=rank_multiple,
    )


def _stage(pool: AdapterPool, path: Path, load_spec: MoEEPLoadSpec, generation: int = 1) -> int:
    return pool.stage(name="a", generation=generation, path=path, placement_id=load_spec.placement_id)


def _adapter(spec: ModelSpec, **options: object) -> Adapter:
    return random_adapter(spec, 1, rank_of={"gate": 3, "up": 3, "down": 2}, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype, width", [(torch.float32, 4), (torch.bfloat16, 2), (None, 4)], ids=str)
def test_bytes_are_exact(
    spec: ModelSpec, load_spec: MoEEPLoadSpec, tmp_path: Path, dtype: torch.dtype | None, width: int
) -> None:
    adapter = _adapter(spec, vary_ranks=True)
    pool = _pool(spec, load_spec, dtype=dtype)
    resident_bytes = _stage(pool, write_slice(tmp_path / "slice", adapter, load_spec), load_spec)
    local = load_spec.layers[0].local_experts
    elements = sum(
        pair.a.numel() + pair.b.numel() for (_, _, expert), pair in adapter.experts.items() if expert in local
    )
    scales = 2 * 3 * len(local)
    (resident,) = pool.residents()
    assert resident.expert_bytes == elements * width + scales * 4
    assert resident.dense_bytes == sum(p.a.numel() + p.b.numel() for p in adapter.dense.values()) * width
    assert resident_bytes == resident.expert_bytes + resident.dense_bytes == pool.num_bytes()


def test_equal_ranks_for_grouped_products(spec: ModelSpec, load_spec: MoEEPLoadSpec, tmp_path: Path) -> None:
    adapter = _adapter(spec, vary_ranks=True, dense=False)
    pool = _pool(spec, load_spec, rank_multiple=8)
    _stage(pool, write_slice(tmp_path / "slice", adapter, load_spec), load_spec)
    pool.activate(1, 0)
    pair = pool.active()[0].layers[1]["down"]
    a_erI, b_eOr = pair.stacked()
    assert a_erI.shape == (3, 8, 24)
    for slot, expert in enumerate(load_spec.layers[1].local_experts):
        original = adapter.experts.get((1, "down", expert))
        expected = original.delta if original else torch.zeros(32, 24)
        torch.testing.assert_close(pair.scale_e[slot] * b_eOr[slot] @ a_erI[slot], expected)


def test_life_of_a_generation(spec: ModelSpec, load_spec: MoEEPLoadSpec, tmp_path: Path) -> None:
    pool = _pool(spec, load_spec)
    path = write_slice(tmp_path / "slice", _adapter(spec), load_spec)
    first = _stage(pool, path, load_spec)
    assert _stage(pool, path, load_spec) == first
    assert pool.is_staged(1)
    assert pool.active() == {}
    _stage(pool, path, load_spec, generation=2)
    pool.activate(1, 5)
    assert [(r.generation, r.adapter_slot) for r in pool.residents()] == [(1, 5), (2, -1)]
    with pytest.raises(FailedPreconditionError, match="slot 5"):
        pool.discard(1)
    assert pool.discard(2) == first
    assert pool.discard(2) == 0
    before = pool.active()
    pool.retire(1)
    pool.retire(1)
    assert pool.active() == {}
    assert set(before) == {5}, "a step under way keeps what it reads"
    assert pool.num_bytes() == 0
    assert not pool.is_staged(1)


def test_other_placement_rank_or_model_is_stale(spec: ModelSpec, load_spec: MoEEPLoadSpec, tmp_path: Path) -> None:
    pool = _pool(spec, load_spec)
    for number, other in enumerate(
        (
            replace(load_spec, placement_id="f" * 8),
            replace(load_spec, ep_rank=0),
            replace(load_spec, model_digest="0" * 8),
        )
    ):
        path = write_slice(tmp_path / f"slice-{number}", _adapter(spec), other)
        with pytest.raises(StalePlacementError) as caught:
            _stage(pool, path, load_spec)
        assert caught.value.reason == "STALE_PLACEMENT"
    with pytest.raises(StalePlacementError):
        pool.stage(name="a", generation=1, path=path, placement_id="f" * 8)
    assert pool.residents() == []


def test_broken_slices_are_refused(spec: ModelSpec, load_spec: MoEEPLoadSpec, tmp_path: Path) -> None:
    pool = _pool(spec, load_spec)
    path = write_slice(tmp_path / "slice", _adapter(spec), load_spec)
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    with pytest.raises(InternalError):
        _stage(pool, path, load_spec)
    path.write_bytes(content.replace(b"experts.1.down.A", b"experts.9.down.A"))
    with pytest.raises(InternalError, match=r"experts\.(1|9)\.down"):
        _stage(pool, path, load_spec)
    path.write_bytes(content.replace(b'"shape":[2,20]', b'"shape":[4,10]'))
    with pytest.raises(InternalError, match=r"expected F32/F16/BF16 \[4, 20\]"):
        _stage(pool, path, load_spec)
    assert pool.residents() == []


def test_no_room(spec: ModelSpec, load_spec: MoEEPLoadSpec, tmp_path: Path) -> None:
    path = write_slice(tmp_path / "slice", _adapter(spec), load_spec)
    size = _stage(_pool(spec, load_spec), path, load_spec)
    pool = _pool(spec, load_spec, max_bytes=2 * size)
    for generation in (1, 2):
        _stage(pool, path, load_spec, generation)
    with pytest.raises(ResourceExhaustedError, match=f"needs {size} bytes") as caught:
        _stage(pool, path, load_spec, generation=3)
    assert caught.value.reason == "ADAPTER_MEMORY_EXHAUSTED"
    pool.discard(1)
    assert _stage(pool, path, load_spec, generation=3) == size


def test_memory_comes_back(spec: ModelSpec, load_spec: MoEEPLoadSpec, tmp_path: Path) -> None:
    """10 MB adapters, loaded and freed by two threads at once."""
    large = random_adapter(spec, 1, rank_of={"gate_up": 3000, "down": 5000}, dense=False)
    path = write_slice(tmp_path / "slice", large, load_spec)
    pool = _pool(spec, load_spec)
    size = _stage(pool, path, load_spec, generation=100)
    assert size > 10 << 20
    with_one = anonymous_bytes()

    def churn(first: int) -> None:
        for generation in range(first, first + 20):
            _stage(pool, path, load_spec, generation)
            pool.discard(generation)

    threads = [threading.Thread(target=churn, args=(first,)) for first in (0, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [resident.generation for resident in pool.residents()] == [100]
    assert anonymous_bytes() - with_one < size // 4
    pool.retire(100)
    assert with_one - anonymous_bytes() > 0.9 * size
