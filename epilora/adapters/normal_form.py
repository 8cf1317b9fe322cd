"""The normal form: which bytes of the file are A and B of which expert or module, whatever layout they came in.

Legend: D, F: input and output widths of an expert's projections; r lora_rank of one pair.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from epilora.adapters.tensor_entry import FLOAT_BYTES, TensorEntry
from epilora.adapters.tensor_table import TensorTable
from epilora.adapters.text_words import Positions
from epilora.families import ModelFamily, Projection
from epilora.model_spec import DenseModuleSpec, MoELayerSpec


class ExpertLayout(enum.StrEnum):
    """How a file holds the pairs of routed experts; docs/adapters.md shows the names and shapes."""

    NONE = "none"
    PER_EXPERT = "per_expert"
    EXPERT_LISTS = "expert_lists"
    TARGET_PARAMETERS = "target_parameters"
    PACKED = "packed"
    SHARED_OUTER = "shared_outer"
    GROUPED = "grouped"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterTarget:
    """The model that an adapter is for: what its tensors have to fit."""

    family: ModelFamily
    moe_layers: Mapping[str, MoELayerSpec]
    """By path of the experts' module."""
    dense_modules: Mapping[str, DenseModuleSpec]
    """By path."""

    @classmethod
    def make(
        cls, family: ModelFamily, moe_layers: Sequence[MoELayerSpec], dense_modules: Sequence[DenseModuleSpec]
    ) -> AdapterTarget:
        """From the layers and modules of a model."""
        return cls(
            family=family,
            moe_layers={layer.module: layer for layer in moe_layers},
            dense_modules={dense.module: dense for dense in dense_modules},
        )


class Region(NamedTuple):
    """A matrix inside a tensor of the file. A tuple, as TensorEntry is.

    Semantics: with the tensor as a 2D array S (all dimensions but the last are rows), matrix =
    S[row_begin:row_end, column_begin::column_step], transposed if `transpose`.
    """

    tensor: TensorEntry
    row_begin: int
    row_end: int
    column_begin: int = 0
    column_step: int = 1
    transpose: bool = False

    @classmethod
    def whole(cls, tensor: TensorEntry) -> Region:
        """The whole of a 2D tensor."""
        return cls(tensor=tensor, row_begin=0, row_end=tensor.num_rows)

    @classmethod
    def plane(cls, tensor: TensorEntry, index: int, *, transpose: bool = False) -> Region:
        """Matrix `index` of a 3D tensor. Example: plane 2 of [4, 3, 8] is rows 6 to 8 of a [12, 8] matrix."""
        rows = tensor.shape[1]
        return cls(tensor=tensor, row_begin=index * rows, row_end=(index + 1) * rows, transpose=transpose)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix."""
        rows = self.row_end - self.row_begin
        columns = len(range(self.column_begin, self.tensor.num_columns, self.column_step))
        return (columns, rows) if self.transpose else (rows, columns)

    @property
    def size_bytes(self) -> int:
        """Of the matrix's elements."""
        rows, columns = self.shape
        return rows * columns * FLOAT_BYTES[self.tensor.dtype]

    @property
    def offset(self) -> int:
        """First byte in the file of the first of its rows, all columns counted."""
        tensor = self.tensor
        return tensor.offset + self.row_begin * tensor.num_columns * FLOAT_BYTES[tensor.dtype]

    def view(self, source: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The matrix, as a view of the tensor's 2D array."""
        matrix = source[self.row_begin : self.row_end, self.column_begin :: self.column_step]
        return matrix.T if self.transpose else matrix


class LoraPair(NamedTuple):
    """A [r, in] and B [out, r] of one expert's projection, or of one dense module. The delta is scale * B @ A.

    A tuple, as TensorEntry is.
    """

    a: Region
    b: Region
    lora_rank: int
    scale: float
    """alpha / r or alpha / sqrt(r), patterns applied; never folded into A or B."""
    magnitude: Region | None = None
    """DoRA's, [1, out]: the output of base weight and delta together is multiplied, row by row, by the magnitude over
    the norm of that row of W + delta."""
    bias: Region | None = None
    """lora_B's, [1, out]: scale * bias is added to the output."""


class GridRegions(Sequence[Region]):
    """Whole tensors of one kind as matrices, of which nothing but their rows in the table is kept."""

    def __init__(self, table: TensorTable, rows: Positions) -> None:
        self._table = table
        self.rows = rows
        """TensorEntry.index of each."""
        kind = table.kinds[table.codes[rows[0]]]
        self.matrix_bytes = kind.size_bytes
        self.dtype = kind.dtype

    @property
    def offsets(self) -> Positions:
        """First byte of each in the file."""
        return self._table.offsets[self.rows]

    def part(self, begin: int, end: int) -> GridRegions:
        """Some that follow each other."""
        return GridRegions(self._table, self.rows[begin:end])

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Region: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Region]: ...

    def __getitem__(self, index: int | slice) -> Region | Sequence[Region]:
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        return Region.whole(self._table[int(self.rows[index])])


