"""A build that asks Redis first, and gives it what was built (redis_tier.py). Imported where EPILORA_CACHE is set."""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from epilora.settings import LoaderSettings
from loader_service.build import AdapterBuilder, TierCounters
from loader_service.cache import BuiltSlices, SliceCache
from loader_service.redis_tier import Claim, Manifest, RedisTier
from loader_service.redis_transfer import SlicesLostError, pull, push, report_of
from loader_service.request import BuildRequest
from loader_service.source import SourceIdentity
from loader_service.writer import BuildCancelledError, BuildProgress

log = structlog.get_logger(__name__)

_NUM_TRIES = 2
# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


class SharedBuilder:
    """Builds entries of a cache, or pulls what another loader has built."""

    def __init__(self, settings: LoaderSettings, cache: SliceCache) -> None:
        self._builder = AdapterBuilder(settings, cache)
        self._cache = cache
        self._tier = RedisTier(
            settings.cache.get_secret_value(),
            ttl_seconds=settings.cache_ttl_seconds,
            timeout_seconds=settings.cache_timeout_seconds,
            wait_seconds=settings.cache_wait_seconds,
        )
        self._pushes = ThreadPoolExecutor(1, thread_name_prefix="redis-push")
        self._push_progress = BuildProgress()
        _keep_freed_memory()

    @property
    def counters(self) -> TierCounters:
        """What was done with Redis."""
        return self._tier.counters

    def identify(self, source: str) -> SourceIdentity:
        """Identity of a source as it is now. Raises what `AdapterBuilder.identify` raises."""
        return self._builder.identify(source)

    def build(
        self, request: BuildRequest, identity: SourceIdentity, progress: BuildProgress, *, lease: str
    ) -> BuiltSlices:
        """The slices of a request, from Redis or from the adapter. Raises what `AdapterBuilder.build` raises."""
        key = request.shared_key(identity)
        for _ in range(_NUM_TRIES):
            found = self._tier.find_or_claim(key, progress)
            if found is None:
                break
            if isinstance(found, Claim):
                return self._build_and_push(request, identity, progress, lease, found)
            built = self._pull(request, identity, progress, lease, found)
            if built is not None:
                return built
        return self._builder.build(request, identity, progress, lease=lease)

    def close(self) -> None:
        """Ends what is being given to Redis."""
        self._push_progress.cancel()
        self._pushes.shutdown()
        self._tier.close()

    def _pull(
        self, request: BuildRequest, identity: SourceIdentity, progress: BuildProgress, lease: str, manifest: Manifest
    ) -> BuiltSlices | None:
        tier, key = self._tier, request.shared_key(identity)

        def write(directory: Path) -> BuiltSlices:
            paths = [directory / f"ep_rank-{spec.ep_rank}.safetensors" for spec in request.load_specs]
            slices = pull(tier, key, manifest, paths, progress)
            return BuiltSlices(adapter_digest=identity.digest, slices=slices, report=report_of(manifest))

        try:
            _check(request, manifest)
            progress.bytes_total = manifest.size_bytes
            with tier.counted_errors():
                built = self._cache.build(
                    request.entry_id(identity),
                    manifest.size_bytes,
                    write,
                    lease=lease,
                    is_pinned=self._builder.is_pinned(request),
                    is_pulled=True,
                )
                tier.counters.num_pulled += 1
                return built
        except SlicesLostError as error:
            log.warning("Redis lost a part of an entry; it is built again", key=key, why=str(error))
            tier.lose(key, manifest)
        progress.bytes_done = 0
        return None

    def _build_and_push(
        self, request: BuildRequest, identity: SourceIdentity, progress: BuildProgress, lease: str, claim: Claim
    ) -> BuiltSlices:
        try:
            built = self._builder.build(request, identity, progress, lease=lease)
        except BaseException:
            self._tier.give_up(claim)
            raise
        # The files stay until they are in Redis, whoever unloads the adapter meanwhile.
        push_lease = uuid.uuid4().hex
        self._cache.lease(request.entry_id(identity), push_lease)
        self._pushes.submit(self._push, claim, built, push_lease)
        return built

    def _push(self, claim: Claim, built: BuiltSlices, lease: str) -> None:
        tier = self._tier
        try:
            with tier.counted_errors():
                if not push(tier, claim, built, self._push_progress):
                    log.warning("another loader took over; what was built here is not in Redis", key=claim.key)
        except BuildCancelledError:
            log.info("stopped giving slices to Redis", key=claim.key)
        except Exception:
            log.exception("slices could not be given to Redis", key=claim.key)
        finally:
            tier.give_up(claim)
            self._cache.release(lease)


def _keep_freed_memory() -> None:
    """Has the allocator keep what is freed, up to 64 MiB.

    Chunks come and go in objects of 1 MiB. glibc would give each one's pages back to the kernel and ask for new ones,
    which takes three times as long as reading it from a socket. Other allocators have no such call.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, 32 << 20)
        set_option(_M_TRIM_THRESHOLD, 64 << 20)


def _check(request: BuildRequest, manifest: Manifest) -> None:
    expected: Sequence[tuple[int, str]] = [(spec.ep_rank, spec.placement_id) for spec in request.load_specs]
    got = [(piece.ep_rank, piece.placement_id) for piece in manifest.slices]
    if got != expected:
        raise SlicesLostError(f"the manifest is of (ep_rank, placement_id) {got}, expected {expected}")
