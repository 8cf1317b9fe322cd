"""One build, start to end, in a thread: open the files, understand them, write the slices, publish them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from epilora.adapters.normal_form import NormalForm
from epilora.adapters.peft_config import parse_peft_config
from epilora.adapters.report import make_report
from epilora.adapters.resolve import resolve_adapter
from epilora.adapters.slice_plan import SlicePlan, SliceSpec, plan_slices
from epilora.adapters.values import zero_warnings
from epilora.errors import AbortedError
from epilora.settings import LoaderSettings
from epilora.slices import LAYOUT_VERSION, SliceMetadata
from epilora.v1 import loader_service_pb2, types_pb2
from loader_service.allocation import LEAST_BYTES, PageAllocation
from loader_service.cache import BuiltSlices, Room, SliceCache
from loader_service.collection import paused_collection
from loader_service.remote import RemoteSources, is_remote
from loader_service.request import BuildRequest
from loader_service.source import SourceFiles, SourceIdentity, SourceRoots
from loader_service.write_result import WriteResult
from loader_service.writer import BuildProgress, write_slices


@dataclass(slots=True)
class TierCounters:
    """What was done with Redis since the loader started (redis_tier.py)."""

    num_pulled: int = 0
    """Entries taken from it."""
    num_pushed: int = 0
    """Entries given to it."""
    num_lost: int = 0
    """Entries of which a chunk was missing or damaged."""
    num_errors: int = 0
    """Times it failed, was too slow, or had no room."""


class AdapterBuilder:
    """Builds entries of a cache."""

    def __init__(self, settings: LoaderSettings, cache: SliceCache) -> None:
        self._settings = settings
        self._cache = cache
        # What was downloaded lies under a root of its own, which no caller can name.
        self._roots = SourceRoots(settings.adapter_roots)
        self._downloaded = SourceRoots([settings.download_dir])
        self._remote = RemoteSources(settings)

    @property
    def counters(self) -> TierCounters:
        """Zeros: there is no tier behind this cache."""
        return TierCounters()

    def close(self) -> None:
        """Nothing goes on between builds."""

    def identify(self, source: str) -> SourceIdentity:
        """Identity of a source as it is now. Raises what `SourceRoots.open` or `RemoteSources.resolve` raises."""
        if is_remote(source):
            return self._remote.resolve(source).identity
        with self._roots.open(source, max_header_bytes=self._settings.max_header_bytes) as files:
            return files.identity

    def build(
        self, request: BuildRequest, identity: SourceIdentity, progress: BuildProgress, *, lease: str
    ) -> BuiltSlices:
        """Builds and publishes the slices of a request.

        Args:
            request: what to build.
            identity: state of the source that was asked for.
            progress: updated; checked for cancellation.
            lease: the entry's first.

        Raises:
            AdapterFormatError: the files are broken, or do not fit the model.
            AbortedError: reason SOURCE_CHANGED; the source changed since `identity` was taken, or while it was read.
            ResourceExhaustedError: reason CACHE_FULL.
            BuildCancelledError: progress was cancelled.
        """
        progress.check()
        try:
            return self._build(request, identity, progress, lease)
        finally:
            paused_collection.thaw()

    def _build(
        self, request: BuildRequest, identity: SourceIdentity, progress: BuildProgress, lease: str
    ) -> BuiltSlices:
        with self._opened(request.source, identity, progress) as files, self._room(request, files) as room:
            paths = [room.directory / f"ep_rank-{spec.ep_rank}.safetensors" for spec in request.load_specs]
            with paused_collection, _allocated(room, paths, request, files):
                form, report = self._understand(files, request)
                plan = plan_slices(form, _slice_specs(request))
            progress.bytes_total = plan.size_bytes
            room.resize(plan.size_bytes)

            def write(_: Path) -> BuiltSlices:
                written = write_slices(plan, files.weights.descriptors, paths, progress)
                if not files.weights.is_unchanged():
                    raise _changed(request.source)
                report.bytes_read = written.bytes_read
                report.warnings.extend(_zero_warnings(form, written))
                progress.bytes_done = progress.bytes_total
                slices = _slices(request, plan, paths, written.digests)
                return BuiltSlices(adapter_digest=identity.digest, slices=slices, report=report)

            return room.publish(request.entry_id(identity), write, lease=lease, is_pinned=self.is_pinned(request))

    def is_pinned(self, request: BuildRequest) -> bool:
        """True if the entry is to stay when it is idle."""
        return request.source in self._settings.cache_pinned_sources

    def _room(self, request: BuildRequest, files: SourceFiles) -> AbstractContextManager[Room]:
        """Where to write; the bytes that are expected are reserved if there are enough to be worth it."""
        expected_bytes = sum(_expected_sizes(request, files))
        return self._cache.room(expected_bytes if expected_bytes >= LEAST_BYTES else 0)

    @contextmanager
    def _opened(self, source: str, identity: SourceIdentity, progress: BuildProgress) -> Iterator[SourceFiles]:
        """The files of a source in a certain state, downloaded if they have to be."""
        max_header_bytes = self._settings.max_header_bytes
        if not is_remote(source):
            with self._roots.open(source, max_header_bytes=max_header_bytes) as files:
                if files.identity != identity:
                    raise _changed(source)
                yield files
            return
        adapter = self._remote.resolve(source)
        if adapter.identity != identity:
            raise _changed(source)
        with (
            self._remote.fetched(adapter, progress) as directory,
            self._downloaded.open(str(directory), max_header_bytes=max_header_bytes) as files,
        ):
            yield files

    def _understand(self, files: SourceFiles, request: BuildRequest) -> tuple[NormalForm, types_pb2.AdapterLoadReport]:
        header = files.weights.tensors()
        config = parse_peft_config(files.config)
        form = resolve_adapter(
            header,
            config,
            request.target,
            max_lora_rank=self._settings.max_lora_rank,
            allow_partial=request.allow_partial,
            hints=request.hints,
        )
        return form, make_report(header, config, form)


def _expected_sizes(request: BuildRequest, files: SourceFiles) -> list[int]:
    """Of each slice file, about: the part of the weights that the rank has of the experts. Exact sizes take a plan."""
    sizes = []
    for spec in request.load_specs:
        num_local = sum(len(layer.local_experts) for layer in spec.layers)
        num_experts = sum(layer.moe.num_experts for layer in spec.layers)
        sizes.append(files.weights.file_bytes * num_local // max(1, num_experts))
    return sizes


def _allocated(
    room: Room, paths: Sequence[Path], request: BuildRequest, files: SourceFiles
) -> AbstractContextManager[object]:
    """Gives the files pages while the block runs, if their bytes were reserved."""
    if not room.size_bytes:
        return nullcontext()
    return PageAllocation(dict(zip(paths, _expected_sizes(request, files), strict=True)))


def _slice_specs(request: BuildRequest) -> list[SliceSpec]:
    return [
        SliceSpec(
            layers=spec.layers,
            metadata=SliceMetadata(
                layout_version=LAYOUT_VERSION,
                model_digest=spec.model_digest,
                placement_id=spec.placement_id,
                ep_rank=spec.ep_rank,
            ),
        )
        for spec in request.load_specs
    ]


def _slices(
    request: BuildRequest, plan: SlicePlan, paths: Sequence[Path], digests: Sequence[str]
) -> tuple[loader_service_pb2.Slice, ...]:
    return tuple(
        loader_service_pb2.Slice(
            ep_rank=spec.ep_rank,
            placement_id=spec.placement_id,
            path=str(path),
            size_bytes=layout.size_bytes,
            tensor_bytes=layout.tensor_bytes,
            digest=digest,
        )
        for spec, layout, path, digest in zip(request.load_specs, plan.layouts, paths, digests, strict=True)
    )


def _zero_warnings(form: NormalForm, written: WriteResult) -> list[str]:
    if written.seen <= written.nonzero and not written.zero_parts and not written.zero_columns:
        return []
    return zero_warnings(form, written.is_zero, lambda pair: {pair.a.tensor.index, pair.b.tensor.index} <= written.seen)


def _changed(source: str) -> AbortedError:
    return AbortedError(
        f"{source} was changed while it was being loaded; load it again once it is written",
        reason="SOURCE_CHANGED",
        retry_after_seconds=1.0,
    )
