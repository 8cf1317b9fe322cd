"""The tier behind the slice cache: a Redis that carries slices between nodes (docs/slices.md).

Slices lie there in chunks; a manifest, written last, says which. One loader builds an entry while it holds the entry's
lock; the others wait for its manifest and pull. The lock's token is part of the names of its chunks, and a manifest is
only taken from the holder of the lock: a builder that was too slow and lost it can neither publish nor overwrite.

Redis is a help, never a need: whatever goes wrong here, the caller builds the slices itself.

    epilora:{<key>}:lock           token of the builder, gone after LOCK_SECONDS without renewal
    epilora:{<key>}:manifest       JSON, see Manifest
    epilora:{<key>:<n>}:<token>:<i>   chunk i of slice n: the braces keep a slice in one slot of a cluster
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import redis
import structlog
from pydantic import BaseModel, ConfigDict, ValidationError
from redis.backoff import NoBackoff
from redis.retry import Retry

from epilora.errors import InvalidArgumentError
from loader_service.build import TierCounters
from loader_service.writer import BuildProgress

log = structlog.get_logger(__name__)

CHUNK_BYTES = 1 << 20
"""Of a value; Redis is fastest with values of about this size."""
LOCK_SECONDS = 10.0
_POLL_SECONDS = 0.05
_PAUSE_SECONDS = 5.0
"""After an error Redis is left alone for so long: a load must not wait for timeouts again and again."""
_FORMAT = 1

_CLAIM = """
if redis.call('EXISTS', KEYS[2]) == 1 then return 2 end
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 1 end
return 0
"""
_RENEW = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end return 0"
_GIVE_UP = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"
_COMMIT = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
redis.call('DEL', KEYS[1])
return 1
"""


class SharedSlice(BaseModel):
    """One slice of a manifest."""

    model_config = ConfigDict(frozen=True)

    ep_rank: int
    placement_id: str
    size_bytes: int
    tensor_bytes: int
    digest: str
    """xxh3-128 of all bytes."""
    checksums: tuple[str, ...]
    """xxh3-64 of each chunk."""


class Manifest(BaseModel):
    """What Redis holds of one entry."""

    model_config = ConfigDict(frozen=True)

    format: int
    token: str
    """Of the builder; part of the chunks' names."""
    slices: tuple[SharedSlice, ...]
    report: str
    """AdapterLoadReport as JSON."""

    @property
    def size_bytes(self) -> int:
        """Of all slices."""
        return sum(piece.size_bytes for piece in self.slices)


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """The right to build an entry."""

    key: str
    token: str
    _stop: threading.Event = field(default_factory=threading.Event)


