"""Two loaders that share a Redis, and every way in which Redis can fail them."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from epilora.errors import InvalidArgumentError
from epilora.model_spec import ModelSpec
from epilora.placement import ExpertPlacement
from epilora.v1 import loader_service_pb2 as pb
from loader_service.cache import SliceCache
from loader_service.redis_tier import Claim, RedisTier, lock_key, make_manifest, manifest_key
from loader_service.request import BuildRequest
from loader_service.shared_build import SharedBuilder
from loader_service.writer import BuildProgress
from tests.loader.loader_harness import (
    LoaderClient,
    big_adapter,
    build_request,
    loader_settings,
    running_loader,
    wide_model,
)
from tests.loader.redis_server import RedisServer

KEY = "0" * 32


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def model(tmp_path: Path) -> ModelSpec:
    return wide_model(tmp_path / "model")


@pytest.fixture
def request_for(tmp_path: Path, model: ModelSpec) -> pb.BuildSlicesRequest:
    """About 6 MB in two slices, so that each has several chunks."""
    adapter = big_adapter(tmp_path / "adapters" / "a", lora_rank=4)
    return build_request(adapter, model, ExpertPlacement.make("linear", model, 2))


@asynccontextmanager
async def node(tmp_path: Path, name: str, url: str, **changes: Any) -> AsyncIterator[LoaderClient]:
    """A loader with a cache of its own."""
    (tmp_path / name).mkdir(exist_ok=True)
    settings = loader_settings(tmp_path / name, [tmp_path / "adapters"], cache=url, **changes)
    async with running_loader(settings) as loader:
        yield loader


async def pushed(loader: LoaderClient, count: int) -> None:
    """Waits until the loader has given so many entries to Redis."""
    deadline = time.monotonic() + 10
    while (await loader.cache()).num_redis_pushes < count:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_one_node_builds_and_the_other_pulls(
    tmp_path: Path, server: RedisServer, request_for: pb.BuildSlicesRequest
) -> None:
    async with node(tmp_path, "a", server.url) as first, node(tmp_path, "b", server.url) as second:
        results = await asyncio.gather(first.build(request_for), second.build(request_for))
        states = await asyncio.gather(first.cache(), second.cache())
        assert sorted(state.num_builds for state in states) == [0, 1], "one reads the source"
        assert sorted(state.num_redis_pulls for state in states) == [0, 1], "the other pulls"
        assert sorted(result.report.bytes_read > 0 for result in results) == [False, True]
        a, b = ([Path(piece.path).read_bytes() for piece in result.slices] for result in results)
        assert a == b
        assert results[0].slices[0].path != results[1].slices[0].path
        fields = [[(p.ep_rank, p.placement_id, p.tensor_bytes, p.digest) for p in result.slices] for result in results]
        assert fields[0] == fields[1]
        with server.client() as client:
            keys = {key.decode() for key in client.scan_iter()}
            assert all(0 < client.pttl(key) <= 86400_000 for key in keys)
        assert len([key for key in keys if key.endswith(":manifest")]) == 1
        assert not [key for key in keys if key.endswith(":lock")]
        assert len(keys) > 4
        assert all(key.startswith("epilora:{") for key in keys), "the braces are what a cluster hashes"
        for loader, result in zip((first, second), results, strict=True):
            assert await loader.release(result.lease_id) > 0
            assert (await loader.cache()).used_bytes == 0


async def test_tls_and_a_password(tmp_path: Path, request_for: pb.BuildSlicesRequest) -> None:
    server = RedisServer(tmp_path / "redis", tls=True)
    try:
        server.start()
        async with node(tmp_path, "a", server.url) as first, node(tmp_path, "b", server.url) as second:
            await first.build(request_for)
            await pushed(first, 1)
            result = await second.build(request_for)
            assert (result.report.bytes_read, (await second.cache()).num_redis_pulls) == (0, 1)
        untrusted = server.url.partition("?")[0]
        async with node(tmp_path, "c", untrusted) as third:
            assert (await third.build(request_for)).report.bytes_read > 0
            assert (await third.cache()).num_redis_errors == 1, "a certificate that nobody vouches for"
    finally:
        server.kill()


@pytest.mark.parametrize("damage", ["missing", "damaged", "manifest"])
async def test_what_redis_lost_is_built_again(
    tmp_path: Path, server: RedisServer, request_for: pb.BuildSlicesRequest, damage: str
) -> None:
    async with node(tmp_path, "a", server.url) as first, node(tmp_path, "b", server.url) as second:
        expected = await first.build(request_for)
        await pushed(first, 1)
        with server.client() as client:
            chunk = next(key for key in client.scan_iter() if b"}:" in key and b":1}" in key)
            if damage == "missing":
                client.delete(chunk)
            elif damage == "damaged":
                client.setrange(chunk, 100, b"???")
            else:
                client.set(next(client.scan_iter("*:manifest")), b"{")
        result = await second.build(request_for)
        assert [piece.digest for piece in result.slices] == [piece.digest for piece in expected.slices]
        state = await second.cache()
        assert (state.num_builds, state.num_redis_losses) == (1, damage != "manifest")
        await pushed(second, 1)
        async with node(tmp_path, "c", server.url) as third:
            assert (await third.build(request_for)).report.bytes_read == 0
            assert (await third.cache()).num_redis_pulls == 1


class _KillingProgress(BuildProgress):
    """Kills Redis once some bytes have been moved."""

    def __init__(self, server: RedisServer) -> None:
        super().__init__()
        self._server = server

    def check(self) -> None:
        if self.bytes_done > 0:
            self._server.kill()
        super().check()


async def test_redis_killed_in_the_middle_of_a_pull(
    tmp_path: Path, server: RedisServer, request_for: pb.BuildSlicesRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loader_service.redis_transfer._CHUNKS_UNDER_WAY", 1)
    async with node(tmp_path, "a", server.url) as first:
        expected = await first.build(request_for)
        await pushed(first, 1)
    settings = loader_settings(tmp_path, [tmp_path / "adapters"], cache=server.url)
    cache = SliceCache(tmp_path / "cache", 1 << 30)
    cache.open()
    builder = SharedBuilder(settings, cache)
    try:
        request = BuildRequest.from_proto(request_for)
        built = await asyncio.to_thread(
            lambda: builder.build(request, builder.identify(request.source), _KillingProgress(server), lease="lease")
        )
        assert [piece.digest for piece in built.slices] == [piece.digest for piece in expected.slices]
        assert builder.counters.num_errors == 1
        assert builder.counters.num_pulled == 0
        assert cache.state().num_builds == 1
        assert cache.state().used_bytes == sum(piece.size_bytes for piece in built.slices), (
            "nothing is left of the pull"
        )
    finally:
        builder.close()
        cache.close()


async def test_redis_restarted_between_loads(
    tmp_path: Path, server: RedisServer, request_for: pb.BuildSlicesRequest
) -> None:
    async with node(tmp_path, "a", server.url) as first, node(tmp_path, "b", server.url) as second:
        lease = (await first.build(request_for)).lease_id
        await pushed(first, 1)
        await second.release((await second.build(request_for)).lease_id)
        server.kill()
        server.start()
        result = await second.build(request_for)
        assert result.report.bytes_read > 0, "the new one is empty"
        await pushed(second, 1)
        await first.release(lease)
        assert (await first.build(request_for)).report.bytes_read == 0
        assert (await first.cache()).num_redis_errors == (await second.cache()).num_redis_errors == 0


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru"])
async def test_redis_without_room(tmp_path: Path, request_for: pb.BuildSlicesRequest, policy: str) -> None:
    server = RedisServer(tmp_path / "redis", "--maxmemory", "4mb", "--maxmemory-policy", policy)
    try:
        server.start()
        async with node(tmp_path, "a", server.url) as first, node(tmp_path, "b", server.url) as second:
            expected = await first.build(request_for)
            deadline = time.monotonic() + 10
            while (state := await first.cache()).num_leases > 1:
                assert time.monotonic() < deadline, "it is still being given to Redis"
                await asyncio.sleep(0.02)
            assert state.num_redis_errors == (policy == "noeviction")
            if policy == "noeviction":
                with server.client() as client:
                    assert client.dbsize() == 0, "nothing of what will not be published"
            result = await second.build(request_for)
            assert [piece.digest for piece in result.slices] == [piece.digest for piece in expected.slices]
            assert (await second.cache()).num_builds == 1
    finally:
        server.kill()


async def test_no_redis_at_all(tmp_path: Path, request_for: pb.BuildSlicesRequest) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # not listening: connections are refused
        async with node(tmp_path, "a", f"redis://127.0.0.1:{taken.getsockname()[1]}") as loader:
            assert (await loader.build(request_for)).report.bytes_read > 0
            assert (await loader.cache()).num_redis_errors == 1


async def test_a_redis_that_never_answers(tmp_path: Path, request_for: pb.BuildSlicesRequest) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        async with node(tmp_path, "a", url, cache_timeout_seconds=0.2) as loader:
            first = await loader.build(request_for)
            assert first.report.bytes_read > 0
            await loader.release(first.lease_id)
            await loader.build(request_for)
            assert (await loader.cache()).num_redis_errors == 1, "the second load does not wait for it again"


async def test_a_build_elsewhere_that_takes_too_long(
    tmp_path: Path, server: RedisServer, request_for: pb.BuildSlicesRequest
) -> None:
    async with node(tmp_path, "a", server.url) as first:
        await first.build(request_for)
        await pushed(first, 1)
    with server.client() as client:
        manifest = next(client.scan_iter("*:manifest"))
        client.delete(manifest)
        client.set(manifest.replace(b"manifest", b"lock"), b"another loader")
    async with node(tmp_path, "b", server.url, cache_wait_seconds=0.2) as second:
        assert (await second.build(request_for)).report.bytes_read > 0
        state = await second.cache()
        assert (state.num_builds, state.num_redis_pushes, state.num_redis_errors) == (1, 0, 0)


def _tier(server: RedisServer) -> RedisTier:
    return RedisTier(server.url, ttl_seconds=60, timeout_seconds=5, wait_seconds=5)


def test_a_builder_that_lost_its_lock_cannot_publish(server: RedisServer) -> None:
    slow, other = _tier(server), _tier(server)
    stale = slow.find_or_claim(KEY, BuildProgress())
    assert isinstance(stale, Claim)
    with server.client() as client:
        client.delete(lock_key(KEY))  # as if it had not been renewed in time
        fresh = other.find_or_claim(KEY, BuildProgress())
        assert isinstance(fresh, Claim)
        assert not slow.commit(stale, make_manifest(stale.token, (), "{}"))
        assert client.get(manifest_key(KEY)) is None
        slow.give_up(stale)
        assert client.get(lock_key(KEY)) == fresh.token.encode(), "a lock is only given up by its holder"
        assert other.commit(fresh, make_manifest(fresh.token, (), "{}"))
        assert client.get(lock_key(KEY)) is None
    found = slow.find_or_claim(KEY, BuildProgress())
    assert not isinstance(found, Claim)
    assert found is not None
    assert found.token == fresh.token
    slow.lose(KEY, make_manifest(stale.token, (), "{}"))
    assert slow.find_or_claim(KEY, BuildProgress()) == found, "only the manifest that was pulled is forgotten"


def test_a_lock_is_renewed_while_its_holder_works(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loader_service.redis_tier.LOCK_SECONDS", 0.3)
    tier = _tier(server)
    claim = tier.find_or_claim(KEY, BuildProgress())
    assert isinstance(claim, Claim)
    with server.client() as client:
        for _ in range(10):
            time.sleep(0.1)
            assert client.get(lock_key(KEY)) == claim.token.encode()
        tier.give_up(claim)
        assert client.get(lock_key(KEY)) is None


def test_a_url_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="EPILORA_CACHE is not a URL of Redis"):
        RedisTier("memcached://somewhere", ttl_seconds=1, timeout_seconds=1, wait_seconds=1)
