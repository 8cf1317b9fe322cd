"""ExpertService: one caller's stream to one worker's stream, names turned into generations."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, aclosing
from typing import Any

import grpc
import grpc.aio

from epilora.errors import EpiloraError, InternalError, InvalidArgumentError, UnavailableError
from epilora.v1 import expert_service_pb2, worker_service_pb2
from epilora.wire import check_tensor
from gateway.adapter_table import AdapterTable, Generation
from gateway.in_flight import InFlight, Ticket
from gateway.keeper import Keeper
from gateway.ranks import RETRY_AFTER_SECONDS, Group, Rank
from gateway.residency import worker_error
from gateway.router import Router

_LOST_STATUS = "Internal error from Core"
"""What grpcio says when a write meets a call that the server has just ended; the server's status is lost then."""
STATUS_SECONDS = 5.0
LAST_READ_SECONDS = 1.0
"""How long the reader of requests may take to notice that the worker has answered everything."""


class Experts:
    """Answers ExpertService.Forward."""

    def __init__(
        self,
        *,
        keeper: Keeper,
        group: Group,
        router: Router,
        table: AdapterTable,
        in_flight: InFlight,
        max_messages: int,
    ) -> None:
        self._keeper = keeper
        self._group = group
        self._router = router
        self._table = table
        self._in_flight = in_flight
        self._max_messages = max_messages
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Streams are read no further; what was read is answered."""
        self._stopping.set()

    async def forward(
        self, requests: AsyncIterator[expert_service_pb2.ForwardRequest], *, timeout_seconds: float | None
    ) -> AsyncGenerator[expert_service_pb2.ForwardResponse, None]:
        """Answers every message in order. At an error the answers to the messages before it come first.

        Raises:
            EpiloraError: see ExpertService.Forward.
        """
        self._keeper.require_serving()
        rank = self._router.choose()
        with ExitStack() as uses:
            ticket = uses.enter_context(self._in_flight.ticket(rank.ep_rank))
            call = rank.stub.ForwardExperts(timeout=timeout_seconds)
            uses.callback(call.cancel)
            ticket.attach(call)
            stream = _Stream(self._table, ticket, call, self._max_messages)
            uses.callback(stream.close)
            reading = asyncio.create_task(stream.send(requests, self._stopping))
            uses.callback(reading.cancel)
            async with aclosing(self._answers(call, ticket, stream, rank)) as answers:
                async for answer in answers:
                    yield answer
            await asyncio.wait({reading}, timeout=LAST_READ_SECONDS)
            error = reading.result() if reading.done() else _ended_early(rank.ep_rank)
            if error is not None:
                raise error
            self._keeper.require_serving()

    async def _answers(
        self, call: Any, ticket: Ticket, stream: _Stream, rank: Rank
    ) -> AsyncGenerator[expert_service_pb2.ForwardResponse, None]:
        try:
            async for response in call:
                stream.answered()
                yield expert_service_pb2.ForwardResponse(
                    request_id=response.request_id, hidden_states=response.hidden_states
                )
        except asyncio.CancelledError:
            if ticket.error is not None:
                raise ticket.error from None
            raise
        except grpc.aio.AioRpcError as error:
            if ticket.error is not None:
                raise ticket.error from error
            if error.details() == _LOST_STATUS:
                found = await self._status_of(rank, stream.oldest())
                if found is None:
                    raise _status_lost(ticket.ep_rank) from error
                error = found
            raise worker_error(self._group, ticket.ep_rank, error) from error

    async def _status_of(
        self, rank: Rank, request: worker_service_pb2.ForwardExpertsRequest | None
    ) -> grpc.aio.AioRpcError | None:
        """Why a worker refuses a message, asked again on a stream of its own; None if it does not."""
        if request is None:
            return None
        try:
            async for _ in rank.stub.ForwardExperts(iter([request]), timeout=STATUS_SECONDS):
                pass
        except grpc.aio.AioRpcError as error:
            return error
        return None


def _status_lost(ep_rank: int) -> EpiloraError:
    return UnavailableError(
        f"rank {ep_rank} ended a stream while the gateway was writing to it, and the reason was lost; try again",
        reason="RANK_STREAM_ENDED",
        retry_after_seconds=RETRY_AFTER_SECONDS,
        metadata={"ep_rank": ep_rank},
    )


def _ended_early(ep_rank: int) -> EpiloraError:
    return InternalError(f"rank {ep_rank} ended a stream before its caller did", reason="BAD_WORKER_STREAM")


class _Stream:
    """The messages of one stream that are sent and not answered; each keeps its adapters resident."""

    def __init__(self, table: AdapterTable, ticket: Ticket, call: Any, max_messages: int) -> None:
        self._table = table
        self._ticket = ticket
        self._call = call
        self._room = asyncio.Semaphore(max_messages)
        self._unanswered: deque[tuple[worker_service_pb2.ForwardExpertsRequest, list[Generation]]] = deque()

    async def send(
        self, requests: AsyncIterator[expert_service_pb2.ForwardRequest], stopping: asyncio.Event
    ) -> EpiloraError | None:
        """Passes messages on until the caller ends, one is wrong, or the gateway stops; then the worker's side ends."""
        stopped = asyncio.create_task(stopping.wait())
        try:
            while True:
                await self._room.acquire()
                following = asyncio.ensure_future(anext(requests, None))
                try:
                    await asyncio.wait({following, stopped}, return_when=asyncio.FIRST_COMPLETED)
                except asyncio.CancelledError:
                    following.cancel()
                    raise
                if not following.done():
                    following.cancel()
                    return None
                request = following.result()
                if request is None:
                    return None
                await self._send_one(request)
        except EpiloraError as error:
            return error
        except grpc.aio.AioRpcError:
            return None  # the reader of answers sees the same error
        except asyncio.InvalidStateError:
            return None  # the worker's call has ended; the reader of answers sees why
        finally:
            stopped.cancel()
            if not self._call.done():
                await self._call.done_writing()

    async def _send_one(self, request: expert_service_pb2.ForwardRequest) -> None:
        names = [self._table.serving(name, field=f"adapter_names[{i}]") for i, name in enumerate(request.adapter_names)]
        worker = worker_service_pb2.ForwardExpertsRequest(
            request_id=request.request_id,
            layer=request.layer,
            hidden_states=request.hidden_states,
            adapter_generations=_generation_per_token(request, [generation.number for generation in names]),
            routed_only=request.routed_only,
        )
        if request.HasField("top_k"):
            worker.top_k.CopyFrom(request.top_k)
        for generation in names:
            generation.use(self._ticket)
        self._unanswered.append((worker, names))
        await self._call.write(worker)

    def oldest(self) -> worker_service_pb2.ForwardExpertsRequest | None:
        """The message that the worker answers next, or refuses."""
        return self._unanswered[0][0] if self._unanswered else None

    def answered(self) -> None:
        """The oldest unanswered message was answered."""
        _, generations = self._unanswered.popleft()
        for generation in generations:
            generation.unuse(self._ticket)
        self._room.release()

    def close(self) -> None:
        """Lets go of everything."""
        while self._unanswered:
            self.answered()


