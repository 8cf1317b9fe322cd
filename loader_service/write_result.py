"""What writing slice files finds out about the adapter's values."""

from __future__ import annotations

from dataclasses import dataclass, field

from epilora.adapters.normal_form import Region


@dataclass(slots=True)
class WriteResult:
    """What a write found out."""

    bytes_read: int = 0
    seen: set[int] = field(default_factory=set)
    """Indices of the tensors of which something was read."""
    nonzero: set[int] = field(default_factory=set)
    """Those in which something other than zero was seen."""
    zero_parts: set[tuple[int, int]] = field(default_factory=set)
    """Matrices of whole rows with a part that is zero, by tensor and first byte in the file."""
    nonzero_parts: set[tuple[int, int]] = field(default_factory=set)
    """Those of several parts with one that is not."""
    zero_columns: set[tuple[int, int]] = field(default_factory=set)
    """Matrices of every n-th column that are zero, by tensor and first column."""

    def add(self, other: WriteResult) -> None:
        """Takes over what another thread found out."""
        self.bytes_read += other.bytes_read
        for name in ("seen", "nonzero", "zero_parts", "nonzero_parts", "zero_columns"):
            getattr(self, name).update(getattr(other, name))

    def is_zero(self, region: Region) -> bool:
        """True if a matrix was read, and is all zero."""
        tensor = region.tensor
        if tensor.index not in self.nonzero:
            return tensor.index in self.seen
        if region.column_step != 1:
            return (tensor.index, region.column_begin) in self.zero_columns
        place = tensor.index, region.offset
        return place in self.zero_parts and place not in self.nonzero_parts

    digests: tuple[str, ...] = ()
    """xxh3-128 of each slice file, 32 hex digits."""
