"""One build, start to end, in a thread: open the files, understand them, write the slices, publish them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from epilora.adapters.normal_form import NormalForm
from epilora.adapters.peft_config import parse_peft_config
from epilora.adapters.report import make_report
from epilora.adapters.resolve import resolve_adapter
from epilora.adapters.slice_plan import SlicePlan, SliceSpec, plan_slices
from epilora.errors import AbortedError
from epilora.settings import LoaderSettings
from epilora.slices import LAYOUT_VERSION, SliceMetadata
from epilora.v1 import loader_service_pb2, types_pb2
from loader_service.cache import BuiltSlices, SliceCache
from loader_service.collection import paused_collection
from loader_service.request import BuildRequest
from loader_service.source import SourceFiles, SourceIdentity, SourceRoots
from loader_service.writer import BuildProgress, WriteResult, write_slices


class AdapterBuilder:
    """Builds entries of a cache."""

    def __init__(self, settings: LoaderSettings, cache: SliceCache) -> None:
        self._settings = settings
        self._cache = cache
        self._roots = SourceRoots(settings.adapter_roots)

    def identify(self, source: str) -> SourceIdentity:
        """Identity of a source as it is now. Raises what `SourceRoots.open` raises."""
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
        with self._roots.open(request.source, max_header_bytes=self._settings.max_header_bytes) as files:
            if files.identity != identity:
                raise _changed(request.source)
            with paused_collection:
                form, report = self._understand(files, request)
                plan = plan_slices(form, _slice_specs(request, identity))
            progress.bytes_total = plan.size_bytes
            entry_id = request.entry_id(identity)
            final = self._cache.path_of(entry_id)

            def write(directory: Path) -> BuiltSlices:
                names = [f"ep_rank-{spec.ep_rank}.safetensors" for spec in request.load_specs]
                paths = [directory / name for name in names]
                written = write_slices(plan, files.weights.descriptors, paths, progress)
                if not files.weights.is_unchanged():
                    raise _changed(request.source)
                report.bytes_read = written.bytes_read
                report.warnings.extend(_zero_warnings(form, written))
                progress.bytes_done = progress.bytes_total
                slices = _slices(request, plan, [final / name for name in names], written.digests)
                return BuiltSlices(adapter_digest=identity.digest, slices=slices, report=report)

            return self._cache.build(entry_id, plan.size_bytes, write, lease=lease)

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


def _slice_specs(request: BuildRequest, identity: SourceIdentity) -> list[SliceSpec]:
    return [
        SliceSpec(
            layers=spec.layers,
            metadata=SliceMetadata(
                layout_version=LAYOUT_VERSION,
                model_digest=spec.model_digest,
                placement_id=spec.placement_id,
                ep_rank=spec.ep_rank,
                adapter_digest=identity.digest,
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
    """Pairs whose A or B was read and is zero change nothing: legal, and hardly what was meant."""
    if written.seen <= written.nonzero:
        return []
    pairs = {(pair.a.tensor.index, pair.b.tensor.index): pair for pair in form.pairs()}
    pairs = {key: pair for key, pair in pairs.items() if written.seen.issuperset(key)}
    zero = [pair for key, pair in pairs.items() if not written.nonzero.issuperset(key)]
    if not zero:
        return []
    regions = [region for pair in zero for region in (pair.a, pair.b)]
    names = sorted(region.tensor.name for region in regions if region.tensor.index not in written.nonzero)
    all_of_them = " The adapter changes nothing: it was saved untrained." if len(zero) == len(pairs) else ""
    return [
        f"{len(zero)} of {len(pairs)} pairs have a matrix that is all zero and change nothing, first {names[0]}."
        f"{all_of_them}"
    ]


def _changed(source: str) -> AbortedError:
    return AbortedError(
        f"{source} was changed while it was being loaded; load it again once it is written",
        reason="SOURCE_CHANGED",
        retry_after_seconds=1.0,
    )
