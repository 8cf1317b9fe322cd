"""Keeps loads and moves of adapters apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class MoveGate:
    """Loads go on beside each other; a rebalance moves the resident adapters while no load is under way."""

    def __init__(self) -> None:
        self._num_loads = 0
        self._no_loads = asyncio.Event()
        self._no_loads.set()
        self._is_open = asyncio.Event()
        self._is_open.set()

    @asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Waits while adapters are moved; then none are until the block ends."""
        while not self._is_open.is_set():
            await self._is_open.wait()
        self._num_loads += 1
        self._no_loads.clear()
        try:
            yield
        finally:
            self._num_loads -= 1
            if not self._num_loads:
                self._no_loads.set()

    @asynccontextmanager
    async def move(self) -> AsyncIterator[None]:
        """Waits for the loads under way; later ones wait until the block ends. One move at a time."""
        assert self._is_open.is_set()
        self._is_open.clear()
        try:
            await self._no_loads.wait()
            yield
        finally:
            self._is_open.set()
