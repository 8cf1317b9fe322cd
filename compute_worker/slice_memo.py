"""What slice files held when they were read last: the next load of the same file need not read its header again."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import torch

from compute_worker.slice_reader import AdapterSlice, read_slice, views_of
from epilora.load_spec import MoEEPLoadSpec
from epilora.model_spec import DenseModuleSpec

_NUM_SLICES = 16
_Key = tuple[Path, str, int, int, int, int]


class SliceMemo:
    """Of one worker, whose model stays the same. One thread at a time.

    Holds no file open: the slices it returns are without data, shapes and places only.
    """

    def __init__(self) -> None:
        self._slices: OrderedDict[_Key, tuple[MoEEPLoadSpec, AdapterSlice]] = OrderedDict()

    def read(
        self, path: Path, *, placement_id: str, load_spec: MoEEPLoadSpec, dense_modules: Mapping[str, DenseModuleSpec]
    ) -> AdapterSlice:
        """Like read_slice, which is called for files that are not known.

        Returns:
            A slice whose tensors are on torch's meta device, to be given to `views_of` with the file's bytes.
        """

        def read() -> AdapterSlice:
            return read_slice(path, placement_id=placement_id, load_spec=load_spec, dense_modules=dense_modules)

        try:
            status = os.stat(path)
        except FileNotFoundError:
            return read()
        # Slice files never change, and their names are digests of what is in them.
        key = (path, placement_id, status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
        known = self._slices.get(key)
        if known is not None and known[0] is load_spec:
            self._slices.move_to_end(key)
            return known[1]
        found = views_of(read(), torch.empty(-(-status.st_size // 4) * 4, dtype=torch.uint8, device="meta"))
        self._slices[key] = (load_spec, found)
        if len(self._slices) > _NUM_SLICES:
            self._slices.popitem(last=False)
        return found
