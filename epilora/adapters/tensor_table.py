"""The tensors of a safetensors file as columns: an entry is made only when somebody asks for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import overload

import numpy as np
import numpy.typing as npt

from epilora.adapters.tensor_entry import TensorEntry
from epilora.adapters.text_words import Positions, TextWords, Words


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorKind:
    """What many tensors have in common."""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


class TensorTable(Sequence[TensorEntry]):
    """All tensors of one file, in order of offset."""

    def __init__(
        self,
        *,
        words: TextWords,
        text: str,
        name_begins: Positions,
        name_ends: Positions,
        name_columns: Words,
        kinds: Sequence[TensorKind],
        codes: Positions,
        offsets: Positions,
    ) -> None:
        """Args:
        words: the header.
        text: the same as text, ASCII.
        name_begins: where the tensors' names begin in it.
        name_ends: where they end.
        name_columns: the names as [words, len(names)], see TextWords.columns.
        kinds: the different ones.
        codes: which of them each tensor is.
        offsets: first byte of each tensor in the file.
        """
        self.words = words
        self.text = text
        self.name_begins = name_begins
        self.name_ends = name_ends
        self.name_columns = name_columns
        self.kinds = kinds
        self.codes = codes
        self.offsets = offsets

    def __len__(self) -> int:
        return len(self.codes)

    @overload
    def __getitem__(self, index: int) -> TensorEntry: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TensorEntry]: ...

    def __getitem__(self, index: int | slice) -> TensorEntry | Sequence[TensorEntry]:
        if isinstance(index, slice):
            return self._entries[index]
        index = range(len(self))[index]
        kind = self.kinds[self.codes[index]]
        name = self.text[self.name_begins[index] : self.name_ends[index]]
        return TensorEntry(index, name, kind.dtype, kind.shape, int(self.offsets[index]), kind.size_bytes)

    def __iter__(self) -> Iterator[TensorEntry]:
        return iter(self._entries)

    @cached_property
    def _entries(self) -> tuple[TensorEntry, ...]:
        text, begins, ends = self.text, self.name_begins.tolist(), self.name_ends.tolist()
        kinds = [self.kinds[code] for code in self.codes.tolist()]
        fields = zip(
            itertools.count(),
            [text[begin:end] for begin, end in zip(begins, ends, strict=True)],
            [kind.dtype for kind in kinds],
            [kind.shape for kind in kinds],
            self.offsets.tolist(),
            [kind.size_bytes for kind in kinds],
            itertools.repeat(0),
            strict=False,
        )
        # What TensorEntry._make does, without a call of Python's own for each.
        return tuple(map(partial(tuple.__new__, TensorEntry), fields))

    def rows(self, chosen: npt.NDArray[np.bool_]) -> list[TensorEntry]:
        """Some of the tensors."""
        return [self[row] for row in np.flatnonzero(chosen).tolist()]
