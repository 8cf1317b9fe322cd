"""WorkerService on one real rank whose step loop starts when a test says so: order of answers, limits of the queue."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from compute_worker.ep_group import EPGroup
from compute_worker.servicer import WorkerServicer
from compute_worker.worker import Worker
from epilora.rpc import error_from, make_channel, start_server
from epilora.settings import WorkerSettings
from epilora.v1 import types_pb2, worker_service_pb2, worker_service_pb2_grpc
from epilora.wire import encode_tensor

MODEL = Path(__file__).resolve().parents[1] / "fixtures" / "models" / "qwen3moe-T"
LIMIT = 2


@pytest.fixture(scope="module")
def worker() -> Worker:
    settings = WorkerSettings(
        model=MODEL,
        num_ranks=1,
        device="cpu",
        kv_cache_bytes=1 << 20,
        kv_block_size=4,
        max_queued_requests=LIMIT,
    )
    return Worker(settings=settings, group=EPGroup.from_environment(settings), on_failure=lambda _: None)


@asynccontextmanager
async def served(worker: Worker) -> AsyncIterator[Any]:
    """A stub of the rank. Its loop is not started."""
    failures: list[BaseException] = []
    worker.loop = worker._make_loop(failures.append)
    with tempfile.TemporaryDirectory(prefix="epl") as directory:
        address = f"unix:{directory}/worker.sock"
        server = await start_server(
            address,
            register=lambda s: worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerServicer(worker), s),
            service_names=["epilora.v1.WorkerService"],
        )
        async with make_channel(address) as channel:
            yield worker_service_pb2_grpc.WorkerServiceStub(channel)
        await server.server.stop(0)
    worker.loop.stop()
    await asyncio.to_thread(worker.loop._thread.join, 10)
    assert not worker.loop._thread.is_alive()
    assert not failures


def forward_request(worker: Worker, number: int, **fields: Any) -> worker_service_pb2.ForwardExpertsRequest:
    x_TD = np.full((2, worker.model.hidden_size), number, dtype=np.float32)
    return worker_service_pb2.ForwardExpertsRequest(
        request_id=number, hidden_states=encode_tensor(x_TD, types_pb2.DATA_TYPE_FLOAT32), **fields
    )


async def _until_arrived(worker: Worker, number: int) -> None:
    async with asyncio.timeout(10):
        while worker.loop._inbox.qsize() < number:
            await asyncio.sleep(0.01)


async def test_answers_before_a_refused_message_come_before_its_status(worker: Worker) -> None:
    requests = [forward_request(worker, number) for number in range(10)]
    requests += [forward_request(worker, 10, layer=99), forward_request(worker, 11)]
    answers = []
    async with served(worker) as stub:

        async def read() -> None:
            async for response in stub.ForwardExperts(iter(requests), timeout=20):
                answers.append(response.request_id)

        reading = asyncio.ensure_future(read())
        await _until_arrived(worker, 10)
        await asyncio.sleep(0.1)  # the refused message comes, too
        worker.loop.start()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reading
    error = error_from(caught.value)
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "layer"), error.message
    assert answers == list(range(10))


async def test_expert_messages_take_no_place_of_requests_to_generate(worker: Worker) -> None:
    expert_requests = [forward_request(worker, number) for number in range(LIMIT + 3)]
    request = worker_service_pb2.GenerateTokensRequest(request_id="r", token_ids=[5], max_tokens=2)
    async with served(worker) as stub:

        async def forward() -> list[int]:
            return [r.request_id async for r in stub.ForwardExperts(iter(expert_requests), timeout=20)]

        async def generate() -> int:
            return sum([len(r.token_ids) async for r in stub.GenerateTokens(request, timeout=20)])

        forwarding = asyncio.ensure_future(forward())
        await _until_arrived(worker, len(expert_requests))
        assert worker.info().rank.num_queued_requests == 0
        generating = [asyncio.ensure_future(generate()) for _ in range(LIMIT)]
        await _until_arrived(worker, len(expert_requests) + LIMIT)
        assert worker.info().rank.num_queued_requests == LIMIT
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate()
        assert error_from(caught.value).reason == "QUEUE_FULL"
        worker.loop.start()
        assert await asyncio.gather(*generating) == [2] * LIMIT
        assert await forwarding == list(range(len(expert_requests)))
        assert worker.info().rank.num_queued_requests == 0
