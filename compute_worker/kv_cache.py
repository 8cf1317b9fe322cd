"""The paged cache of keys and values.

Legend: Hkv key/value heads, Dk and Dv widths of their keys and values. A cache slot is block * block_size + offset;
after the blocks come two more slots: one is always zero and stands for padding, the other is spare, for what nobody
reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class KVShape:
    """What one position takes in one layer: Hkv heads of Dk and Dv elements."""

    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_elements(self) -> int:
        """Of keys and values together."""
        return self.num_heads * (self.key_dim + self.value_dim)


def zeros(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """torch.zeros, but on a CPU nothing is written: the system hands out zeros where a page is first touched, so that a
    large cache that is little used takes neither time at the start nor memory."""
    if device.type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(tuple(shape))


class KVCache:
    """Keys and values of all layers that attend.

    Attributes:
        k: layer -> [num_blocks * block_size + 2, Hkv, Dk].
        v: layer -> the same with Dv.
    """

    def __init__(
        self,
        *,
        shapes: Mapping[int, KVShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.padding_slot = num_blocks * block_size
        self.device = device
        self.spare_slot = self.padding_slot + 1
        slots = self.spare_slot + 1
        self.k = {
            layer: zeros((slots, shape.num_heads, shape.key_dim), dtype=dtype, device=device)
            for layer, shape in shapes.items()
        }
        self.v = {
            layer: zeros((slots, shape.num_heads, shape.value_dim), dtype=dtype, device=device)
            for layer, shape in shapes.items()
        }

    def num_bytes(self) -> int:
        """Of all storages."""
        return sum(tensor.untyped_storage().nbytes() for tensor in (*self.k.values(), *self.v.values()))

    @staticmethod
    def block_bytes(*, shapes: Mapping[int, KVShape], block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block in all layers."""
        return sum(shape.num_elements for shape in shapes.values()) * block_size * dtype.itemsize
