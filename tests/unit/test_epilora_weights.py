"""Shards and files of torch.save: the same tensors as one safetensors file, and clean errors for anything else."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from epilora.adapters.torch_archive import TorchArchive
from epilora.adapters.weights import WEIGHTS_NAME, AdapterWeights
from epilora.errors import AdapterFormatError

torch = pytest.importorskip("torch")
LIMIT = 1 << 20
INDEX = f"{WEIGHTS_NAME}.index.json"


def _open_file(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None


def _read(directory: Path, limit: int = LIMIT) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Name -> (dtype, shape, bytes) of all tensors, read from where the entries say."""
    with AdapterWeights.open(directory, _open_file, max_header_bytes=limit) as weights:
        header = weights.tensors()
        assert [tensor.index for tensor in header.tensors] == list(range(len(header.tensors)))
        return {
            tensor.name: (
                tensor.dtype,
                tensor.shape,
                os.pread(weights.descriptors[tensor.file], tensor.size_bytes, tensor.offset),
            )
            for tensor in header.tensors
        }


def _tensors() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn((3, 5), generator=generator),
        "b": torch.randn((2, 4), generator=generator).bfloat16(),
        "c": torch.randn((7,), generator=generator).half(),
        "d": torch.randn((2, 3, 4), generator=generator),
        "e": torch.zeros((0, 4)),
    }


def _expected(tensors: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
    return {
        name: (names[tensor.dtype], tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes())
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_torch_files(tmp_path: Path, name: str, protocol: int) -> None:
    tensors = _tensors()
    torch.save(OrderedDict(tensors), tmp_path / name, pickle_protocol=protocol)
    assert _read(tmp_path) == _expected(tensors)


def test_parts_of_one_storage_and_parameters(tmp_path: Path) -> None:
    whole = torch.arange(24.0)
    tensors = {"first": whole[:12].view(3, 4), "second": whole[12:].view(2, 6), "w": torch.nn.Parameter(whole[4:8])}
    torch.save(tensors, tmp_path / "adapter_model.bin")
    assert _read(tmp_path) == _expected({name: tensor.detach() for name, tensor in tensors.items()})


def test_a_pickle_that_would_run_code_is_refused_and_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "marker"),))

    torch.save({"a": torch.ones(2), "x": Evil()}, tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterFormatError, match=r"asks for posix\.mkdir") as caught:
        _read(tmp_path)
    assert caught.value.reason == "UNSAFE_PICKLE"
    assert not (tmp_path / "marker").exists()


def _archive(path: Path, content: bytes, **entries: bytes) -> None:
    with zipfile.ZipFile(path / "adapter_model.bin", "w") as archive:
        archive.writestr("x/data.pkl", content)
        for name, data in entries.items():
            archive.writestr(f"x/{name}", data)


BAD_PICKLES: dict[str, bytes] = {
    "empty": b"",
    "no end": b"\x80\x02}",
    "an unknown instruction": b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",
    "a list": pickle.dumps([1, 2], 2),
    "a number as tensor": pickle.dumps({"a": 1}, 2),
    "a memo far away": b"\x80\x02}r\xff\xff\xff\x7fh\x05.",
    "stack underflow": b"\x80\x02\x85R.",
    "long text": b"\x80\x02X\xff\xff\xff\x7fabc.",
}


@pytest.mark.parametrize("kind", BAD_PICKLES)
def test_bad_pickles(tmp_path: Path, kind: str) -> None:
    _archive(tmp_path, BAD_PICKLES[kind])
    with pytest.raises(AdapterFormatError) as caught:
        _read(tmp_path)
    assert caught.value.reason == "BAD_TORCH_FILE"


def test_every_byte_of_a_pickle_may_be_wrong(tmp_path: Path) -> None:
    """Nothing but clean errors, or tensors inside the file."""
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(2, 3), "b": torch.ones(4)}, buffer)
    content = buffer.getvalue()
    generator = np.random.default_rng(0)
    for position in generator.integers(0, len(content), 600):
        changed = bytearray(content)
        changed[position] = generator.integers(256)
        (tmp_path / "adapter_model.bin").write_bytes(changed)
        try:
            tensors = _read(tmp_path)
        except AdapterFormatError:
            continue
        assert all(len(data) <= len(content) for _, _, data in tensors.values())


