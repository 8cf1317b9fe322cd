"""ExpertService: order, adapters per message, bounded messages in flight, errors after the answers before them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest

from epilora import rpc
from epilora.errors import EpiloraError, FailedPreconditionError, InternalError
from epilora.v1 import expert_service_pb2, types_pb2
from epilora.wire import encode_tensor
from tests.gateway.conftest import Cluster, refused


def message(number: int, num_tokens: int = 2, **fields: Any) -> expert_service_pb2.ForwardRequest:
    hidden = np.full((num_tokens, 4), number, dtype=np.float32)
    return expert_service_pb2.ForwardRequest(
        request_id=number,
        hidden_states=encode_tensor(hidden, types_pb2.DATA_TYPE_FLOAT32),
        **fields,
    )


def sent_generations(cluster: Cluster) -> list[Any]:
    return [value for method, _, value in cluster.script.calls if method == "ForwardExperts"]


async def test_answers_keep_their_order_and_adapters_their_tokens(cluster: Cluster) -> None:
    await cluster.client.load("a")
    await cluster.client.load("b")
    messages = [
        message(1),
        message(2, adapter_names=["a"]),
        message(3, 3, adapter_names=["b", "a"], adapter_index=[1, -1, 0]),
        message(4, adapter_names=["a"], adapter_index=[-1, -1]),
        message(5, 0, adapter_names=["a"]),
    ]
    call = cluster.client.experts.Forward(iter(messages))
    answers = [response async for response in call]
    assert [response.request_id for response in answers] == [1, 2, 3, 4, 5]
    assert answers[2].hidden_states == messages[2].hidden_states
    assert sent_generations(cluster) == [[], [1, 1], [1, 0, 2], [], []]
    assert (await cluster.client.get("a")).num_requests_in_flight == 0


@pytest.mark.parametrize(
    "fields, field, code",
    [
        ({"adapter_names": ["a", "a"]}, "adapter_index", grpc.StatusCode.INVALID_ARGUMENT),
        ({"adapter_names": ["a"], "adapter_index": [0]}, "adapter_index", grpc.StatusCode.INVALID_ARGUMENT),
        ({"adapter_names": ["a"], "adapter_index": [0, 1]}, "adapter_index[1]", grpc.StatusCode.INVALID_ARGUMENT),
        ({"adapter_names": ["a"], "adapter_index": [-2, 0]}, "adapter_index[0]", grpc.StatusCode.INVALID_ARGUMENT),
        ({"adapter_names": ["none"]}, "adapter_names[0]", grpc.StatusCode.NOT_FOUND),
        ({"layer": 99}, "layer", grpc.StatusCode.NOT_FOUND),
    ],
)
async def test_error_comes_after_the_answers_before_it(
    cluster: Cluster, fields: dict[str, Any], field: str, code: grpc.StatusCode
) -> None:
    await cluster.client.load("a")
    call = cluster.client.experts.Forward(iter([message(1), message(2), message(3, **fields), message(4)]))
    answers = []

    async def read() -> None:
        async for response in call:
            answers.append(response.request_id)

    error = await refused(asyncio.ensure_future(read()))
    assert (error.code, error.field) == (code, field), (error.reason, error.message)
    assert answers == [1, 2]


@pytest.mark.parametrize("layer, adapter_names", [(99, []), (0, ["none"])], ids=["worker refuses", "gateway refuses"])
async def test_status_comes_after_what_the_caller_still_writes(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, layer: int, adapter_names: list[str]
) -> None:
    monkeypatch.setattr(rpc, "LAST_REQUESTS_SECONDS", 10.0)
    call = cluster.client.experts.Forward()
    await call.write(message(1))
    await call.write(message(2, layer=layer, adapter_names=adapter_names))
    assert (await call.read()).request_id == 1
    for number in range(3, cluster.settings.max_expert_messages):
        # Together more than the transport holds: a write waits until it is read, and a status meanwhile is lost.
        await call.write(message(number, 40_000))
    await call.done_writing()
    error = await asyncio.wait_for(refused(asyncio.ensure_future(call.read())), 10)
    assert (error.code, error.reason) == (
        grpc.StatusCode.NOT_FOUND,
        "LAYER_NOT_FOUND" if layer else "ADAPTER_NOT_FOUND",
    )


async def test_caller_that_never_ends_is_refused_soon(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "LAST_REQUESTS_SECONDS", 0.05)
    call = cluster.client.experts.Forward()
    await call.write(message(1, adapter_names=["none"]))
    error = await asyncio.wait_for(refused(asyncio.ensure_future(call.read())), 5)
    assert error.reason == "ADAPTER_NOT_FOUND"


class _InTurn(dict[tuple[str, int], EpiloraError]):
    """Faults of all ranks, each of which happens once."""

    def __init__(self, *faults: EpiloraError) -> None:
        super().__init__()
        self._faults = list(faults)

    def get(self, key: tuple[str, int], default: Any = None) -> Any:
        return self._faults.pop(0) if key[0] == "ForwardExperts" and self._faults else default


LOST = InternalError("Internal error from Core", reason="INTERNAL")
"""What grpc's client makes of a status that comes while it writes."""
REFUSAL = FailedPreconditionError("not here", reason="ADAPTER_NOT_RESIDENT")


