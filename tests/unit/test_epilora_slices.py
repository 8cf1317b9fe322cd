"""Slice files: alignment, names, and that safetensors itself reads them."""

from __future__ import annotations

import fcntl
import mmap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from epilora.errors import InternalError, UnavailableError
from epilora.families import Projection
from epilora.slices import (
    ALIGNMENT,
    SliceMetadata,
    SliceTensor,
    dense_tensor_name,
    expert_tensor_name,
    lay_out,
    lay_out_alike,
    open_slice,
    read_slice_header,
)

METADATA = SliceMetadata(layout_version=1, model_digest="aa", placement_id="bb", ep_rank=3)


def _write(path: Path) -> Path:
    tensors = [
        SliceTensor(name=expert_tensor_name(0, Projection.GATE_UP, "A"), dtype="F32", shape=(3, 5)),
        SliceTensor(name=expert_tensor_name(0, Projection.GATE_UP, "lora_rank"), dtype="I32", shape=(2,)),
        SliceTensor(name=dense_tensor_name("model.layers.0.mlp.gate", "B"), dtype="F16", shape=(4, 0)),
        SliceTensor(name=dense_tensor_name("model.layers.0.mlp.gate", "A"), dtype="F32", shape=(16,)),
    ]
    layout = lay_out(tensors, METADATA)
    image = bytearray(layout.size_bytes)
    image[: len(layout.header)] = layout.header
    for tensor in layout.tensors.values():
        values = np.arange(tensor.size_bytes, dtype=np.uint8)
        image[tensor.offset : tensor.offset + tensor.size_bytes] = values.tobytes()
    path.write_bytes(image)
    assert layout.tensor_bytes == 60 + 8 + 0 + 64
    return path


def test_tensors_are_aligned_and_safetensors_reads_them(tmp_path: Path) -> None:
    file = _write(tmp_path / "slice")
    header = read_slice_header(file)
    assert header.metadata == METADATA
    assert all(tensor.offset % ALIGNMENT == 0 for tensor in header.tensors.values())
    with safe_open(file, framework="numpy") as opened:
        assert opened.metadata() == METADATA.to_strings()
        names = opened.keys()
        assert {name for name in names if not name.startswith("padding.")} == set(header.tensors)
        for name, tensor in header.tensors.items():
            array = opened.get_tensor(name)
            assert array.shape == tensor.shape
            assert array.tobytes() == np.arange(tensor.size_bytes, dtype=np.uint8).tobytes()


@pytest.mark.parametrize("size", [0, 7, 40, -1])
def test_torn_files_are_refused(tmp_path: Path, size: int) -> None:
    file = _write(tmp_path / "slice")
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(InternalError, match="cannot be read"):
        read_slice_header(file)
    with pytest.raises(UnavailableError, match="is gone"):
        read_slice_header(tmp_path / "none")


def test_layouts_that_differ_in_metadata_only() -> None:
    tensors = [SliceTensor(name=f"t.{number}", dtype="F32", shape=(3, number)) for number in range(1, 5)]
    layout = lay_out(tensors, METADATA)
    for ep_rank in (0, 9, 10, 10**40):
        other = replace(METADATA, ep_rank=ep_rank)
        alike = lay_out_alike(layout, other)
        expected = lay_out(tensors, other)
        if len(expected.header) == len(layout.header):
            assert alike == expected
        else:
            assert alike is None
    assert lay_out_alike(layout, replace(METADATA, ep_rank=10**70)) is None, "its header is longer by a line"


def test_a_slice_that_is_read_keeps_its_bytes(tmp_path: Path) -> None:
    path = _write(tmp_path / "slice")
    expected = path.read_bytes()
    with open_slice(path) as stream, path.open("rb") as loader:
        with pytest.raises(BlockingIOError):
            fcntl.flock(loader, fcntl.LOCK_EX | fcntl.LOCK_NB)
        view = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    with path.open("rb") as loader:
        with pytest.raises(BlockingIOError):
            fcntl.flock(loader, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        assert view[:] == expected
        view.close()
        fcntl.flock(loader, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with pytest.raises(UnavailableError, match="is gone"):
        open_slice(path)