@pytest.mark.parametrize(
    ("tensors", "reason", "text"),
    [
        ({"a": torch.ones(3, 4).t()}, "BAD_TORCH_FILE", "save it contiguous"),
        ({"a": torch.ones(3, dtype=torch.int64)}, "UNSUPPORTED_DTYPE", "LongStorage"),
        ({"state_dict": {"a": torch.ones(3)}}, "BAD_TORCH_FILE", "save the state dict alone"),
        ([torch.ones(3)], "BAD_TORCH_FILE", "expected a dict of tensors"),
        ({"n" * 300: torch.ones(3)}, "BAD_TORCH_FILE", "expected a name of 256 characters"),
    ],
)
def test_torch_files_that_are_refused(tmp_path: Path, tensors: Any, reason: str, text: str) -> None:
    torch.save(tensors, tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterFormatError, match=text) as caught:
        _read(tmp_path)
    assert caught.value.reason == reason


def test_truncated_compressed_and_old_torch_files(tmp_path: Path) -> None:
    file = tmp_path / "adapter_model.bin"
    torch.save({"a": torch.ones(100)}, file)
    whole = file.read_bytes()
    for content in (whole[:-1], whole[:200], b"", b"version https://git-lfs.github.com/spec/v1\n", whole[1:]):
        file.write_bytes(content)
        with pytest.raises(AdapterFormatError) as caught:
            _read(tmp_path)
        assert caught.value.reason == "BAD_TORCH_FILE"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"\x80\x02}." * 100)
    with pytest.raises(AdapterFormatError, match="compressed or encrypted"):
        _read(tmp_path)
    torch.save({"a": torch.ones(100)}, file, _use_new_zipfile_serialization=False)
    with pytest.raises(AdapterFormatError, match="convert it to safetensors"):
        _read(tmp_path)


def test_a_directory_over_the_limit_is_not_read(tmp_path: Path) -> None:
    torch.save({f"tensor-{number}": torch.ones(1) for number in range(200)}, tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterFormatError, match="the limit is 4096"):
        _read(tmp_path, limit=4096)
    with (tmp_path / "adapter_model.bin").open("rb") as stream:
        archive = TorchArchive(stream.fileno(), where="x", max_header_bytes=LIMIT)
        assert len(archive.tensors()) == 200


def _shards(path: Path, *, index: bool = True) -> dict[str, np.ndarray]:
    arrays = {name: np.full((2, 3), number, np.float32) for number, name in enumerate("abcde")}
    names = [f"adapter_model-{number:05}-of-00002.safetensors" for number in (1, 2)]
    weight_map = {name: names[number % 2] for number, name in enumerate(arrays)}
    for file in names:
        save_file({name: arrays[name] for name in arrays if weight_map[name] == file}, path / file)
    if index:
        (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return arrays


@pytest.mark.parametrize("index", [True, False])
def test_shards(tmp_path: Path, index: bool) -> None:
    arrays = _shards(tmp_path, index=index)
    assert _read(tmp_path) == {name: ("F32", (2, 3), array.tobytes()) for name, array in arrays.items()}


def test_shards_that_do_not_fit_together(tmp_path: Path) -> None:
    _shards(tmp_path)
    first = tmp_path / "adapter_model-00001-of-00002.safetensors"
    second = tmp_path / "adapter_model-00002-of-00002.safetensors"
    good = json.loads((tmp_path / INDEX).read_text())["weight_map"]

    def error() -> AdapterFormatError:
        with pytest.raises(AdapterFormatError) as caught:
            _read(tmp_path)
        return caught.value

    for weight_map, reason in (
        ({**good, "a": second.name}, "BAD_INDEX"),
        ({**good, "f": second.name}, "BAD_INDEX"),
        ({name: file for name, file in good.items() if name != "b"}, "BAD_INDEX"),
        ({"a": "../other/x.safetensors"}, "BAD_INDEX"),
        ({"a": "/etc/passwd"}, "BAD_INDEX"),
        ({"a": 3}, "BAD_INDEX"),
        ([], "BAD_INDEX"),
        ({"a": "adapter_model-00003-of-00003.safetensors"}, "NO_ADAPTER_WEIGHTS"),
    ):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        assert error().reason == reason
    (tmp_path / INDEX).unlink()
    second.rename(tmp_path / "kept")
    assert error().reason == "NO_ADAPTER_WEIGHTS"
    save_file({"a": np.ones((2, 3), np.float32)}, second)
    assert error().reason == "DUPLICATE_TENSOR"
    first.unlink()
    assert error().reason == "NO_ADAPTER_WEIGHTS"


def test_what_is_loaded_first_and_what_is_not_taken_for_weights(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "adapter_model.bin")
    save_file({"b": np.ones(2, np.float32)}, tmp_path / WEIGHTS_NAME)
    assert list(_read(tmp_path)) == ["b"]
    (tmp_path / WEIGHTS_NAME).rename(tmp_path / "step-100.safetensors")
    (tmp_path / "adapter_model.bin").unlink()
    with pytest.raises(AdapterFormatError, match=r"found step-100\.safetensors, which is not named"):
        _read(tmp_path)