class RedisTier:
    """Thread-safe. Methods raise no errors of Redis: they count them and answer None or False."""

    def __init__(self, url: str, *, ttl_seconds: float, timeout_seconds: float, wait_seconds: float) -> None:
        """Args:
        url: redis://, rediss:// or unix://, with credentials; TLS files as parameters (?ssl_ca_certs=...).
        ttl_seconds: after which Redis forgets what nobody used.
        timeout_seconds: of connecting and of each answer.
        wait_seconds: for another loader's build.

        Raises:
            InvalidArgumentError: reason BAD_CACHE_URL.
        """
        try:
            self.client: redis.Redis = redis.Redis.from_url(
                url,
                socket_timeout=timeout_seconds,
                socket_connect_timeout=timeout_seconds,
                protocol=2,  # what ValueStream reads
                # Once: a connection from before a restart of Redis is no error.
                retry=Retry(NoBackoff(), 1),
            )
        except (ValueError, TypeError, redis.RedisError) as error:
            raise InvalidArgumentError(
                f"EPILORA_CACHE is not a URL of Redis: {error}; expected redis://, rediss:// or unix://",
                reason="BAD_CACHE_URL",
            ) from None
        self.counters = TierCounters()
        self.ttl_milliseconds = int(ttl_seconds * 1000)
        self.timeout_seconds = timeout_seconds
        self._wait_seconds = wait_seconds
        self._paused_until = 0.0
        self._renewals: set[threading.Thread] = set()

    def find_or_claim(self, key: str, progress: BuildProgress) -> Manifest | Claim | None:
        """The manifest of an entry, waiting for a build of another loader; else the right to build it.

        Returns:
            None if Redis is away or the other loader takes too long: build, and keep it to yourself.

        Raises:
            BuildCancelledError: progress was cancelled.
        """
        deadline = time.monotonic() + self._wait_seconds
        token = uuid.uuid4().hex
        while time.monotonic() < deadline:
            progress.check()
            state = self._do(lambda: self._run(_CLAIM, key, token, int(LOCK_SECONDS * 1000)))
            if state is None:
                return None
            if state == 1:
                return self._claimed(key, token)
            if state == 2:
                manifest = self._read_manifest(key)
                if manifest is not None:
                    return manifest
            progress.wait(_POLL_SECONDS)
        log.warning("another loader builds for too long; building here", seconds=self._wait_seconds)
        return None

    def commit(self, claim: Claim, manifest: Manifest) -> bool:
        """Publishes a manifest and gives the claim up; False if the claim was lost."""
        value = manifest.model_dump_json()
        done = self._do(lambda: self._run(_COMMIT, claim.key, claim.token, value, self.ttl_milliseconds))
        claim._stop.set()
        if done:
            self.counters.num_pushed += 1
        return bool(done)

    def give_up(self, claim: Claim) -> None:
        """Lets others build. Harmless after commit."""
        if not claim._stop.is_set():
            claim._stop.set()
            # Also right after an error, such as one of lack of room: others need not wait until the lock expires.
            with suppress(redis.RedisError, OSError):
                self._run(_GIVE_UP, claim.key, claim.token)

    def lose(self, key: str, manifest: Manifest) -> None:
        """Forgets a manifest whose chunks are not all there, unless it was replaced."""
        self.counters.num_lost += 1
        current = self._read_manifest(key)
        if current is not None and current.token == manifest.token:
            self._do(lambda: self.client.delete(manifest_key(key)))

    @contextmanager
    def counted_errors(self) -> Iterator[None]:
        """Swallows what Redis raises: logs and counts it, and leaves Redis alone for a while."""
        try:
            yield
        except (redis.RedisError, OSError) as error:
            self.counters.num_errors += 1
            self._paused_until = time.monotonic() + _PAUSE_SECONDS
            log.warning("Redis failed; slices are built here", why=str(error) or type(error).__name__)

    def close(self) -> None:
        """Closes the connections; claims were given up before."""
        self.client.close()

    def _do(self, call: Any) -> Any:
        """What a call returns; None while Redis is left alone, and if it fails."""
        if time.monotonic() < self._paused_until:
            return None
        with self.counted_errors():
            return call()
        return None

    def _run(self, script: str, key: str, *arguments: str | int) -> Any:
        return self.client.eval(script, 2, lock_key(key), manifest_key(key), *arguments)

    def _read_manifest(self, key: str) -> Manifest | None:
        raw = self._do(lambda: self.client.getex(manifest_key(key), px=self.ttl_milliseconds))
        if raw is None:
            return None
        try:
            manifest = Manifest.model_validate_json(raw)
        except ValidationError:
            manifest = None
        if manifest is None or manifest.format != _FORMAT:
            log.error("dropped a manifest that cannot be read", key=key)
            self._do(lambda: self.client.delete(manifest_key(key)))
            return None
        return manifest

    def _claimed(self, key: str, token: str) -> Claim:
        claim = Claim(key=key, token=token)
        threading.Thread(target=self._renew, args=(claim,), name="redis-lock", daemon=True).start()
        return claim

    def _renew(self, claim: Claim) -> None:
        while not claim._stop.wait(LOCK_SECONDS / 3):
            if self._do(lambda: self._run(_RENEW, claim.key, claim.token, int(LOCK_SECONDS * 1000))) == 0:
                return


def lock_key(key: str) -> str:
    """Name of an entry's lock."""
    return f"epilora:{{{key}}}:lock"


def manifest_key(key: str) -> str:
    """Name of an entry's manifest."""
    return f"epilora:{{{key}}}:manifest"


def chunk_key(key: str, token: str, slice_index: int, chunk: int) -> str:
    """Name of a chunk."""
    return f"epilora:{{{key}:{slice_index}}}:{token}:{chunk}"


def make_manifest(token: str, slices: tuple[SharedSlice, ...], report: str) -> Manifest:
    """A manifest of the present format."""
    return Manifest(format=_FORMAT, token=token, slices=slices, report=report)
