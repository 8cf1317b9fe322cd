"""Matrices that are read together: the same slices as one by one, and the same findings about values."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from epilora.adapters.keys import pair_tensors
from epilora.adapters.normal_form import GridPairs, NormalForm
from epilora.adapters.open_adapter import OpenAdapter, open_adapter
from epilora.adapters.slice_plan import SlicePlan, SliceSpec, plan_slices
from epilora.adapters.values import zero_warnings
from epilora.errors import AbortedError, AdapterFormatError
from epilora.load_spec import MoEEPLoadSpec
from epilora.model_spec import ModelSpec
from epilora.placement import ExpertPlacement
from epilora.slices import LAYOUT_VERSION, SliceMetadata
from loader_service.write_result import WriteResult
from loader_service.writer import BuildProgress, write_slices
from tests.unit.epilora_adapters import write_adapter
from tests.unit.epilora_models import model_spec

LAYERS, E, D, F, R = 2, 4, 8, 6, 3
WIDTHS = {"gate_proj": (D, F), "up_proj": (D, F), "down_proj": (F, D)}
NAME = "base_model.model.model.layers.{}.mlp.experts.{}.{}.lora_{}.weight"


def _tensors() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    tensors = {}
    for layer in range(LAYERS):
        for expert in range(E):
            for name, (fan_in, fan_out) in WIDTHS.items():
                for side, shape in (("A", (R, fan_in)), ("B", (fan_out, R))):
                    tensors[NAME.format(layer, expert, name, side)] = generator.normal(size=shape).astype(np.float32)
    return tensors


@pytest.fixture
def model(tmp_path: Path) -> ModelSpec:
    return model_spec(tmp_path / "model")


def _plan(form: NormalForm, model: ModelSpec, num_ranks: int) -> SlicePlan:
    placement = ExpertPlacement.make("linear", model, num_ranks)
    specs = [MoEEPLoadSpec.make(model, placement, rank) for rank in range(num_ranks)]
    return plan_slices(form, [SliceSpec(layers=spec.layers, metadata=_metadata(spec)) for spec in specs])


def _metadata(spec: MoEEPLoadSpec) -> SliceMetadata:
    return SliceMetadata(
        layout_version=LAYOUT_VERSION,
        model_digest=spec.model_digest,
        placement_id=spec.placement_id,
        ep_rank=spec.ep_rank,
    )


def _write(adapter: OpenAdapter, plan: SlicePlan, directory: Path) -> tuple[list[bytes], WriteResult]:
    directory.mkdir()
    paths = [directory / f"{number}" for number in range(len(plan.layouts))]
    result = write_slices(plan, adapter.weights.descriptors, paths, BuildProgress())
    return [path.read_bytes() for path in paths], result


@pytest.fixture(autouse=True, params=[1, 16])
def _cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many, blocks are written by threads of their own."""
    monkeypatch.setattr("loader_service.writer.os.cpu_count", lambda: request.param)


@pytest.mark.parametrize("block_bytes", [100, 512, 1 << 20])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_same_slices_as_one_by_one(
    model: ModelSpec, tmp_path: Path, block_bytes: int, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loader_service.gather.GATHER_BYTES", block_bytes)
    with open_adapter(write_adapter(tmp_path / "adapter", _tensors())) as adapter:
        grid = adapter.resolve(model)
        assert all(isinstance(pairs, GridPairs) for pairs in grid.experts.values())
        careful = adapter.resolve(model, paired=pair_tensors(adapter.header.tensors))
        slices, result = _write(adapter, _plan(grid, model, num_ranks), tmp_path / "grid")
        expected, one_by_one = _write(adapter, _plan(careful, model, num_ranks), tmp_path / "careful")
    assert slices == expected
    assert result.digests == one_by_one.digests
    assert result.bytes_read == one_by_one.bytes_read
    assert (result.seen, result.nonzero) == (one_by_one.seen, one_by_one.nonzero)


def test_values_that_are_not_finite_are_named(model: ModelSpec, tmp_path: Path) -> None:
    tensors, wrong = _tensors(), NAME.format(1, 2, "up_proj", "B")
    tensors[wrong][-1, -1] = np.nan
    with open_adapter(write_adapter(tmp_path / "adapter", tensors)) as adapter:
        plan = _plan(adapter.resolve(model), model, 2)
        with pytest.raises(AdapterFormatError, match=wrong) as caught:
            _write(adapter, plan, tmp_path / "slices")
    assert caught.value.reason == "NON_FINITE"


def test_matrices_that_are_zero_are_counted(model: ModelSpec, tmp_path: Path) -> None:
    tensors, zero = _tensors(), NAME.format(0, 3, "down_proj", "B")
    tensors[zero][:] = 0
    tensors[NAME.format(0, 1, "down_proj", "B")][:-1] = 0
    with open_adapter(write_adapter(tmp_path / "adapter", tensors)) as adapter:
        form = adapter.resolve(model)
        _, result = _write(adapter, _plan(form, model, 1), tmp_path / "slices")
        index = next(tensor.index for tensor in adapter.header.tensors if tensor.name == zero)
    assert result.seen - result.nonzero == {index}
    (warning,) = zero_warnings(form, result.is_zero)
    assert warning.startswith("1 of 24 pairs")


def test_a_source_that_became_shorter(model: ModelSpec, tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "adapter", _tensors())
    with open_adapter(directory) as adapter:
        plan = _plan(adapter.resolve(model), model, 2)
        os.truncate(directory / "adapter_model.safetensors", adapter.header.file_bytes - 40)
        with pytest.raises(AbortedError) as caught:
            _write(adapter, plan, tmp_path / "slices")
    assert caught.value.reason == "SOURCE_CHANGED"
