"""Generation: one request to the least loaded rank, its tokens back as tokens and text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import ExitStack
from typing import Any

import grpc
import grpc.aio

from epilora.errors import InternalError
from epilora.v1 import generation_service_pb2, types_pb2, worker_service_pb2
from gateway.adapter_table import AdapterTable
from gateway.in_flight import InFlight, Ticket
from gateway.keeper import Keeper
from gateway.metrics import Metrics
from gateway.options import ModelLimits, check_options, encode_prompt, worker_request
from gateway.ranks import Group
from gateway.residency import worker_error
from gateway.router import Router
from gateway.text import TextOutput, Tokenizer

STOP = generation_service_pb2.FINISH_REASON_STOP


class Generator:
    """Answers GenerationService.Generate."""

    def __init__(
        self,
        *,
        keeper: Keeper,
        group: Group,
        router: Router,
        table: AdapterTable,
        in_flight: InFlight,
        metrics: Metrics,
    ) -> None:
        self._keeper = keeper
        self._group = group
        self._router = router
        self._table = table
        self._in_flight = in_flight
        self._metrics = metrics
        self.tokenizer: Tokenizer | None = None

    def limits(self) -> ModelLimits:
        """What requests must fit, on whichever rank."""
        infos = self._group.infos()
        return ModelLimits(
            vocab_size=infos[0].model.vocab_size,
            max_sequence_length=min(info.max_sequence_length for info in infos),
            eos_token_ids=tuple(infos[0].model.eos_token_ids),
        )

    async def generate(
        self, request: generation_service_pb2.GenerateRequest, *, timeout_seconds: float | None
    ) -> AsyncGenerator[generation_service_pb2.GenerateResponse, None]:
        """Streams the output. The adapter's generation is the one that serves when the request comes in.

        Raises:
            EpiloraError: see GenerationService.Generate.
        """
        self._keeper.require_serving()
        limits = self.limits()
        check_options(request, limits, has_tokenizer=self.tokenizer is not None)
        if request.adapter_name:
            self._table.serving(request.adapter_name)
        prompt = await encode_prompt(request, limits, self.tokenizer)
        # Encoding may have waited: look again, and from here to the ticket nothing waits.
        self._keeper.require_serving()
        worker = worker_request(request, prompt, limits)
        rank = self._router.choose()
        with ExitStack() as uses:
            ticket = uses.enter_context(self._in_flight.ticket(rank.ep_rank))
            if request.adapter_name:
                generation = self._table.serving(request.adapter_name)
                generation.use(ticket)
                uses.callback(generation.unuse, ticket)
                worker.adapter_generation = generation.number
            call = rank.stub.GenerateTokens(worker, timeout=timeout_seconds)
            uses.callback(call.cancel)
            ticket.attach(call)
            text = TextOutput(self.tokenizer, prompt, request.stop.stop_strings)
            output = _Output(text, worker, rank.ep_rank)
            num_new = len(prompt)
            async for response in self._read(call, ticket):
                # Only now the rank has computed the prompt: before, it may refuse it.
                self._metrics.prompt_tokens.inc(num_new)
                num_new = 0
                message = output.message(response)
                self._metrics.generated_tokens.inc(len(message.token_ids))
                yield message
                if message.finish_reason:
                    return
            raise InternalError(
                f"rank {rank.ep_rank} ended a generation without a finish_reason", reason="BAD_WORKER_STREAM"
            )

    async def _read(self, call: Any, ticket: Ticket) -> AsyncIterator[worker_service_pb2.GenerateTokensResponse]:
        try:
            async for response in call:
                yield response
        except asyncio.CancelledError:
            if ticket.error is not None:
                raise ticket.error from None
            raise
        except grpc.aio.AioRpcError as error:
            if ticket.error is not None:
                raise ticket.error from error
            raise worker_error(self._group, ticket.ep_rank, error) from error


class _Output:
    """Makes the public messages of one request from the worker's."""

    def __init__(self, text: TextOutput, worker: worker_service_pb2.GenerateTokensRequest, ep_rank: int) -> None:
        self._text = text
        self._num_prompt = len(worker.token_ids)
        self._generation = worker.adapter_generation
        self._ep_rank = ep_rank
        self._num_generated = 0

    def message(self, response: worker_service_pb2.GenerateTokensResponse) -> generation_service_pb2.GenerateResponse:
        """The public message; it has a finish_reason if a stop string was found."""
        tokens: Sequence[int] = response.token_ids
        text, num_used = self._text.push(tokens)
        message = generation_service_pb2.GenerateResponse(
            text=text, adapter_generation=self._generation, ep_rank=self._ep_rank
        )
        if response.HasField("logits"):
            message.logits.CopyFrom(response.logits)
        if response.HasField("prompt_logits"):
            message.prompt_logits.CopyFrom(response.prompt_logits)
        if num_used is not None:
            tokens = tokens[:num_used]
            _keep_rows(message.logits, num_used)
            message.finish_reason = STOP
        elif response.finish_reason:
            message.text += self._text.finish()
            message.finish_reason = response.finish_reason
        message.token_ids.extend(tokens)
        self._num_generated += len(tokens)
        if message.finish_reason:
            message.usage.num_prompt_tokens = self._num_prompt
            message.usage.num_generated_tokens = self._num_generated
        return message


def _keep_rows(tensor: types_pb2.Tensor, num_rows: int) -> None:
    """Cuts a [n, vocabulary] tensor to its first rows."""
    if tensor.shape and num_rows < tensor.shape[0]:
        row_bytes = len(tensor.data) // tensor.shape[0]
        tensor.data = tensor.data[: num_rows * row_bytes]
        tensor.shape[0] = num_rows
