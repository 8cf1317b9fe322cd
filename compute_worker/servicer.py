"""WorkerService: decodes, hands to the step loop, encodes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc
import torch

from compute_worker.expert_queue import ExpertCall
from compute_worker.requests import GenerateOutput, GenerateRequest, OutputQueue, Sampling, Sequence
from compute_worker.tensors import FLOAT_TYPES, array_to_message, to_message, to_torch
from compute_worker.worker import Worker
from epilora.errors import EpiloraError, FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError
from epilora.load_spec import MoEEPLoadSpec
from epilora.placement import ExpertPlacement
from epilora.v1 import worker_service_pb2 as pb
from epilora.v1 import worker_service_pb2_grpc

_FORWARDS_IN_FLIGHT = 16
_MAX_PROMPT_LOGITS_BYTES = 256 << 20


class WorkerServicer(worker_service_pb2_grpc.WorkerServiceServicer):
    """One rank's service.

    Args:
        worker: the rank.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def GetWorkerInfo(self, request: pb.GetWorkerInfoRequest, context: Any) -> pb.GetWorkerInfoResponse:  # noqa: N802
        return self._worker.info()

    async def GetAdapterLoad(self, request: pb.GetAdapterLoadRequest, context: Any) -> pb.GetAdapterLoadResponse:  # noqa: N802
        return self._worker.adapter_load()

    async def StageAdapter(self, request: pb.StageAdapterRequest, context: Any) -> pb.StageAdapterResponse:  # noqa: N802
        resident = await asyncio.to_thread(
            self._worker.runner.pool.stage,
            name=request.name,
            generation=request.generation,
            path=Path(request.slice.path),
            placement_id=request.slice.placement_id,
        )
        return pb.StageAdapterResponse(resident_bytes=resident)

    async def ActivateAdapter(self, request: pb.ActivateAdapterRequest, context: Any) -> pb.ActivateAdapterResponse:  # noqa: N802
        self._require_leader()
        # Shielded: a caller that gives up does not undo what the ranks agree on.
        applied = await asyncio.shield(asyncio.wrap_future(self._worker.loop.activate(request.generation)))
        return pb.ActivateAdapterResponse(adapter_slot=applied.adapter_slot, step=applied.step)

    async def RetireAdapter(self, request: pb.RetireAdapterRequest, context: Any) -> pb.RetireAdapterResponse:  # noqa: N802
        self._require_leader()
        applied = await asyncio.shield(asyncio.wrap_future(self._worker.loop.retire(request.generation)))
        return pb.RetireAdapterResponse(step=applied.step)

    async def DiscardAdapter(self, request: pb.DiscardAdapterRequest, context: Any) -> pb.DiscardAdapterResponse:  # noqa: N802
        freed = await asyncio.to_thread(self._worker.runner.pool.discard, request.generation)
        return pb.DiscardAdapterResponse(freed_bytes=freed)

    async def PreparePlacement(  # noqa: N802
        self, request: pb.PreparePlacementRequest, context: Any
    ) -> pb.PreparePlacementResponse:
        placement = ExpertPlacement.from_proto(request.placement)
        mover = self._worker.runner.mover
        try:
            num_read = await asyncio.to_thread(mover.prepare, request.move_number, placement)
        except asyncio.CancelledError:
            # Nobody waits for it any more, and whoever asked may be gone for good.
            await asyncio.to_thread(mover.abandon, request.move_number)
            raise
        spec = MoEEPLoadSpec.make(self._worker.model, placement, self._worker.runner.placed.load_spec.ep_rank)
        return pb.PreparePlacementResponse(load_spec=spec.to_proto(), num_experts_read=num_read)

    async def TakePlacement(self, request: pb.TakePlacementRequest, context: Any) -> pb.TakePlacementResponse:  # noqa: N802
        self._require_leader()
        applied = await asyncio.shield(asyncio.wrap_future(self._worker.loop.place(request.move_number)))
        return pb.TakePlacementResponse(step=applied.step)

    async def AbandonPlacement(  # noqa: N802
        self, request: pb.AbandonPlacementRequest, context: Any
    ) -> pb.AbandonPlacementResponse:
        await asyncio.to_thread(self._worker.runner.mover.abandon)
        return pb.AbandonPlacementResponse()

    async def GenerateTokens(  # noqa: N802
        self, request: pb.GenerateTokensRequest, context: Any
    ) -> AsyncIterator[pb.GenerateTokensResponse]:
        outputs = OutputQueue(asyncio.get_running_loop(), self._worker.settings.output_queue_size)
        sequence = Sequence(request=self._decode(request), outputs=outputs)
        self._worker.loop.add_sequence(sequence)
        try:
            async for output in outputs.read():
                yield _encode(output)
        finally:
            self._worker.loop.cancel(sequence)

    async def ForwardExperts(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.ForwardExpertsRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ForwardExpertsResponse]:
        in_flight: deque[tuple[int, torch.dtype, asyncio.Future[torch.Tensor]]] = deque()
        requests = aiter(request_iterator)
        # Reads ahead so that the messages of one stream can share a step; answers keep their order.
        reading: asyncio.Task[pb.ForwardExpertsRequest] | None = asyncio.ensure_future(anext(requests))
        refusal: EpiloraError | None = None
        try:
            while reading is not None or in_flight:
                waits: set[asyncio.Future[Any]] = set()
                if reading is not None and len(in_flight) < _FORWARDS_IN_FLIGHT:
                    waits.add(reading)
                head = in_flight[0][2] if in_flight else None
                if head is not None:
                    waits.add(head)
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if reading in waits and reading.done():
                    try:
                        request_id, dtype, result = self._submit(reading.result())
                        in_flight.append((request_id, dtype, asyncio.wrap_future(result)))
                        reading = asyncio.ensure_future(anext(requests))
                    except StopAsyncIteration:
                        reading = None
                    except EpiloraError as error:
                        # What was asked before is answered before.
                        reading, refusal = None, error
                if head is not None and head.done():
                    request_id, dtype, _ = in_flight.popleft()
                    y_TD = head.result().to(dtype)
                    yield pb.ForwardExpertsResponse(request_id=request_id, hidden_states=to_message(y_TD))
            if refusal is not None:
                raise refusal
        finally:
            if reading is not None:
                reading.cancel()
            for _, _, future in in_flight:
                future.cancel()

    def _require_leader(self) -> None:
        if self._worker.ep_rank != 0:
            raise FailedPreconditionError(
                f"ep_rank {self._worker.ep_rank} does not lead its group; call ep_rank 0", reason="NOT_LEADER"
            )

    def _decode(self, request: pb.GenerateTokensRequest) -> GenerateRequest:
        worker = self._worker
        vocab_size, limit = worker.model.vocab_size, worker.max_sequence_length
        num_prompt, num_positions = len(request.token_ids), len(request.token_ids) + request.max_tokens
        if not num_prompt or request.max_tokens < 1 or num_positions > limit:
            raise InvalidArgumentError(
                f"a prompt of {num_prompt} tokens and max_tokens {request.max_tokens} need {num_positions} positions, "
                f"expected at least 1 of each and at most {limit} together",
                reason="SEQUENCE_TOO_LONG" if num_positions > limit else "EMPTY_REQUEST",
                field="token_ids",
                metadata={"max_sequence_length": limit},
            )
        if bad := [token for token in request.token_ids if not 0 <= token < vocab_size]:
            raise InvalidArgumentError(
                f"token id {bad[0]} is outside the vocabulary of {vocab_size}",
                reason="BAD_TOKEN_ID",
                field="token_ids",
            )
        logits_bytes = num_prompt * vocab_size * 4
        if request.return_prompt_logits and logits_bytes > _MAX_PROMPT_LOGITS_BYTES:
            raise InvalidArgumentError(
                f"the logits of {num_prompt} prompt tokens are {logits_bytes} bytes, expected at most "
                f"{_MAX_PROMPT_LOGITS_BYTES}; send a shorter prompt, or leave out return_prompt_logits",
                reason="PROMPT_LOGITS_TOO_LARGE",
                field="return_prompt_logits",
            )
        if worker.loop.num_queued >= worker.settings.max_queued_requests:
            raise ResourceExhaustedError(
                f"{worker.loop.num_queued} requests wait on rank {worker.ep_rank} already; try again later",
                reason="QUEUE_FULL",
                retry_after_seconds=1.0,
            )
        sampling = request.sampling
        return GenerateRequest(
            request_id=request.request_id,
            token_ids=tuple(request.token_ids),
            adapter_generation=request.adapter_generation,
            sampling=Sampling(
                temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, seed=sampling.seed
            ),
            max_tokens=request.max_tokens,
            stop_token_ids=frozenset(request.stop_token_ids),
            return_logits=request.return_logits,
            return_prompt_logits=request.return_prompt_logits,
        )

    def _submit(self, request: pb.ForwardExpertsRequest) -> tuple[int, torch.dtype, Future[torch.Tensor]]:
        x_TD = to_torch(request.hidden_states, field="hidden_states", shape=(None, None))
        if x_TD.dtype not in FLOAT_TYPES:
            raise InvalidArgumentError(
                f"hidden_states are {x_TD.dtype}, expected a float type", reason="BAD_TENSOR", field="hidden_states"
            )
        topk = _decode_topk(request)
        self._worker.runner.layer_calls.check(request.layer, x_TD, topk)
        num_tokens = x_TD.shape[0]
        generations = tuple(request.adapter_generations) or (0,) * num_tokens
        if len(generations) != num_tokens:
            raise InvalidArgumentError(
                f"{len(generations)} adapters for {num_tokens} tokens, expected one a token or none",
                reason="BAD_ADAPTER_INDEX",
                field="adapter_index",
            )
        future: Future[torch.Tensor] = Future()
        call = ExpertCall(
            layer=request.layer,
            x_TD=x_TD,
            topk=topk,
            adapter_generations=generations,
            routed_only=request.routed_only,
            result=future,
        )
        self._worker.loop.add_expert_call(call)
        return request.request_id, x_TD.dtype, future


def _decode_topk(request: pb.ForwardExpertsRequest) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not request.HasField("top_k"):
        return None
    expert_TK = to_torch(request.top_k.expert_ids, field="top_k.expert_ids", shape=(None, None))
    weight_TK = to_torch(request.top_k.weights, field="top_k.weights", shape=(None, None))
    if expert_TK.dtype is not torch.int32 or weight_TK.dtype not in FLOAT_TYPES:
        raise InvalidArgumentError(
            f"top_k has ids of {expert_TK.dtype} and weights of {weight_TK.dtype}, expected int32 and a float type",
            reason="BAD_TENSOR",
            field="top_k",
        )
    return expert_TK, weight_TK.to(torch.float32)


def _encode(output: GenerateOutput) -> pb.GenerateTokensResponse:
    return pb.GenerateTokensResponse(
        token_ids=output.token_ids,
        logits=None if output.logits_NV is None else array_to_message(output.logits_NV),
        prompt_logits=None if output.prompt_logits_NV is None else array_to_message(output.prompt_logits_NV),
        finish_reason=int(output.finish),  # type: ignore[arg-type]
    )
