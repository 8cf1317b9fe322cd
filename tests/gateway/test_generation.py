"""GenerationService: options, limits, cancellation, deadlines."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from epilora.errors import ResourceExhaustedError, UnavailableError
from epilora.v1 import generation_service_pb2
from gateway.text import Tokenizer
from tests.gateway.conftest import Cluster, refused
from tests.gateway.scripted import MAX_SEQUENCE_LENGTH, VOCAB_SIZE
from tests.gateway.test_text import byte_tokenizer

STOP = generation_service_pb2.FINISH_REASON_STOP
LENGTH = generation_service_pb2.FINISH_REASON_LENGTH


def request(**fields: Any) -> generation_service_pb2.GenerateRequest:
    if "text" not in fields and "token_ids" not in fields:
        fields["token_ids"] = {"ids": [5]}
    return generation_service_pb2.GenerateRequest(**fields)


async def answer(cluster: Cluster, **fields: Any) -> list[generation_service_pb2.GenerateResponse]:
    return [message async for message in cluster.client.generation.Generate(request(**fields))]


BAD = {
    "no prompt": (generation_service_pb2.GenerateRequest(), "prompt", "NO_PROMPT"),
    "empty prompt": (request(token_ids={}), "token_ids.ids", "EMPTY_PROMPT"),
    "token too large": (request(token_ids={"ids": [1, VOCAB_SIZE]}), "token_ids.ids[1]", "BAD_TOKEN_ID"),
    "token negative": (request(token_ids={"ids": [-1]}), "token_ids.ids[0]", "BAD_TOKEN_ID"),
    "too long": (request(token_ids={"ids": [1] * MAX_SEQUENCE_LENGTH}), "token_ids.ids", "PROMPT_TOO_LONG"),
    "temperature": (request(sampling={"temperature": -0.5}), "sampling.temperature", "BAD_OPTION"),
    "temperature low": (request(sampling={"temperature": 9.9e-6}), "sampling.temperature", "BAD_OPTION"),
    "temperature tiny": (request(sampling={"temperature": 1e-45}), "sampling.temperature", "BAD_OPTION"),
    "temperature nan": (request(sampling={"temperature": math.nan}), "sampling.temperature", "BAD_OPTION"),
    "temperature high": (request(sampling={"temperature": 101}), "sampling.temperature", "BAD_OPTION"),
    "top_p": (request(sampling={"top_p": 1.5}), "sampling.top_p", "BAD_OPTION"),
    "top_p inf": (request(sampling={"top_p": math.inf}), "sampling.top_p", "BAD_OPTION"),
    "top_k": (request(sampling={"top_k": -1}), "sampling.top_k", "BAD_OPTION"),
    "max_tokens": (request(stop={"max_tokens": -1}), "stop.max_tokens", "BAD_OPTION"),
    "stop token": (request(stop={"stop_token_ids": [3, 5000]}), "stop.stop_token_ids[1]", "BAD_TOKEN_ID"),
    "stop tokens": (request(stop={"stop_token_ids": [1] * 65}), "stop.stop_token_ids", "BAD_OPTION"),
    "empty stop string": (request(stop={"stop_strings": ["a", ""]}), "stop.stop_strings[1]", "BAD_OPTION"),
    "long stop string": (request(stop={"stop_strings": ["a" * 257]}), "stop.stop_strings[0]", "BAD_OPTION"),
    "stop strings": (request(stop={"stop_strings": ["a"] * 17}), "stop.stop_strings", "BAD_OPTION"),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_options_name_their_field(cluster: Cluster, name: str) -> None:
    bad, field, reason = BAD[name]
    error = await refused(cluster.client.generation.Generate(bad))
    assert (error.code, error.field, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, field, reason)
    assert "expected" in error.message
    assert cluster.script.count("GenerateTokens") == 0


@pytest.mark.parametrize("fields", [{"text": "hi"}, {"stop": {"stop_strings": ["a"]}}])
async def test_text_needs_a_tokenizer(cluster: Cluster, fields: dict[str, Any]) -> None:
    error = await refused(cluster.client.generation.Generate(request(**fields)))
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NO_TOKENIZER")


@pytest.mark.parametrize("temperature", [0, -0.0, 1e-5, 100])
async def test_temperatures_at_the_limits(cluster: Cluster, temperature: float) -> None:
    assert await answer(cluster, sampling={"temperature": temperature}, stop={"max_tokens": 1})


async def test_text_that_cannot_fit_is_refused_before_it_is_encoded(cluster: Cluster) -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    cluster.gateway._generator.tokenizer = tokenizer
    most = MAX_SEQUENCE_LENGTH * tokenizer.max_token_characters
    # With its thread gone, the tokenizer encodes nothing any more.
    tokenizer._thread.shutdown()
    error = await refused(cluster.client.generation.Generate(request(text="x" * (most + 1))))
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "text")
    assert (error.reason, error.metadata["max_characters"]) == ("PROMPT_TOO_LONG", str(most))
    assert f"expected at most {most}" in error.message


async def test_text_of_the_longest_tokens_is_encoded(cluster: Cluster) -> None:
    tokenizer = cluster.gateway._generator.tokenizer = Tokenizer(byte_tokenizer())
    assert tokenizer.max_token_characters == len("<eos>")
    assert await answer(cluster, text="<eos>" * (MAX_SEQUENCE_LENGTH - 1))
    error = await refused(cluster.client.generation.Generate(request(text="<eos>" * MAX_SEQUENCE_LENGTH)))
    assert (error.reason, error.metadata["num_tokens"]) == ("PROMPT_TOO_LONG", str(MAX_SEQUENCE_LENGTH))


async def test_defaults_limits_and_usage(cluster: Cluster) -> None:
    messages = await answer(cluster)
    assert sum(len(message.token_ids) for message in messages) == MAX_SEQUENCE_LENGTH - 1
    assert [message.finish_reason for message in messages[:-1]] == [0] * (len(messages) - 1)
    assert messages[-1].finish_reason == LENGTH
    assert messages[-1].usage == generation_service_pb2.Usage(
        num_prompt_tokens=1, num_generated_tokens=MAX_SEQUENCE_LENGTH - 1
    )
    assert not messages[0].HasField("usage")
    [sent] = [value for method, _, value in cluster.script.calls if method == "GenerateTokens"]
    assert (sent.max_tokens, list(sent.stop_token_ids)) == (MAX_SEQUENCE_LENGTH - 1, [999])
    assert sent.sampling.HasField("seed")
    await answer(cluster, sampling={"seed": 0, "temperature": 1}, stop={"ignore_eos": True, "stop_token_ids": [7]})
    sent = cluster.script.calls[-1][2]
    assert (sent.sampling.seed, list(sent.stop_token_ids)) == (0, [7])


async def test_stop_token_is_sent(cluster: Cluster) -> None:
    messages = await answer(cluster, stop={"stop_token_ids": [8]})
    assert [token for message in messages for token in message.token_ids] == [6, 7, 8]
    assert messages[-1].finish_reason == STOP


async def test_stop_string_ends_text_before_it_and_the_worker_s_call(cluster: Cluster) -> None:
    cluster.gateway._generator.tokenizer = Tokenizer(byte_tokenizer())
    tokenizer = cluster.gateway._generator.tokenizer
    [first] = await tokenizer.encode("a")
    cluster.ranks.token_pause = 0.01
    messages = await answer(cluster, text="a", stop={"max_tokens": 20, "stop_strings": ["ef"]})
    assert "".join(message.text for message in messages) == "bcd"
    assert [token for message in messages for token in message.token_ids] == [first + i for i in range(1, 6)]
    assert messages[-1].finish_reason == STOP
    assert messages[-1].usage.num_generated_tokens == 5
    async with asyncio.timeout(2):
        while cluster.ranks.active[0]:
            await asyncio.sleep(0.01)


async def test_text_not_held_back_is_sent_at_the_end(cluster: Cluster) -> None:
    cluster.gateway._generator.tokenizer = Tokenizer(byte_tokenizer())
    messages = await answer(cluster, text="a", stop={"max_tokens": 3, "stop_strings": ["cd"]})
    assert "".join(message.text for message in messages) == "b"
    messages = await answer(cluster, text="a", stop={"max_tokens": 3, "stop_strings": ["cdef"]})
    assert "".join(message.text for message in messages) == "bcd"
    assert messages[-1].finish_reason == LENGTH


async def test_cancelled_call_frees_its_place(cluster: Cluster) -> None:
    await cluster.client.load("a")
    cluster.ranks.token_pause = 0.05
    call = cluster.client.generate("a", 60)
    await call.read()
    assert (await cluster.client.get("a")).num_requests_in_flight == 1
    call.cancel()
    async with asyncio.timeout(2):
        while cluster.ranks.active[1] or (await cluster.client.get("a")).num_requests_in_flight:
            await asyncio.sleep(0.01)


async def test_a_call_is_in_flight_until_its_status_has_left(cluster: Cluster) -> None:
    in_flight = cluster.gateway._in_flight
    assert await answer(cluster)
    assert await in_flight.idle(5)
    await refused(cluster.client.generation.Generate(BAD["no prompt"][0]))
    assert await in_flight.idle(5)
    cluster.ranks.token_pause = 0.05
    call = cluster.client.generate("", 60)
    await call.read()
    assert not await in_flight.idle(0.05)
    call.cancel()
    assert await in_flight.idle(5)

    # The call is over for its ticket before its status is on the way; what comes between may take long.
    answered: list[Any] = []
    with in_flight.ticket(0):
        in_flight.until_answered(SimpleNamespace(add_done_callback=answered.append))
    assert not len(in_flight)
    assert not await in_flight.idle(0.05)
    answered[0](None)
    assert await in_flight.idle(5)


async def test_deadline_reaches_the_worker(cluster: Cluster) -> None:
    cluster.ranks.token_pause = 0.1
    error = await refused(cluster.client.generate(max_tokens=60, timeout=0.4))
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    async with asyncio.timeout(2):
        while cluster.ranks.active[0]:
            await asyncio.sleep(0.01)


async def test_worker_s_error_is_passed_on(cluster: Cluster) -> None:
    full = ResourceExhaustedError("full", reason="QUEUE_FULL", retry_after_seconds=1.5)
    for ep_rank in (0, 1):
        cluster.script.fail("GenerateTokens", full, ep_rank)
    error = await refused(cluster.client.generate())
    assert (error.code, error.reason, error.retry_after_seconds) == (full.code, "QUEUE_FULL", 1.5)


async def test_logits_are_cut_with_the_tokens(cluster: Cluster) -> None:
    from epilora.v1 import types_pb2
    from gateway.generation import _keep_rows

    tensor = types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_FLOAT32, shape=[3, 2], data=bytes(range(24)))
    _keep_rows(tensor, 2)
    assert (list(tensor.shape), tensor.data) == ([2, 2], bytes(range(16)))


async def test_a_call_that_comes_while_the_server_stops_is_told_so(cluster: Cluster) -> None:
    """Whoever calls again at once would otherwise be cut off by the server's end, as CANCELLED."""
    cluster.ranks.token_pause = 0.05
    running = asyncio.create_task(refused(cluster.client.generate("", 60)))
    async with asyncio.timeout(5):
        while not len(cluster.gateway._in_flight):
            await asyncio.sleep(0.01)
    cluster.gateway._in_flight.close(UnavailableError("the gateway is stopping", reason="SHUTTING_DOWN"))
    for error in (await running, await refused(cluster.client.generation.Generate(request()))):
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
    assert await cluster.gateway._in_flight.idle(5)
