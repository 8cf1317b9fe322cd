"""Where adapters may lie, and files that are not what they should be: a precise error, and nothing left behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from epilora.errors import EpiloraError, InvalidArgumentError, NotFoundError, PermissionDeniedError
from epilora.model_spec import ModelSpec
from epilora.placement import ExpertPlacement
from tests.loader.loader_harness import LoaderClient, build_request, loader_settings, running_loader
from tests.unit.epilora_adapters import write_adapter
from tests.unit.epilora_layouts import tensors_of
from tests.unit.epilora_models import model_spec

MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
WEIGHTS = "adapter_model.safetensors"


class Setup:
    """A loader, its root, and calls for adapters under it."""

    def __init__(self, loader: LoaderClient, root: Path, model: ModelSpec) -> None:
        self.loader = loader
        self.root = root
        self.model = model
        self.placement = ExpertPlacement.make("linear", model, 2)

    def adapter(self, name: str = "a", **changes: Any) -> Path:
        tensors = {
            f"{MODULE}.lora_A.weight": np.ones((3, 8), np.float32),
            f"{MODULE}.lora_B.weight": np.ones((8, 3), np.float32),
        }
        return write_adapter(self.root / name, tensors, **changes)

    def request(self, source: Path | str, **options: Any) -> Any:
        return build_request(source, self.model, self.placement, **options)

    async def error(self, source: Path | str) -> EpiloraError:
        error = await self.loader.error(self.request(source))
        state = await self.loader.cache()
        assert (state.num_entries, state.used_bytes, state.num_leases) == (0, 0, 0)
        return error


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    root = tmp_path / "root"
    root.mkdir()
    async with running_loader(loader_settings(tmp_path, [root])) as loader:
        yield Setup(loader, root, model_spec(tmp_path / "model"))


async def test_path_and_url(setup: Setup) -> None:
    adapter = setup.adapter("with space")
    by_path = await setup.loader.build(setup.request(adapter))
    for url in (adapter.as_uri(), f"file://localhost{str(adapter).replace(' ', '%20')}", f"{adapter}/../with space"):
        again = await setup.loader.build(setup.request(url))
        assert again.report.cache_hit, "one source under several names is one entry"
        assert again.adapter_digest == by_path.adapter_digest


@pytest.mark.parametrize(
    "source", ["", "relative/path", "ftp://host/x", "file://host/x", "file:///x?y", "https://host/a/../b", "/x\0y"]
)
async def test_not_a_path(setup: Setup, source: str) -> None:
    error = await setup.error(source)
    assert isinstance(error, InvalidArgumentError)
    assert (error.reason, error.field) == ("BAD_SOURCE", "source")


async def test_a_path_that_is_too_long(setup: Setup) -> None:
    """It is absolute, so what is wrong is said: the system takes 4,095 bytes, 4,096 with the zero at the end."""
    for path, num_bytes in (("/" + "a" * 4_999, 5_000), ("/" + "é" * 2_048, 4_097), ("/" + "a/" * 2_047 + "a", 4_096)):
        for source in (path, f"file://{path}"):
            error = await setup.error(source)
            assert isinstance(error, InvalidArgumentError)
            assert (error.reason, error.field) == ("BAD_SOURCE", "source")
            assert f"a path of {num_bytes} bytes is too long, expected at most 4095" in error.message
            assert "absolute" not in error.message
            assert len(error.message) < 400
    longest = await setup.error(f"{setup.root}/".ljust(4_095, "/"))
    assert longest.reason == "NO_ADAPTER_CONFIG"


@pytest.mark.parametrize("source", ["ftp://host/", "relative/"])
async def test_a_long_source_is_shown_in_part(setup: Setup, source: str) -> None:
    error = await setup.error(source.ljust(5_000, "a"))
    assert "expected an absolute path" in error.message
    assert len(error.message) < 400


async def test_outside_the_roots(setup: Setup, tmp_path: Path) -> None:
    outside = shutil.copytree(setup.adapter(), tmp_path / "outside")
    (setup.root / "link").symlink_to(outside)
    beside = shutil.copytree(outside, tmp_path / "root-beside")
    for source in (outside, setup.root / "link", f"{setup.root}/../outside", beside, "/etc", "/no/such/place"):
        error = await setup.error(source)
        assert isinstance(error, PermissionDeniedError), source
        assert error.reason == "SOURCE_OUTSIDE_ROOTS"


@pytest.mark.parametrize("name", [WEIGHTS, "adapter_config.json"])
async def test_a_file_that_links_outside(setup: Setup, tmp_path: Path, name: str) -> None:
    adapter = setup.adapter()
    shutil.move(adapter / name, tmp_path / name)
    (adapter / name).symlink_to(tmp_path / name)
    error = await setup.error(adapter)
    assert isinstance(error, PermissionDeniedError)


async def test_links_inside_the_root_are_followed(setup: Setup) -> None:
    """The cache of huggingface_hub: snapshots link to blobs."""
    adapter = setup.adapter("snapshot")
    (setup.root / "blobs").mkdir()
    shutil.move(adapter / WEIGHTS, setup.root / "blobs" / "abc")
    (adapter / WEIGHTS).symlink_to("../blobs/abc")
    assert (await setup.loader.build(setup.request(adapter))).slices


async def test_slices_outlive_the_folder(setup: Setup) -> None:
    """Nothing is read again later: not from the folder, and not through names that lead elsewhere now."""
    adapter = setup.adapter()
    slices = (await setup.loader.build(setup.request(adapter))).slices
    before = [Path(piece.path).read_bytes() for piece in slices]
    shutil.rmtree(adapter)
    assert [Path(piece.path).read_bytes() for piece in slices] == before
    assert (await setup.loader.error(setup.request(adapter))).reason == "SOURCE_NOT_FOUND"


async def test_missing(setup: Setup) -> None:
    for name in ("none", "n" * 300):
        error = await setup.error(setup.root / name)
        assert isinstance(error, NotFoundError)
        assert error.reason == "SOURCE_NOT_FOUND"
    adapter = setup.adapter()
    (adapter / WEIGHTS).rename(adapter / "adapter_model.bin")
    assert (await setup.error(adapter)).reason == "BAD_TORCH_FILE"
    (adapter / "adapter_model.bin").rename(adapter / "other.bin")
    error = await setup.error(adapter)
    assert (error.reason, "found other.bin" in error.message) == ("NO_ADAPTER_WEIGHTS", True)
    (adapter / "adapter_config.json").unlink()
    assert (await setup.error(adapter)).reason == "NO_ADAPTER_CONFIG"


async def test_errors_fit_into_a_status(setup: Setup) -> None:
    """Names of files are bytes and paths may be long; what comes back is the error, not a failure to send it."""
    adapter = setup.adapter()
    os.rename(os.fsencode(adapter / WEIGHTS), os.fsencode(adapter) + b"/\xff.safetensors")
    error = await setup.error(adapter)
    assert (error.reason, "\\udcff.safetensors" in error.message) == ("NO_ADAPTER_WEIGHTS", True)
    error = await setup.error("/" + "deep/" * 800)
    assert error.reason == "SOURCE_OUTSIDE_ROOTS"
    assert len(error.message) < 1600


async def test_a_fifo_does_not_hang(setup: Setup) -> None:
    adapter = setup.adapter()
    (adapter / WEIGHTS).unlink()
    os.mkfifo(adapter / WEIGHTS)
    assert (await setup.error(adapter)).reason == "SOURCE_UNREADABLE"
    (adapter / WEIGHTS).unlink()
    (adapter / WEIGHTS).mkdir()
    assert (await setup.error(adapter)).reason == "SOURCE_UNREADABLE"


BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda raw: b"", "has 0 bytes"),
    "cut in the header": (lambda raw: raw[:40], "is truncated"),
    "cut by one byte": (lambda raw: raw[:-1], "is truncated"),
    "trailing byte": (lambda raw: raw + b"\0", "has 1 bytes after its last tensor"),
    "huge header": (lambda raw: (1 << 60).to_bytes(8, "little") + raw[8:], "says its header has"),
    "LFS pointer": (lambda raw: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "LFS pointer"),
    "renamed pickle": (lambda raw: b"PK\x03\x04" + raw, "PyTorch pickle"),
    "not JSON": (lambda raw: raw[:8] + b"!" + raw[9:], "not JSON"),
}


@pytest.mark.parametrize("kind", BROKEN)
async def test_broken_files(setup: Setup, kind: str) -> None:
    adapter = setup.adapter()
    change, text = BROKEN[kind]
    (adapter / WEIGHTS).write_bytes(change((adapter / WEIGHTS).read_bytes()))
    error = await setup.error(adapter)
    assert isinstance(error, InvalidArgumentError)
    assert error.reason == "BAD_SAFETENSORS"
    assert text in error.message
    (adapter / WEIGHTS).unlink()
    assert (await setup.loader.build(setup.request(setup.adapter()))).slices, "the loader serves on"


async def test_report(setup: Setup) -> None:
    report = (await setup.loader.build(setup.request(setup.adapter(peft_version="0.19.1", r=2)))).report
    assert (report.expert_layout, report.producer, report.file_dtype) == ("none", "0.19.1", "F32")
    assert (report.num_tensors, report.num_tensors_used) == (2, 2)
    assert list(report.dense_modules) == ["model.layers.0.self_attn.q_proj"]
    assert (report.min_lora_rank, report.max_lora_rank) == (3, 3)
    assert report.file_bytes == (setup.root / "a" / WEIGHTS).stat().st_size
    assert report.bytes_read == (3 * 8 + 8 * 3) * 4
    assert list(report.rank_differences) == ["model.layers.0.self_attn.q_proj: config 2, tensors 3"]


async def test_an_untrained_adapter_is_warned_of(setup: Setup) -> None:
    tensors = {
        f"{MODULE}.lora_A.weight": np.ones((3, 8), np.float32),
        f"{MODULE}.lora_B.weight": np.zeros((8, 3), np.float32),
    }
    report = (await setup.loader.build(setup.request(write_adapter(setup.root / "zero", tensors)))).report
    assert len(report.warnings) == 1
    assert "1 of 1 pairs" in report.warnings[0]
    assert "changes nothing: it was saved untrained" in report.warnings[0]


@pytest.mark.parametrize("layout", ["F2a", "F2b", "F3", "F5"])
@pytest.mark.parametrize("block_bytes", [256, 1 << 21])
async def test_zero_blocks_of_stacked_experts_are_counted(
    setup: Setup, layout: str, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expert 2 of layer 1 was never chosen while training: its B is zero, in both projections."""
    for module in ("slice_file", "writer"):
        monkeypatch.setattr(f"loader_service.{module}.BLOCK_BYTES", block_bytes)
    tensors, changes = tensors_of(setup.model, layout, 3)
    for name, array in tensors.items():
        if "layers.1" not in name:
            continue
        if layout == "F2a" and "lora_B" in name:
            array.reshape(array.shape[0], 3, 4)[:, :, 2] = 0
        elif layout == "F2b" and "lora_A" in name:
            # Swapped: A holds the transposed B.
            array.reshape(4, 3, -1)[2] = 0
        elif layout in ("F3", "F5") and name.removesuffix(".weight").endswith("_B"):
            array[2] = 0
    adapter = write_adapter(setup.root / "zeros", tensors, **changes)
    report = (await setup.loader.build(setup.request(adapter))).report
    assert [warning.split(" have a matrix")[0] for warning in report.warnings] == ["2 of 16 pairs"]
    assert "of expert 2." in report.warnings[0]


