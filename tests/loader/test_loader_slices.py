"""Slices that the loader writes hold, bit for bit, what the normal form says, for every writer and placement."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from epilora.adapters.normal_form import NormalForm
from epilora.families import Projection
from epilora.load_spec import MoEEPLoadSpec
from epilora.model_spec import ModelSpec
from epilora.placement import ExpertPlacement
from epilora.slices import read_slice_header
from epilora.v1 import loader_service_pb2 as pb
from tests.loader.loader_harness import LoaderClient, build_request, loader_settings, running_loader
from tests.unit.epilora_adapters import AdapterArrays, resolve

FIXTURES = Path(__file__).parent.parent / "fixtures"
MODELS = ("qwen3moe-T", "qwen2moe-T", "mixtral-T")


def _adapters(model: str) -> list[Path]:
    return sorted(path for path in FIXTURES.glob(f"adapters/*/{model}-*") if path.is_dir())


def _placements(model: ModelSpec, path: Path) -> list[ExpertPlacement]:
    explicit = path / "placement.json"
    explicit.write_text(json.dumps({"all_layers": [[2, 0], [1, 2], [3, 0]]}))
    choices = [("linear", 1), ("linear", 3), ("round_robin", 2), ("linear", 5), (str(explicit), 3)]
    return [ExpertPlacement.make(strategy, model, ranks) for strategy, ranks in choices]


@pytest.mark.parametrize("model_name", MODELS)
async def test_slices_equal_the_normal_form(model_name: str, tmp_path: Path) -> None:
    model = ModelSpec.from_directory(FIXTURES / "models" / model_name)
    async with running_loader(loader_settings(tmp_path, [FIXTURES])) as loader:
        for adapter in _adapters(model_name):
            for placement in _placements(model, tmp_path):
                await _check(loader, adapter, model, placement)
        state = await loader.cache()
        assert (state.num_entries, state.num_leases, state.used_bytes) == (0, 0, 0)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


async def test_tensors_larger_than_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with real sizes: matrices cut into blocks, columns taken in several passes, threads, pages in advance."""
    blocks = {"slice_file.BLOCK_BYTES": 256, "writer.BLOCK_BYTES": 256, "gather.GATHER_BYTES": 1024}
    least = {"writer.TRANSPOSE_BYTES": 512, "writer._BYTES_PER_THREAD": 1, "build.LEAST_BYTES": 1}
    for name, size in {**blocks, **least}.items():
        monkeypatch.setattr(f"loader_service.{name}", size)
    model = ModelSpec.from_directory(FIXTURES / "models" / "qwen3moe-T")
    async with running_loader(loader_settings(tmp_path, [FIXTURES])) as loader:
        for adapter in _adapters("qwen3moe-T"):
            for placement in _placements(model, tmp_path)[1:3]:
                await _check(loader, adapter, model, placement)


async def _check(loader: LoaderClient, adapter: Path, model: ModelSpec, placement: ExpertPlacement) -> None:
    result = await loader.build(build_request(adapter, model, placement))
    form, arrays = resolve(adapter, model), AdapterArrays(adapter)
    assert [piece.ep_rank for piece in result.slices] == list(range(placement.num_ranks))
    for piece in result.slices:
        spec = MoEEPLoadSpec.make(model, placement, piece.ep_rank)
        _check_slice(piece, spec, form, arrays)
        metadata = read_slice_header(Path(piece.path)).metadata
        assert (metadata.model_digest, metadata.placement_id) == (model.digest, placement.placement_id)
        assert metadata.ep_rank == piece.ep_rank
    assert await loader.release(result.lease_id) == sum(piece.size_bytes for piece in result.slices)
    assert not Path(result.slices[0].path).exists()


def _check_slice(piece: pb.Slice, spec: MoEEPLoadSpec, form: NormalForm, arrays: AdapterArrays) -> None:
    path = Path(piece.path)
    assert path.stat().st_size == piece.size_bytes
    assert path.stat().st_mode & 0o777 == 0o600
    tensors = {name: array for name, array in load_file(path).items() if not name.startswith("padding.")}
    assert sum(array.nbytes for array in tensors.values()) == piece.tensor_bytes
    for layer in spec.layers:
        for projection in Projection:
            pairs = form.experts.get((layer.moe.layer, projection), {})
            slots = [pairs.get(expert) for expert in layer.local_experts]
            prefix = f"experts.{layer.moe.layer}.{projection}"
            if not any(slots):
                assert not [name for name in tensors if name.startswith(f"{prefix}.")]
                continue
            a, b = tensors.pop(f"{prefix}.A"), tensors.pop(f"{prefix}.B")
            ranks, scales = tensors.pop(f"{prefix}.lora_rank"), tensors.pop(f"{prefix}.scale")
            assert ranks.dtype == np.int32
            assert scales.dtype == np.float32
            offsets = np.cumsum([0, *ranks])
            out = len(b) // offsets[-1]
            for slot, pair in enumerate(slots):
                assert ranks[slot] == (pair.lora_rank if pair else 0)
                assert scales[slot] == np.float32(pair.scale if pair else 0)
                if pair is not None:
                    block = b[out * offsets[slot] : out * offsets[slot + 1]].reshape(out, ranks[slot])
                    np.testing.assert_array_equal(a[offsets[slot] : offsets[slot + 1]], arrays.matrix(pair.a))
                    np.testing.assert_array_equal(block, arrays.matrix(pair.b))
    for module, pair in form.dense.items():
        np.testing.assert_array_equal(tensors.pop(f"dense.{module}.A"), arrays.matrix(pair.a))
        np.testing.assert_array_equal(tensors.pop(f"dense.{module}.B"), arrays.matrix(pair.b))
        np.testing.assert_array_equal(tensors.pop(f"dense.{module}.scale"), [np.float32(pair.scale)])
    assert not tensors


async def test_only_the_bytes_of_the_ranks_asked_for_are_read(tmp_path: Path) -> None:
    """Per-expert layout, 2 ranks: a rank reads its half of the expert tensors, and all dense ones."""
    model = ModelSpec.from_directory(FIXTURES / "models" / "qwen3moe-T")
    adapter = FIXTURES / "adapters" / "peft-0.17.1-transformers-4.57.3" / "qwen3moe-T-all"
    placement = ExpertPlacement.make("round_robin", model, 2)
    form = resolve(adapter, model)
    dense = sum(region.size_bytes for pair in form.dense.values() for region in (pair.a, pair.b))
    experts = sum(region.size_bytes for pair in form.pairs() for region in (pair.a, pair.b)) - dense
    async with running_loader(loader_settings(tmp_path, [FIXTURES])) as loader:
        one = await loader.build(build_request(adapter, model, placement, ep_ranks=[1]))
        assert one.report.bytes_read == dense + experts // 2
        both = await loader.build(build_request(adapter, model, placement))
        assert both.report.bytes_read == dense + experts
        assert both.slices[1].digest == one.slices[0].digest