@pytest.mark.parametrize(
    "faults, code, reason",
    [
        pytest.param([LOST, REFUSAL], REFUSAL.code, REFUSAL.reason, id="asked again, the worker says why"),
        pytest.param([LOST], grpc.StatusCode.UNAVAILABLE, "RANK_STREAM_ENDED", id="asked again, it answers"),
    ],
)
async def test_workers_status_that_was_lost(
    cluster: Cluster, faults: list[EpiloraError], code: grpc.StatusCode, reason: str
) -> None:
    cluster.script.faults = _InTurn(*faults)
    error = await asyncio.wait_for(refused(cluster.client.experts.Forward(iter([message(1)]))), 10)
    assert (error.code, error.reason) == (code, reason), error.message
    assert cluster.script.count("ForwardExperts") == 2


F32 = types_pb2.DATA_TYPE_FLOAT32


@pytest.mark.parametrize("adapter_names", [[], ["a"]])
@pytest.mark.parametrize(
    "tensor, field, text",
    [
        (types_pb2.Tensor(dtype=F32, shape=[2**26, 64]), "data", "has 0 bytes, expected 17179869184 "),
        (types_pb2.Tensor(dtype=F32, shape=[2**62, 2**62]), "shape", "expected at most"),
        (types_pb2.Tensor(dtype=F32, shape=[2**63 - 1, 0]), "shape", "expected at most"),
        (types_pb2.Tensor(dtype=F32, shape=[0, 2**63 - 1]), "shape", "expected at most"),
        (types_pb2.Tensor(dtype=F32, shape=[2**40, 0]), "shape", "expected [tokens, hidden_size]"),
        (types_pb2.Tensor(dtype=F32, shape=[4], data=bytes(16)), "shape", "expected [tokens, hidden_size]"),
        (types_pb2.Tensor(dtype=F32, shape=[1] * 65, data=bytes(4)), "shape", "has 65 dimensions"),
        (types_pb2.Tensor(dtype=F32, shape=[-3, -64], data=bytes(768)), "shape", "shape[0] is -3, expected 0 or more"),
        (types_pb2.Tensor(dtype=F32, shape=[3, -64]), "shape", "shape[1] is -64, expected 0 or more"),
        (
            types_pb2.Tensor(shape=[1, 1], data=bytes(4)),
            "dtype",
            "is DATA_TYPE_UNSPECIFIED, expected one of DATA_TYPE_",
        ),
        (types_pb2.Tensor(dtype=77, shape=[1, 1]), "dtype", "is 77, expected one of DATA_TYPE_FLOAT32, "),  # type: ignore[arg-type]
    ],
)
async def test_tensor_is_checked_before_its_shape_is_believed(
    cluster: Cluster, adapter_names: list[str], tensor: types_pb2.Tensor, field: str, text: str
) -> None:
    await cluster.client.load("a")
    wrong = expert_service_pb2.ForwardRequest(hidden_states=tensor, adapter_names=adapter_names)
    error = await asyncio.wait_for(refused(cluster.client.experts.Forward(iter([wrong]))), 5)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_TENSOR"), error.message
    assert error.field == f"hidden_states.{field}"
    assert text in error.message
    assert sent_generations(cluster) == []


async def test_messages_in_flight_are_bounded(cluster: Cluster) -> None:
    limit = cluster.settings.max_expert_messages
    gates = [cluster.script.hold("ForwardExperts", ep_rank) for ep_rank in (0, 1)]
    num_read = 0

    async def messages() -> AsyncIterator[expert_service_pb2.ForwardRequest]:
        nonlocal num_read
        for number in range(400):
            num_read += 1
            # Large, so that the transport's own buffers hold few of them.
            yield message(number, 20_000)

    call = cluster.client.experts.Forward(messages())
    await cluster.script.called("ForwardExperts")
    await asyncio.sleep(0.5)
    assert num_read < limit + 100
    for gate in gates:
        gate.set()
    assert [response.request_id async for response in call] == list(range(400))


async def test_lost_rank_ends_streams(cluster: Cluster) -> None:
    call = cluster.client.experts.Forward()
    await call.write(message(1))
    await call.read()
    for ep_rank in (0, 1):
        await cluster.ranks.kill(ep_rank)

    async def read() -> None:
        while await call.read() is not grpc.aio.EOF:
            pass

    error = await asyncio.wait_for(refused(asyncio.ensure_future(read())), 5)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "RANK_LOST")
    await cluster.ranks.restart_all("incarnation-2")


async def test_reload_in_mid_stream_drains_by_message(cluster: Cluster) -> None:
    await cluster.client.load("a")
    call = cluster.client.experts.Forward()
    await call.write(message(1, adapter_names=["a"]))
    await call.read()
    await cluster.client.load("a")
    async with asyncio.timeout(2):
        while list(cluster.ranks.generations()[0]) != [2]:
            await asyncio.sleep(0.01)
    await call.write(message(2, adapter_names=["a"]))
    assert (await call.read()).request_id == 2
    assert sent_generations(cluster) == [[1, 1], [2, 2]]
    await call.done_writing()


async def test_stop_ends_an_idle_stream(cluster: Cluster) -> None:
    call = cluster.client.experts.Forward()
    await call.write(message(1))
    await call.read()
    stopping = asyncio.ensure_future(cluster.gateway.stop())

    async def read() -> None:
        while await call.read() is not grpc.aio.EOF:
            pass

    error = await asyncio.wait_for(refused(asyncio.ensure_future(read())), 3)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
    await asyncio.wait_for(stopping, 3)
    from gateway.app import Gateway

    cluster.gateway = Gateway(cluster.settings)
    await cluster.gateway.start()