async def test_partial_is_another_entry(setup: Setup) -> None:
    adapter = setup.adapter()
    tensors = {
        f"{MODULE}.lora_A.weight": np.ones((3, 8), np.float32),
        f"{MODULE}.lora_B.weight": np.ones((8, 3), np.float32),
        "base_model.model.score.lora_A.weight": np.ones((3, 8), np.float32),
        "base_model.model.score.lora_B.weight": np.ones((64, 3), np.float32),
    }
    write_adapter(adapter, tensors)
    assert (await setup.error(adapter)).reason == "UNKNOWN_TENSORS"
    report = (await setup.loader.build(setup.request(adapter, allow_partial=True))).report
    assert list(report.ignored_tensors) == [
        "base_model.model.score.lora_A.weight",
        "base_model.model.score.lora_B.weight",
    ]
    assert (report.num_tensors, report.num_tensors_used) == (4, 2)
    await setup.loader.error(setup.request(adapter))


async def test_bad_requests(setup: Setup) -> None:
    good = setup.request(setup.adapter())
    for change, reason in (
        (lambda request: request.ClearField("load_specs"), "BAD_LOAD_SPEC"),
        (lambda request: request.load_specs.append(request.load_specs[0]), "BAD_LOAD_SPEC"),
        (lambda request: setattr(request.load_specs[1], "placement_id", "other"), "BAD_LOAD_SPEC"),
        (lambda request: setattr(request.load_specs[1], "model_digest", "other"), "BAD_LOAD_SPEC"),
        (lambda request: setattr(request.load_specs[0].layers[0], "gate_up_layout", 2), "BAD_LOAD_SPEC"),
        (lambda request: setattr(request.layout_hints, "orientation", 9), "BAD_LAYOUT_HINTS"),
        (lambda request: setattr(request.dense_modules[0], "in_features", 0), "BAD_DENSE_MODULE"),
    ):
        request = type(good)()
        request.CopyFrom(good)
        change(request)
        error = await setup.loader.error(request)
        assert isinstance(error, InvalidArgumentError)
        assert error.reason == reason


