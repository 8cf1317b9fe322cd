"""From a slice file to an adapter in this rank's memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch

from compute_worker.adapter_buffers import (
    AdapterPlan,
    AdapterTensors,
    fill_adapter,
    keep_as_stored,
    plan_adapter,
    shard_slice,
)
from compute_worker.dora import WeightSource
from compute_worker.expert_shard import ExpertShard
from compute_worker.registered_slices import RegisteredSlices
from compute_worker.slice_reader import AdapterSlice, views_of
from compute_worker.slice_upload import SliceUploader, image_bytes
from epilora.model_spec import GateUpLayout
from epilora.slices import open_slice


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterCopier:
    """Copies slices to the device, on a GPU beside the running step.

    There the file comes over as it is, in one piece. An adapter that is served in the file's dtype and at its own lora
    ranks stays there as views of that piece; of any other the piece is what its matrices are cast and copied from.

    Attributes:
        dtype: of the matrices in memory; None keeps the file's.
        device: where they go.
        base: the model's weights, which DoRA's magnitudes are measured against.
        rank_multiple: see AdapterPool.
        shard: part of each local expert that this rank holds.
        layouts: of gate and up, by layer.
        uploader: brings files to the device; None on a CPU, where the mapped file is copied from.
        registered: files that can be copied without being read; None: there are none.
    """

    dtype: torch.dtype | None
    device: torch.device
    base: WeightSource
    rank_multiple: int
    shard: ExpertShard
    layouts: Mapping[int, GateUpLayout]
    uploader: SliceUploader | None
    registered: RegisteredSlices | None = None

    def plan(self, source: AdapterSlice, path: Path) -> AdapterPlan:
        """What an adapter will take; nothing is allocated."""
        part = source
        if self.shard.count > 1:
            # Without data: a rank's part of a matrix is copied together from all over it.
            part = views_of(source, torch.empty(image_bytes(path), dtype=torch.uint8, device="meta"))
            part = shard_slice(part, self.shard, self.layouts)
        plan = plan_adapter(part, dtype=self.dtype, rank_multiple=self.rank_multiple)
        if self.uploader is None or self.shard.count > 1 or not plan.is_as_stored:
            return replace(plan, source=source, is_as_stored=False)
        return replace(plan, expert_bytes=image_bytes(path) - plan.dense_bytes)

    @torch.inference_mode()
    def copy(
        self, plan: AdapterPlan, path: Path, prepare: Callable[[AdapterTensors], AdapterTensors]
    ) -> AdapterTensors:
        """Copies a slice.

        Args:
            plan: of `plan`.
            path: the slice file.
            prepare: adds to the adapter; while the device copies, and on the stream of that.

        Returns:
            The adapter, on the device when this returns.

        Raises:
            InvalidArgumentError: reason UNSUPPORTED_ADAPTER; a bias for a module that adds none.
            UnavailableError: reason SLICE_GONE; the file is gone.
        """
        if self.uploader is None:
            source = shard_slice(plan.source, self.shard, self.layouts)
            return prepare(fill_adapter(replace(plan, source=source), allocate_private, self.base))
        with open_slice(path) as stream, self._image_of(stream, self.uploader) as image, self.uploader.on_stream():
            source = views_of(plan.source, image)
            if plan.is_as_stored:
                tensors = keep_as_stored(source, image)
            else:
                source = shard_slice(source, self.shard, self.layouts)
                tensors = fill_adapter(replace(plan, source=source), self._allocate, self.base)
            tensors = prepare(tensors)
            self.uploader.synchronize()
        return tensors

    @contextmanager
    def _image_of(self, stream: BinaryIO, uploader: SliceUploader) -> Iterator[torch.Tensor]:
        """The file's bytes, on the device once its stream gets there; when the block ends, it has."""
        if self.registered is None:
            yield uploader.upload(stream)
            return
        with self.registered.borrow(stream) as chunks:
            if chunks is not None:
                try:
                    yield uploader.copy(chunks)
                finally:
                    # Whatever failed in the block, the pages are read no more.
                    uploader.synchronize()
                return
        image = uploader.upload(stream)
        self.registered.keep(stream)
        yield image

    def _allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=self.device)


def allocate_private(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of its own map: it goes back to the system when the tensor does, whatever the allocator would keep."""
    if count == 0:
        return torch.empty(0, dtype=dtype)
    pages = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype, count=count)
