"""Slices to and from Redis, in chunks, several under way at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import redis
import structlog
import xxhash
from google.protobuf import json_format

from epilora.v1 import loader_service_pb2, types_pb2
from loader_service.allocation import PageAllocation
from loader_service.cache import BuiltSlices
from loader_service.redis_tier import (
    CHUNK_BYTES,
    Claim,
    Manifest,
    RedisTier,
    SharedSlice,
    chunk_key,
    make_manifest,
)
from loader_service.redis_values import ValueStream
from loader_service.slice_file import BLOCK_BYTES, SliceFile
from loader_service.writer import BuildProgress

log = structlog.get_logger(__name__)

_CHUNKS_UNDER_WAY = 8
_CONNECTIONS = 2
"""Of a pull: while what came by one is written, Redis sends by the other."""
_LEAST_BYTES_PER_SECOND = 20 << 20
"""A Redis that is slower than this is not worth waiting for: reading the adapter is faster."""


class SlicesLostError(Exception):
    """Redis has a manifest, but not all of its chunks, or damaged ones."""


class TooSlowError(redis.RedisError):
    """Redis answers, but too slowly."""


def pull(
    tier: RedisTier, key: str, manifest: Manifest, paths: Sequence[Path], progress: BuildProgress
) -> tuple[loader_service_pb2.Slice, ...]:
    """Writes the slices of a manifest to files, and renews their chunks' time to live.

    Raises:
        SlicesLostError: a chunk is missing, or its bytes are not those that were written.
        redis.RedisError, OSError: Redis failed or is too slow.
        ResourceExhaustedError: reason CACHE_FULL; the filesystem has no room.
        BuildCancelledError: progress was cancelled.
    """
    deadline = _Deadline(tier, manifest.size_bytes)
    pieces = list(enumerate(zip(paths, manifest.slices, strict=True)))
    failed = threading.Event()

    def pull_some(first: int) -> None:
        try:
            for index, (path, piece) in pieces[first::_CONNECTIONS]:
                if failed.is_set():
                    return
                with SliceFile(path, piece.size_bytes) as file:
                    names = [chunk_key(key, manifest.token, index, number) for number in range(len(piece.checksums))]
                    _pull_slice(tier, file, list(zip(names, piece.checksums, strict=True)), progress, deadline)
                    if file.digest() != piece.digest:
                        raise SlicesLostError(f"the chunks of ep_rank {piece.ep_rank} make another slice")
        except BaseException:
            failed.set()
            raise

    with (
        PageAllocation({path: piece.size_bytes for _, (path, piece) in pieces}),
        ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="redis-pull") as threads,
    ):
        list(threads.map(pull_some, range(_CONNECTIONS)))
    return tuple(
        loader_service_pb2.Slice(
            ep_rank=piece.ep_rank,
            placement_id=piece.placement_id,
            path=str(path),
            size_bytes=piece.size_bytes,
            tensor_bytes=piece.tensor_bytes,
            digest=piece.digest,
        )
        for path, piece in zip(paths, manifest.slices, strict=True)
    )


def push(tier: RedisTier, claim: Claim, built: BuiltSlices, progress: BuildProgress) -> bool:
    """Gives slices to Redis and publishes their manifest; False if the claim was lost.

    Raises:
        redis.RedisError, OSError: Redis failed, has no room or is too slow.
        BuildCancelledError: progress was cancelled.
    """
    names: list[str] = []
    try:
        shared = _push_chunks(tier, claim, built, progress, names)
        manifest = make_manifest(claim.token, shared, json_format.MessageToJson(built.report))
        if tier.commit(claim, manifest):
            return True
    except BaseException:
        _remove(tier, names)
        raise
    _remove(tier, names)
    return False


def _push_chunks(
    tier: RedisTier, claim: Claim, built: BuiltSlices, progress: BuildProgress, names: list[str]
) -> tuple[SharedSlice, ...]:
    """Writes all chunks, and appends each one's name before."""
    deadline = _Deadline(tier, sum(piece.size_bytes for piece in built.slices))
    shared = []
    for index, piece in enumerate(built.slices):
        checksums: list[str] = []
        with open(piece.path, "rb") as stream:
            while chunks := [chunk for _ in range(_CHUNKS_UNDER_WAY) if (chunk := stream.read(CHUNK_BYTES))]:
                progress.check()
                deadline.check()
                pipeline = tier.client.pipeline(transaction=False)
                for chunk in chunks:
                    names.append(chunk_key(claim.key, claim.token, index, len(checksums)))
                    pipeline.set(names[-1], chunk, px=tier.ttl_milliseconds)
                    checksums.append(xxhash.xxh3_64_hexdigest(chunk))
                pipeline.execute()
        shared.append(
            SharedSlice(
                ep_rank=piece.ep_rank,
                placement_id=piece.placement_id,
                size_bytes=piece.size_bytes,
                tensor_bytes=piece.tensor_bytes,
                digest=piece.digest,
                checksums=tuple(checksums),
            )
        )
    return tuple(shared)


def _remove(tier: RedisTier, names: Sequence[str]) -> None:
    """Removes chunks that nobody will ask for; if that fails, their time to live does."""
    with suppress(redis.RedisError, OSError):
        pipeline = tier.client.pipeline(transaction=False)
        for name in names:
            pipeline.unlink(name)
        pipeline.execute()


def report_of(manifest: Manifest) -> types_pb2.AdapterLoadReport:
    """The report of the build that made a manifest's slices. Nothing of the source was read for them here."""
    report = json_format.Parse(manifest.report, types_pb2.AdapterLoadReport())
    report.bytes_read = 0
    return report


def _pull_slice(
    tier: RedisTier, file: SliceFile, chunks: Sequence[tuple[str, str]], progress: BuildProgress, deadline: _Deadline
) -> None:
    """Writes the chunks with these names and checksums to a file."""
    with ValueStream(tier.client) as values:
        for name, _ in chunks[:_CHUNKS_UNDER_WAY]:
            values.ask(name, tier.ttl_milliseconds)
        for index, (name, checksum) in enumerate(chunks):
            progress.check()
            deadline.check()
            size = min(CHUNK_BYTES, file.size_bytes - file.position)
            if values.next_size() != size:
                raise SlicesLostError(f"{name} is missing, or of another size")
            for following, _ in chunks[index + _CHUNKS_UNDER_WAY : index + _CHUNKS_UNDER_WAY + 1]:
                values.ask(following, tier.ttl_milliseconds)
            digest = xxhash.xxh3_64()
            for start in range(0, size, BLOCK_BYTES):
                block = file.take(min(BLOCK_BYTES, size - start))
                values.read_into(block.data)
                digest.update(block.data)
            values.end()
            if digest.hexdigest() != checksum:
                raise SlicesLostError(f"{name} is damaged")
            progress.add(size)
    file.finish()


class _Deadline:
    """Of moving so many bytes."""

    def __init__(self, tier: RedisTier, num_bytes: int) -> None:
        self._seconds = tier.timeout_seconds + num_bytes / _LEAST_BYTES_PER_SECOND
        self._end = time.monotonic() + self._seconds

    def check(self) -> None:
        if time.monotonic() > self._end:
            raise TooSlowError(f"not done after {self._seconds:.1f} s")
