"""What a rank is asked to do, and the queue by which answers leave the step thread."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy.typing as npt

from epilora.errors import EpiloraError, ResourceExhaustedError


class Finish(IntEnum):
    """Why a generation ended; values of the proto enum FinishReason."""

    NOT_YET = 0
    STOP = 1
    LENGTH = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is chosen; see `SamplingOptions` in generation_service.proto."""

    temperature: float = 0.0
    top_p: float = 0.0
    top_k: int = 0
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """A prompt to continue on this rank."""

    request_id: str
    token_ids: tuple[int, ...]
    adapter_generation: int = 0
    """0: base model."""
    sampling: Sampling = Sampling()
    max_tokens: int = 16
    stop_token_ids: frozenset[int] = frozenset()
    return_logits: bool = False
    return_prompt_logits: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOutput:
    """A piece of one request's answer."""

    token_ids: tuple[int, ...] = ()
    logits_NV: npt.NDArray[Any] | None = None
    """fp32 [tokens, vocabulary]."""
    prompt_logits_NV: npt.NDArray[Any] | None = None
    """fp32 [positions, vocabulary]."""
    finish: Finish = Finish.NOT_YET


class OutputQueue:
    """Carries answers from the step thread to one RPC handler, without ever making the step thread wait.

    Args:
        loop: event loop of the handler.
        limit: answers that may be unread; one more ends the request with RESOURCE_EXHAUSTED.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int) -> None:
        self.loop = loop
        self._limit = limit
        self._unread = 0
        self._lock = threading.Lock()
        self._queue: asyncio.Queue[GenerateOutput | EpiloraError] = asyncio.Queue()

    def put(self, item: GenerateOutput | EpiloraError) -> bool:
        """Hands an answer over; False if the reader is too far behind, and the request should end."""
        if not self._takes(item):
            return False
        # The loop is closed only when the process ends.
        self.loop.call_soon_threadsafe(self.deliver, item)
        return True

    def _takes(self, item: GenerateOutput | EpiloraError) -> bool:
        with self._lock:
            if self._unread >= self._limit and not isinstance(item, EpiloraError):
                return False
            self._unread += 1
            return True

    def deliver(self, item: GenerateOutput | EpiloraError) -> None:
        """The reader's side of put; in the event loop."""
        self._queue.put_nowait(item)

    async def read(self) -> AsyncIterator[GenerateOutput]:
        """Answers until the last; raises the error that ended the request."""
        while True:
            item = await self._queue.get()
            with self._lock:
                self._unread -= 1
            if isinstance(item, EpiloraError):
                raise item
            yield item
            if item.finish is not Finish.NOT_YET:
                return


def put_all(items: list[tuple[Sequence, GenerateOutput | EpiloraError]]) -> list[Sequence]:
    """OutputQueue.put of many items with one call into the event loop; the sequences whose reader is too far behind.

    A sequence that takes one item no more takes none of its later ones either.
    """
    slow: dict[int, Sequence] = {}
    taken: dict[asyncio.AbstractEventLoop, list[tuple[OutputQueue, GenerateOutput | EpiloraError]]] = {}
    for sequence, item in items:
        queue = sequence.outputs
        if id(sequence) not in slow and queue._takes(item):
            taken.setdefault(queue.loop, []).append((queue, item))
        else:
            slow[id(sequence)] = sequence
    for loop, batch in taken.items():
        loop.call_soon_threadsafe(_deliver_all, batch)
    return list(slow.values())


def _deliver_all(batch: list[tuple[OutputQueue, GenerateOutput | EpiloraError]]) -> None:
    for queue, item in batch:
        queue.deliver(item)


_order = itertools.count()


@dataclass(kw_only=True, slots=True)
class Sequence:
    """A request in the hands of the scheduler."""

    request: GenerateRequest
    outputs: OutputQueue
    token_ids: list[int] = field(default_factory=list)
    """Prompt, then what was generated."""
    num_computed: int = 0
    """Tokens whose keys and values are in the cache."""
    block_table: tuple[int, ...] = ()
    place: int = -1
    """Among the running sequences of its rank; -1 while it waits."""
    cancelled: bool = False
    ended: bool = False
    """Its answer is complete, but the next step has a chunk of it, which the other ranks count on."""
    order: int = field(default_factory=lambda: next(_order))

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.token_ids)

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.token_ids)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_positions(self) -> int:
        """Positions it may come to hold. The last token generated is never fed back."""
        return self.num_prompt + self.request.max_tokens - 1

    def slow_reader_error(self) -> ResourceExhaustedError:
        """The error for a client that does not read its stream."""
        return ResourceExhaustedError(
            f"request {self.request.request_id} was cancelled: its client leaves too many messages unread; "
            "read the stream faster or ask for fewer tokens",
            reason="SLOW_READER",
        )
