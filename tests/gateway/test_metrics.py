"""The metrics port, and plain clients that know nothing but reflection."""

from __future__ import annotations

import asyncio
import urllib.request

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from epilora.errors import ResourceExhaustedError
from epilora.settings import GatewaySettings
from gateway.servicers import SERVICE_NAMES
from tests.gateway.conftest import Cluster, refused


@pytest.fixture
def settings(settings: GatewaySettings) -> GatewaySettings:
    return settings.model_copy(update={"metrics_listen": "127.0.0.1:0"})


async def scrape(cluster: Cluster) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    url = f"http://{cluster.gateway.metrics_address}/metrics"
    text = (await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read())).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_metrics_show_requests_adapters_and_ranks(cluster: Cluster) -> None:
    await cluster.client.load("a")
    await cluster.client.tokens("a", 4)
    await refused(cluster.client.generate("none"))
    for ep_rank in (0, 1):
        cluster.script.fail("GenerateTokens", ResourceExhaustedError("full", reason="QUEUE_FULL"), ep_rank)
    await refused(cluster.client.generate())
    await asyncio.sleep(0.2)
    seen = await scrape(cluster)
    generate = ("method", "/epilora.v1.GenerationService/Generate")
    assert seen["epilora_requests_total", (("code", "OK"), generate)] == 1
    assert seen["epilora_requests_total", (("code", "NOT_FOUND"), generate)] == 1
    assert seen["epilora_requests_total", (("code", "RESOURCE_EXHAUSTED"), generate)] == 1
    assert seen["epilora_request_seconds_count", (generate,)] == 3
    # What a rank refused is no prompt that was computed.
    assert seen["epilora_prompt_tokens_total", ()] == 1
    assert seen["epilora_generated_tokens_total", ()] == 4
    assert seen["epilora_adapters", (("state", "SERVING"),)] == 1
    assert seen["epilora_adapter_resident_bytes", (("adapter", "a"),)] == 200
    assert seen["epilora_rank_ready", (("ep_rank", "1"),)] == 1
    assert seen["epilora_consensus_wait_seconds_count", (("ep_rank", "1"),)] == 4
    assert seen["epilora_consensus_wait_seconds_sum", (("ep_rank", "1"),)] == 0.5
    assert seen["epilora_loader_cache_used_bytes", ()] == 7
    assert seen["epilora_group_restarts_total", ()] == 0
    await cluster.client.unload("a")
    await cluster.ranks.restart_all("incarnation-2")
    async with asyncio.timeout(5):
        while (seen := await scrape(cluster))["epilora_group_restarts_total", ()] != 1:
            await asyncio.sleep(0.05)
    assert seen["epilora_adapters", (("state", "SERVING"),)] == 0
    assert ("epilora_adapter_resident_bytes", (("adapter", "a"),)) not in seen


@pytest.mark.parametrize("corrupt", [True, False], ids=["no message", "not UTF-8"])
@pytest.mark.parametrize(
    "kind, method, name_field",
    [
        ("unary_unary", "/epilora.v1.AdapterService/LoadAdapter", 1),
        ("unary_stream", "/epilora.v1.GenerationService/Generate", 3),
        ("stream_stream", "/epilora.v1.ExpertService/Forward", 5),
    ],
)
async def test_bytes_that_are_no_request_are_refused_and_counted(
    cluster: Cluster, kind: str, method: str, name_field: int, corrupt: bool
) -> None:
    # A field whose number has no end; or one of two bytes, in which UTF-8 would not begin.
    data = b"\xff" * 12 if corrupt else bytes([name_field << 3 | 2, 2, 0xFF, 0xFE])
    call = getattr(cluster.client.channel, kind)(method)(iter([data]) if kind == "stream_stream" else data)
    error = await asyncio.wait_for(refused(call), 5)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_REQUEST_BYTES"), error.message
    async with asyncio.timeout(5):
        counted = ("epilora_requests_total", (("code", "INVALID_ARGUMENT"), ("method", method)))
        while (await scrape(cluster)).get(counted) != 1:
            await asyncio.sleep(0.05)


async def test_calls_whose_time_is_up_are_told_from_those_whose_caller_left(cluster: Cluster) -> None:
    cluster.ranks.token_pause = 0.1
    await refused(cluster.client.generate(max_tokens=60, timeout=0.3))
    left = cluster.client.generate(max_tokens=60, timeout=30)
    await left.read()
    left.cancel()
    generate = ("method", "/epilora.v1.GenerationService/Generate")
    codes: dict[str, float] = {}
    async with asyncio.timeout(5):
        while sum(codes.values()) < 2:
            seen = await scrape(cluster)
            codes = {
                dict(labels)["code"]: value
                for (name, labels), value in seen.items()
                if name == "epilora_requests_total" and generate in labels
            }
            await asyncio.sleep(0.05)
    assert codes == {"DEADLINE_EXCEEDED": 1, "CANCELLED": 1}


async def test_reflection_names_the_services(cluster: Cluster) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(cluster.client.channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    response = await call.read()
    names = {service.name for service in response.list_services_response.service}
    assert names >= {*SERVICE_NAMES, "grpc.health.v1.Health"}
