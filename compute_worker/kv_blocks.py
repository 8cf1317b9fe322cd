"""Blocks of the paged key/value cache: who holds which."""

from __future__ import annotations


class KVBlockPool:
    """Hands out fixed-size blocks of key/value positions.

    A sequence reserves all blocks it can ever need when it is admitted, so a running sequence
    never has to be evicted. Blocks are reused last-in first-out: the warmest first.

    Args:
        num_blocks: blocks in the cache.
        block_size: positions in a block.
    """

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self._free = list(range(num_blocks - 1, -1, -1))
        self.num_blocks = num_blocks
        self.block_size = block_size

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def num_needed(self, num_positions: int) -> int:
        """Blocks that hold so many positions."""
        return -(-num_positions // self.block_size)

    def allocate(self, num_positions: int) -> tuple[int, ...] | None:
        """Blocks for a sequence of so many positions, or None if there are not enough now."""
        needed = self.num_needed(num_positions)
        if needed > len(self._free):
            return None
        blocks = tuple(self._free[len(self._free) - needed :])
        del self._free[len(self._free) - needed :]
        return blocks

    def release(self, blocks: tuple[int, ...]) -> None:
        """Gives blocks back."""
        self._free.extend(blocks)
        assert len(self._free) <= self.num_blocks, "a block was released twice"
