"""Slices to and from Redis, in chunks, several under way at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import redis
import structlog
import xxhash
from google.protobuf import json_format

from epilora.v1 import loader_service_pb2, types_pb2
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
from loader_service.slice_file import SliceFile
from loader_service.writer import BuildProgress

log = structlog.get_logger(__name__)

_CHUNKS_UNDER_WAY = 8
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
    for index, (path, piece) in enumerate(zip(paths, manifest.slices, strict=True)):
        with SliceFile(path, piece.size_bytes) as file:
            names = [chunk_key(key, manifest.token, index, number) for number in range(len(piece.checksums))]
            _pull_slice(tier, file, list(zip(names, piece.checksums, strict=True)), progress, deadline)
            if file.written != piece.size_bytes or file.digest() != piece.digest:
                raise SlicesLostError(f"the chunks of ep_rank {piece.ep_rank} make another slice")
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
    """Writes the chunks with these names and checksums to a file; a thread writes some while others are read."""
    with ThreadPoolExecutor(1, thread_name_prefix="redis-pull") as writer:
        writing: list[Future[None]] = []
        for first in range(0, len(chunks), _CHUNKS_UNDER_WAY):
            progress.check()
            deadline.check()
            values = _get(tier, chunks[first : first + _CHUNKS_UNDER_WAY])
            for part in writing:
                part.result()
            writing = [writer.submit(file.append, np.frombuffer(value, dtype=np.uint8)) for value in values]
            progress.bytes_done += sum(map(len, values))
        for part in writing:
            part.result()


def _get(tier: RedisTier, chunks: Sequence[tuple[str, str]]) -> list[bytes]:
    """Chunks by their names, checked."""
    pipeline = tier.client.pipeline(transaction=False)
    for name, _ in chunks:
        pipeline.getex(name, px=tier.ttl_milliseconds)
    values: list[bytes | None] = pipeline.execute()
    for (name, checksum), value in zip(chunks, values, strict=True):
        if value is None or xxhash.xxh3_64_hexdigest(value) != checksum:
            raise SlicesLostError(f"{name} is {'missing' if value is None else 'damaged'}")
    return [value for value in values if value is not None]


class _Deadline:
    """Of moving so many bytes."""

    def __init__(self, tier: RedisTier, num_bytes: int) -> None:
        self._seconds = tier.timeout_seconds + num_bytes / _LEAST_BYTES_PER_SECOND
        self._end = time.monotonic() + self._seconds

    def check(self) -> None:
        if time.monotonic() > self._end:
            raise TooSlowError(f"not done after {self._seconds:.1f} s")