def _num_tokens(request: expert_service_pb2.ForwardRequest) -> int:
    """Rows of hidden_states; no more than its bytes, so that a short message cannot ask for long lists."""
    _, shape = check_tensor(request.hidden_states, field="hidden_states")
    if len(shape) != 2 or shape[1] == 0:
        raise InvalidArgumentError(
            f"hidden_states has shape {list(shape)}, expected [tokens, hidden_size]",
            reason="BAD_TENSOR",
            field="hidden_states.shape",
        )
    return shape[0]


def _generation_per_token(request: expert_service_pb2.ForwardRequest, generations: list[int]) -> list[int]:
    num_tokens = _num_tokens(request)
    index = list(request.adapter_index)
    if not index:
        if len(generations) > 1:
            raise InvalidArgumentError(
                f"adapter_index is empty with {len(generations)} adapter_names, expected one index per token",
                reason="BAD_ADAPTER_INDEX",
                field="adapter_index",
            )
        return generations * num_tokens
    if len(index) != num_tokens:
        raise InvalidArgumentError(
            f"adapter_index has {len(index)} entries, expected {num_tokens}: one per row of hidden_states",
            reason="BAD_ADAPTER_INDEX",
            field="adapter_index",
        )
    for position, value in enumerate(index):
        if not -1 <= value < len(generations):
            raise InvalidArgumentError(
                f"adapter_index[{position}] is {value}, expected -1 to {len(generations) - 1}",
                reason="BAD_ADAPTER_INDEX",
                field=f"adapter_index[{position}]",
            )
    if all(value == -1 for value in index):
        return []
    return [0 if value == -1 else generations[value] for value in index]
