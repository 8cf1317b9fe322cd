"""Adapters over HTTP and from a Hub, against a server of our own: identity, resume, revisions, refusals."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from epilora.errors import NotFoundError, PermissionDeniedError, UnavailableError
from epilora.model_spec import ModelSpec
from epilora.placement import ExpertPlacement
from epilora.v1 import loader_service_pb2 as pb
from loader_service.downloads import Downloads
from loader_service.remote_stores import HttpStore
from loader_service.writer import BuildProgress
from tests.loader.loader_harness import (
    LoaderClient,
    big_adapter,
    build_request,
    loader_settings,
    running_loader,
    wide_model,
)
from tests.loader.remote_stub import COMMIT, RemoteStub

WEIGHTS = "adapter_model.safetensors"
MakeRequest = Callable[[str], pb.BuildSlicesRequest]


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[RemoteStub]:
    """Serves `remote/`, with an adapter of 3 MB at org/repo."""
    big_adapter(tmp_path / "remote" / "org" / "repo", lora_rank=2)
    with RemoteStub(tmp_path / "remote").running() as running:
        yield running


@pytest.fixture
def make_request(tmp_path: Path) -> MakeRequest:
    model: ModelSpec = wide_model(tmp_path / "model")
    placement = ExpertPlacement.make("linear", model, 2)
    return lambda source: build_request(source, model, placement)


@asynccontextmanager
async def running(tmp_path: Path, stub: RemoteStub, **changes: Any) -> AsyncIterator[LoaderClient]:
    """A loader that may read from the stub, and from its own disk for comparison."""
    options: dict[str, Any] = {
        "source_prefixes": [f"{stub.url}/org", "hf://org"],
        "hf_endpoint": stub.url,
        "download_dir": tmp_path / "downloads",
        **changes,
    }
    async with running_loader(loader_settings(tmp_path, [tmp_path / "remote"], **options)) as loader:
        yield loader


def digests(result: pb.BuildResult) -> list[str]:
    return [piece.digest for piece in result.slices]


async def test_http(tmp_path: Path, stub: RemoteStub, make_request: MakeRequest) -> None:
    source = f"{stub.url}/org/repo"
    async with running(tmp_path, stub) as loader:
        local = await loader.build(make_request(str(stub.directory / "org" / "repo")))
        remote = await loader.build(make_request(source))
        assert digests(remote) == digests(local)
        assert remote.pinned_source == ""
        assert stub.requests[f"GET {WEIGHTS}"] == 1
        again = await loader.build(make_request(f"{source}/"))
        assert again.report.cache_hit, "its state is known without its bytes"
        assert stub.requests[f"GET {WEIGHTS}"] == 1
        weights = next((tmp_path / "downloads" / "files").glob(f"*/{WEIGHTS}"))
        expected = hashlib.sha256((stub.directory / "org" / "repo" / WEIGHTS).read_bytes()).hexdigest()
        assert weights.with_name(f"{WEIGHTS}.sha256").read_text() == f"{expected}\n"
        for lease in (remote.lease_id, again.lease_id, local.lease_id):
            await loader.release(lease)
        assert (await loader.build(make_request(source))).report.bytes_read > 0
        assert stub.requests[f"GET {WEIGHTS}"] == 1, "the file is still on disk"


async def test_a_download_goes_on_where_it_broke_off(
    tmp_path: Path, stub: RemoteStub, make_request: MakeRequest
) -> None:
    async with running(tmp_path, stub) as loader:
        expected = digests(await loader.build(make_request(str(stub.directory / "org" / "repo"))))
        stub.break_after = 1_000_000
        assert digests(await loader.build(make_request(f"{stub.url}/org/repo"))) == expected
    assert (stub.requests[f"GET {WEIGHTS}"], stub.requests[f"GET {WEIGHTS} range"]) == (1, 3)


async def test_a_download_that_keeps_breaking_off_is_an_error_and_is_not_lost(
    tmp_path: Path, stub: RemoteStub, make_request: MakeRequest
) -> None:
    async with running(tmp_path, stub) as loader:
        stub.break_after = 300_000
        error = await loader.error(make_request(f"{stub.url}/org/repo"))
        assert isinstance(error, UnavailableError)
        assert error.reason == "SOURCE_UNAVAILABLE"
        stub.break_after = 0
        before = stub.requests[f"GET {WEIGHTS} range"]
        assert (await loader.build(make_request(f"{stub.url}/org/repo"))).slices
        assert stub.requests[f"GET {WEIGHTS} range"] == before + 1, "the next try goes on"
        assert stub.requests[f"GET {WEIGHTS}"] == 1


async def test_a_file_that_changes_is_another_source(
    tmp_path: Path, stub: RemoteStub, make_request: MakeRequest
) -> None:
    source, path = f"{stub.url}/org/repo", stub.directory / "org" / "repo" / WEIGHTS
    async with running(tmp_path, stub) as loader:
        first = await loader.build(make_request(source))
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        second = await loader.build(make_request(source))
        assert not second.report.cache_hit
        assert second.adapter_digest != first.adapter_digest
        assert digests(second)[1] != digests(first)[1]


def test_a_file_that_changes_while_it_is_read(tmp_path: Path, stub: RemoteStub) -> None:
    store = HttpStore(f"{stub.url}/org/repo", timeout_seconds=5)
    file = store.look(WEIGHTS)
    assert file is not None
    (stub.directory / "org" / "repo" / WEIGHTS).write_bytes(b"x" * file.size_bytes)
    downloads = Downloads(tmp_path / "files", 1 << 30)
    with (
        pytest.raises(UnavailableError, match="was changed while it was being loaded"),
        downloads.fetched("0" * 32, store, [file], BuildProgress()),
    ):
        pass
    store.close()


async def test_the_hub(tmp_path: Path, stub: RemoteStub, make_request: MakeRequest) -> None:
    async with running(tmp_path, stub) as loader:
        local = await loader.build(make_request(str(stub.directory / "org" / "repo")))
        remote = await loader.build(make_request("hf://org/repo"))
        assert digests(remote) == digests(local)
        assert remote.pinned_source == f"hf://org/repo@{COMMIT}"
        weights = next((tmp_path / "downloads" / "hub").glob(f"models--org--repo/snapshots/{COMMIT}/{WEIGHTS}"))
        assert weights.is_symlink(), "the Hub's own layout"
        asked = stub.requests.total()
        pinned = await loader.build(make_request(remote.pinned_source))
        assert pinned.report.cache_hit
        assert stub.requests.total() == asked, "a commit is known without asking"
        shutil.move(stub.directory / "org" / "repo", stub.directory / "org" / "nested" / "folder")
        nested = await loader.build(make_request("hf://org/nested@main/folder"))
        assert digests(nested) == digests(local)
        assert nested.pinned_source == f"hf://org/nested@{COMMIT}/folder"


async def test_shards(tmp_path: Path, stub: RemoteStub, make_request: MakeRequest) -> None:
    repository = stub.directory / "org" / "repo"
    async with running(tmp_path, stub) as loader:
        expected = digests(await loader.build(make_request(str(repository))))
        tensors = load_file(repository / WEIGHTS)
        (repository / WEIGHTS).unlink()
        names = sorted(tensors)
        shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
        for shard, held in shards.items():
            save_file({name: tensors[name] for name in held}, repository / shard)
        weight_map = ", ".join(f'"{name}": "{shard}"' for shard, held in shards.items() for name in held)
        (repository / f"{WEIGHTS}.index.json").write_text(f'{{"weight_map": {{{weight_map}}}}}')
        for source in (f"{stub.url}/org/repo", "hf://org/repo"):
            assert digests(await loader.build(make_request(source))) == expected
        (repository / "two.safetensors").unlink()
        error = await loader.error(make_request(f"{stub.url}/org/repo"))
        assert (error.reason, "two.safetensors" in error.message) == ("NO_ADAPTER_WEIGHTS", True)


@pytest.mark.parametrize(
    "case",
    [
        ("{url}/elsewhere/repo", PermissionDeniedError, "SOURCE_OUTSIDE_ROOTS"),
        ("{url}/organisation/repo", PermissionDeniedError, "SOURCE_OUTSIDE_ROOTS"),
        ("hf://other/repo", PermissionDeniedError, "SOURCE_OUTSIDE_ROOTS"),
        ("s3://bucket/x", PermissionDeniedError, "SOURCE_OUTSIDE_ROOTS"),
        ("hf://org/none", NotFoundError, "SOURCE_NOT_FOUND"),
        ("hf://org/repo@none", NotFoundError, "SOURCE_NOT_FOUND"),
        ("hf://org/repo@main/none", Exception, "NO_ADAPTER_CONFIG"),
        ("{url}/org/none", Exception, "NO_ADAPTER_CONFIG"),
        ("{url}/org/../elsewhere", Exception, "BAD_SOURCE"),
        ("{url}/org/%2e%2e/elsewhere", Exception, "BAD_SOURCE"),
        ("{url}/org/repo?x=1", Exception, "BAD_SOURCE"),
        ("hf://org", Exception, "BAD_SOURCE"),
        ("hf://org/a/b/c", Exception, "SOURCE_NOT_FOUND"),
    ],
)
async def test_refused(
    tmp_path: Path, stub: RemoteStub, make_request: MakeRequest, case: tuple[str, type[Exception], str]
) -> None:
    source, kind, reason = case
    async with running(tmp_path, stub) as loader:
        error = await loader.error(make_request(source.format(url=stub.url)))
        assert (error.reason, isinstance(error, kind)) == (reason, True), error


@pytest.mark.parametrize(
    ("status", "reason"), [(401, "SOURCE_FORBIDDEN"), (503, "SOURCE_UNAVAILABLE"), (302, "SOURCE_UNREADABLE")]
)
async def test_a_server_that_refuses(
    tmp_path: Path, stub: RemoteStub, make_request: MakeRequest, status: int, reason: str
) -> None:
    async with running(tmp_path, stub) as loader:
        stub.status = status
        assert (await loader.error(make_request(f"{stub.url}/org/repo"))).reason == reason


async def test_s3_without_its_package(tmp_path: Path, stub: RemoteStub, make_request: MakeRequest) -> None:
    pytest.importorskip("fsspec")
    try:
        import s3fs  # noqa: F401
    except ImportError:
        async with running(tmp_path, stub, source_prefixes=["s3://bucket"]) as loader:
            error = await loader.error(make_request("s3://bucket/x"))
            assert (error.reason, "epilora[s3]" in error.message) == ("SOURCE_UNSUPPORTED", True)


def test_old_downloads_make_room(tmp_path: Path, stub: RemoteStub) -> None:
    store = HttpStore(f"{stub.url}/org/repo", timeout_seconds=5)
    file = store.look(WEIGHTS)
    assert file is not None
    downloads = Downloads(tmp_path / "files", int(2.5 * file.size_bytes))
    held = []
    for name in "abca":
        with downloads.fetched(name * 32, store, [file], BuildProgress()) as directory:
            assert (directory / WEIGHTS).stat().st_size == file.size_bytes
            held.append(sorted(path.name[0] for path in (tmp_path / "files").iterdir() if path.is_dir()))
    assert held == [["a"], ["a", "b"], ["b", "c"], ["a", "c"]]
    store.close()


async def test_one_download_for_two_builds(tmp_path: Path, stub: RemoteStub, make_request: MakeRequest) -> None:
    both = make_request(f"{stub.url}/org/repo")
    one = pb.BuildSlicesRequest()
    one.CopyFrom(both)
    del one.load_specs[1]
    async with running(tmp_path, stub) as loader:
        results = await asyncio.gather(loader.build(both), loader.build(one))
        assert results[0].slices[0].digest == results[1].slices[0].digest
    assert stub.requests[f"GET {WEIGHTS}"] == 1