class GridPairs(Mapping[int, LoraPair]):
    """Pairs of the experts of one layer and projection, all of them of the same shapes and scale."""

    def __init__(self, table: TensorTable, experts: Positions, rows_of_a: Positions, first: LoraPair) -> None:
        """Args:
        table: of the file.
        experts: their numbers, ascending.
        rows_of_a: the tensor of each one's A; B is the next one.
        first: the pair of any of them.
        """
        self.table = table
        self.experts = experts
        self.rows_of_a = rows_of_a
        self.first = first

    def __getitem__(self, expert: int) -> LoraPair:
        row = int(self.rows_of_a[self._place[expert]])
        a, b = Region.whole(self.table[row]), Region.whole(self.table[row + 1])
        return self.first._replace(a=a, b=b)

    def __iter__(self) -> Iterator[int]:
        return iter(self._place)

    def __len__(self) -> int:
        return len(self.experts)

    @cached_property
    def _place(self) -> Mapping[int, int]:
        return {expert: place for place, expert in enumerate(self.experts.tolist())}

    def places(self, experts: Sequence[int]) -> list[int]:
        """Where some experts are among `experts`, -1 for those without a pair."""
        return [self._place.get(expert, -1) for expert in experts]

    def regions(self, places: Sequence[int]) -> tuple[GridRegions, GridRegions]:
        """A and B of the experts at some places."""
        rows = self.rows_of_a[list(places)]
        return GridRegions(self.table, rows), GridRegions(self.table, rows + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedModule:
    """A dense module whose weight [out, in], and bias [out] if it has one, replace the model's (modules_to_save)."""

    weight: TensorEntry
    bias: TensorEntry | None


@dataclass(frozen=True, kw_only=True, slots=True)
class NormalForm:
    """An adapter that was checked against a model."""

    expert_layout: ExpertLayout
    """A value of ExpertLayout."""
    experts: Mapping[tuple[int, Projection], Mapping[int, LoraPair]]
    """(layer, projection) -> logical expert -> pair, in order of layer."""
    dense: Mapping[str, LoraPair]
    """Module path -> pair, in order of the model's modules."""
    saved: Mapping[str, SavedModule]
    """Module path -> what replaces it, in order of the model's modules."""
    ignored: tuple[str, ...]
    """Tensors left out by allow_partial."""
    absent: tuple[str, ...]
    """Tensors without elements that stand for a projection which the family does not have."""
    rank_differences: tuple[str, ...]
    """Modules whose tensors have another lora_rank than the config says."""
    warnings: tuple[str, ...]

    def pairs(self) -> list[LoraPair]:
        """All pairs: experts', then dense ones."""
        return [pair for by_expert in self.experts.values() for pair in by_expert.values()] + list(self.dense.values())

    def samples(self) -> list[LoraPair]:
        """Pairs that show every lora_rank, shape and dtype there is: of a grid, one."""
        return [pair for by_expert in self.experts.values() for pair in samples_of(by_expert)] + list(
            self.dense.values()
        )

    def used_indices(self) -> set[int]:
        """Of the tensors that are put to use."""
        grids = [by_expert for by_expert in self.experts.values() if isinstance(by_expert, GridPairs)]
        rows = {row for grid in grids for row in grid.rows_of_a.tolist()}
        return rows | {row + 1 for row in rows} | self._indices_beside_grids()

    def num_used(self) -> int:
        """How many they are."""
        grids = [by_expert for by_expert in self.experts.values() if isinstance(by_expert, GridPairs)]
        return sum(2 * len(grid) for grid in grids) + len(self._indices_beside_grids())

    def _indices_beside_grids(self) -> set[int]:
        others = [by_expert for by_expert in self.experts.values() if not isinstance(by_expert, GridPairs)]
        pairs = [pair for by_expert in others for pair in by_expert.values()] + list(self.dense.values())
        used = {pair.a.tensor.index for pair in pairs} | {pair.b.tensor.index for pair in pairs}
        used |= {pair.magnitude.tensor.index for pair in pairs if pair.magnitude is not None}
        used |= {pair.bias.tensor.index for pair in pairs if pair.bias is not None}
        saved = [tensor for module in self.saved.values() for tensor in (module.weight, module.bias)]
        return used | {tensor.index for tensor in saved if tensor is not None}


def samples_of(by_expert: Mapping[int, LoraPair]) -> list[LoraPair]:
    """Pairs that show what all pairs of some experts have."""
    return [by_expert.first] if isinstance(by_expert, GridPairs) else list(by_expert.values())


NUMPY_DTYPE: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<u4"),
    "F16": np.dtype("<u2"),
    "BF16": np.dtype("<u2"),
}
"""Elements as the bits they are: nothing here computes with them."""