async def test_shards_and_torch_files_give_the_slices_of_one_safetensors_file(setup: Setup) -> None:
    torch = pytest.importorskip("torch")
    generator, tensors = np.random.default_rng(0), {}
    for layer, expert in ((layer, expert) for layer in (0, 1) for expert in range(4)):
        for name, shape in (("up_proj.lora_A", (3, 8)), ("up_proj.lora_B", (6, 3)), ("down_proj.lora_A", (3, 6))):
            key = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
            tensors[key] = generator.standard_normal(shape).astype(np.float32)
        tensors[key.replace("lora_A", "lora_B")] = generator.standard_normal((8, 3)).astype(np.float32)
    whole, shards, pickled = (write_adapter(setup.root / name, tensors) for name in ("whole", "shards", "pickled"))
    for adapter in (shards, pickled):
        (adapter / WEIGHTS).unlink()
    names = sorted(tensors)
    for number in (1, 2):
        part = {name: tensors[name] for name in names[number % 2 :: 2]}
        save_file(part, shards / f"adapter_model-0000{number}-of-00002.safetensors")
    torch.save({name: torch.from_numpy(array) for name, array in tensors.items()}, pickled / "adapter_model.bin")
    slices = []
    for adapter in (whole, shards, pickled):
        result = await setup.loader.build(setup.request(adapter))
        assert result.report.num_tensors == result.report.num_tensors_used == len(tensors)
        slices.append([load_file(piece.path) for piece in result.slices])
    for other in slices[1:]:
        for expected, got in zip(slices[0], other, strict=True):
            assert expected.keys() == got.keys()
            for name, array in expected.items():
                np.testing.assert_array_equal(got[name], array, err_msg=name)


async def test_a_link_of_a_shard_to_the_outside_is_refused(setup: Setup, tmp_path: Path) -> None:
    adapter = setup.adapter()
    (adapter / WEIGHTS).rename(tmp_path / "outside.safetensors")
    (adapter / "adapter_model-00001-of-00001.safetensors").symlink_to(tmp_path / "outside.safetensors")
    assert (await setup.error(adapter)).reason == "SOURCE_OUTSIDE_ROOTS"
