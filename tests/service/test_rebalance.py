"""A serving group moves to another placement: no failed request, no other token, the memory that was planned."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from epilora.cli.app import app
from epilora.memory_plan import plan_memory, read_adapter
from epilora.model_spec import ModelSpec
from epilora.placement import ExpertPlacement
from epilora.rpc import error_from
from epilora.v1 import cluster_service_pb2
from tests.service.harness import Service
from tests.service.test_lost_ranks import NOTICED_SECONDS, RESTORED_SECONDS

ADAPTERS = {
    "a": "peft-0.17.1-transformers-4.57.3/qwen3moe-T-all",
    "b": "peft-0.21.2/qwen3moe-T-both",
    "c": "peft-0.18.1/qwen3moe-T-rslora_pattern",
}
PROMPT = [1, 2, 3, 4, 5]
NUM_TOKENS = 24
NUM_KILLED = 6
COUNTED_SECONDS = 20.0


class Traffic:
    """Generations one after another in a thread for each adapter, each token checked, until `stop`."""

    def __init__(self, service: Service, expected: dict[str, list[int]]) -> None:
        self.num_done = 0
        self.failures: list[object] = []
        self._service, self._expected = service, expected
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(name,), daemon=True) for name in expected]
        for thread in self._threads:
            thread.start()

    def _run(self, adapter: str) -> None:
        while not self._ends.is_set():
            try:
                tokens = self._service.tokens(PROMPT, adapter, max_tokens=NUM_TOKENS)
            except grpc.RpcError as error:
                self.failures.append(error)
                return
            if tokens != self._expected[adapter]:
                self.failures.append((adapter, tokens, self._expected[adapter]))
            self.num_done += 1

    def wait_for(self, num_more: int) -> None:
        wanted, deadline = self.num_done + num_more, time.monotonic() + 60
        while self.num_done < wanted and not self.failures:
            assert time.monotonic() < deadline, "the requests do not go on"
            time.sleep(0.02)

    def stop(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads), "a call hangs"


def answers(service: Service) -> dict[str, list[int]]:
    return {name: service.tokens(PROMPT, name, max_tokens=NUM_TOKENS) for name in ("", *ADAPTERS)}


def rebalance(service: Service, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["rebalance", "--address", service.address, *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def placement_of(service: Service) -> ExpertPlacement:
    answer = service.cluster().GetPlacement(cluster_service_pb2.GetPlacementRequest(), timeout=10)
    return ExpertPlacement.from_proto(answer)


def use_experts(service: Service, num_tokens: int) -> None:
    """Prompts of random tokens, the same ones each time."""
    rng = random.Random(3)
    for _ in range(4):
        service.tokens([rng.randrange(1, 60) for _ in range(num_tokens)], max_tokens=1)


def counted_spread(service: Service, num_rows: int) -> float:
    """Rows of the busiest rank over the mean once this many rows a layer were counted."""
    deadline = time.monotonic() + COUNTED_SECONDS
    while True:
        load = service.cluster().GetExpertLoad(cluster_service_pb2.GetExpertLoadRequest(), timeout=10)
        if all(sum(layer.expert_rows) == num_rows for layer in load.layers):
            break
        assert time.monotonic() < deadline, (num_rows, load)
        time.sleep(0.1)
    busiest = sum(max(layer.rank_rows) for layer in load.layers)
    return busiest / sum(sum(layer.rank_rows) / len(layer.rank_rows) for layer in load.layers)


def check_rows_of_adapters(service: Service, placement: ExpertPlacement, tokens: list[int], top_k: int) -> None:
    """One more answer of adapter a adds its rows to those of a, and to no other adapter's."""

    def rows() -> dict[str, list[int]]:
        request = cluster_service_pb2.GetExpertLoadRequest(by_adapter=True)
        load = service.cluster().GetExpertLoad(request, timeout=10)
        assert load.placement_id == placement.placement_id
        return {adapter.name: [sum(layer.expert_rows) for layer in adapter.layers] for adapter in load.adapters}

    # Counters are read once a second.
    time.sleep(1.2)
    service.tokens(PROMPT, max_tokens=1)
    time.sleep(0.2)
    first = rows()
    assert list(first) == sorted(ADAPTERS)
    time.sleep(1.2)
    assert service.tokens(PROMPT, "a", max_tokens=NUM_TOKENS) == tokens
    expected = (len(PROMPT) + NUM_TOKENS - 1) * top_k
    deadline = time.monotonic() + COUNTED_SECONDS
    while [now - then for now, then in zip(rows()["a"], first["a"], strict=True)] != [expected] * len(first["a"]):
        assert time.monotonic() < deadline, (rows(), first, expected)
        # A step reads the counters; the base model's do not count here.
        service.tokens(PROMPT, max_tokens=1)
        time.sleep(0.1)
    assert {name: rows()[name] for name in "bc"} == {name: first[name] for name in "bc"}


@pytest.fixture
def loaded(service: Service, adapters: Path) -> Iterator[Service]:
    """The shared service with three adapters; afterwards as it was."""
    for name, source in ADAPTERS.items():
        service.load(name, adapters / source)
    yield service
    service.unload_all()
    rebalance(service, "--placement", "linear")


def test_experts_and_adapters_move_beside_traffic(loaded: Service, models: Path, adapters: Path) -> None:
    model = ModelSpec.from_directory(models / "qwen3moe-T")
    before = answers(loaded)
    traffic = Traffic(loaded, before)
    traffic.wait_for(4)
    assert "adapters moved along" in rebalance(loaded, "--placement", "round_robin")
    traffic.wait_for(4)
    moved = loaded.cluster().Rebalance(cluster_service_pb2.RebalanceRequest(num_redundant_experts=2), timeout=60)
    traffic.wait_for(4)
    traffic.stop()
    assert traffic.failures == []
    assert moved.num_adapters == len(ADAPTERS)
    assert answers(loaded) == before

    placement = placement_of(loaded)
    assert placement.placement_id == moved.placement_id
    assert all(placement.num_copies(layer).sum() == model.moe_layers[0].num_experts + 2 for layer in placement.layers)
    forms = {name: read_adapter(adapters / source, model, max_lora_rank=512) for name, source in ADAPTERS.items()}
    plans = plan_memory(model, placement, forms, element_bytes=4, num_sequences=1)
    memory = loaded.memory()
    assert [rank.base_expert_bytes for rank in memory] == [plan.base_expert_bytes for plan in plans]
    for rank, plan in zip(memory, plans, strict=True):
        expected = {adapter.name: (adapter.expert_bytes, adapter.dense_bytes) for adapter in plan.adapters}
        assert {held.name: (held.expert_bytes, held.dense_bytes) for held in rank.adapters} == expected
        assert rank.adapter_bytes == sum(map(sum, expected.values()))
    check_rows_of_adapters(loaded, placement, before["a"], model.num_experts_per_token)
    # What is loaded from now on is sliced for the new placement.
    loaded.load("d", adapters / ADAPTERS["a"])
    assert loaded.tokens(PROMPT, "d", max_tokens=NUM_TOKENS) == before["a"]


def test_the_load_spreads_as_planned(loaded: Service, models: Path) -> None:
    info = loaded.cluster().GetTopology(cluster_service_pb2.GetTopologyRequest(), timeout=10).groups[0].model
    num_tokens = info.max_sequence_length // 2
    num_rows = 4 * num_tokens * info.num_experts_per_token
    rebalance(loaded, "--placement", "round_robin")
    use_experts(loaded, num_tokens)
    before = counted_spread(loaded, num_rows)
    moved = loaded.cluster().Rebalance(cluster_service_pb2.RebalanceRequest(num_redundant_experts=2), timeout=60)
    assert moved.spread_before == pytest.approx(before)
    assert moved.spread_planned < before
    use_experts(loaded, num_tokens)
    # Copies share by position; a plan takes it that they share equally.
    after = counted_spread(loaded, num_rows)
    assert after < before
    assert after == pytest.approx(moved.spread_planned, abs=0.15)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_ranks_that_die_while_experts_move(start_service: Callable[..., Service], models: Path, adapters: Path) -> None:
    """Either placement, never a mixture: the answers stay, and a restarted group is as it was started."""
    service = start_service(models / "qwen3moe-T", ranks=2, environment={"EPILORA_MAX_RESTARTS": "1000"})
    for name, source in ADAPTERS.items():
        service.load(name, adapters / source)
    before, started = answers(service), placement_of(service)
    rng = random.Random(8)
    for _ in range(NUM_KILLED):
        traffic = Traffic(service, before)
        killer = threading.Timer(
            rng.uniform(0.0, 0.4), service.kill, args=[service.worker_pid(rng.randrange(service.ranks))]
        )
        killer.start()
        refused: list[grpc.RpcError] = []
        while killer.is_alive() and not refused:
            request = cluster_service_pb2.RebalanceRequest(num_redundant_experts=rng.randrange(4))
            try:
                service.cluster().Rebalance(request, timeout=60)
            except grpc.RpcError as error:
                refused.append(error)
        assert all(error_from(error).code is grpc.StatusCode.UNAVAILABLE for error in refused), refused  # type: ignore[arg-type]
        service.until_health("NOT_SERVING", NOTICED_SECONDS)
        traffic.stop()
        assert all(
            isinstance(failure, grpc.RpcError) and failure.code() is grpc.StatusCode.UNAVAILABLE
            for failure in traffic.failures
        ), traffic.failures
        service.until_health("SERVING", RESTORED_SECONDS)
        assert answers(service) == before
        assert placement_of(service) == started


@pytest.mark.soak
def test_shared_experts_are_served_and_moved(
    start_service: Callable[..., Service], loaded: Service, models: Path, adapters: Path
) -> None:
    """Four ranks, two to an expert, answer as two with whole experts do, before and after a move."""
    expected = answers(loaded)
    service = start_service(models / "qwen3moe-T", ranks=4, environment={"EPILORA_EXPERT_TP": "2"})
    for name, source in ADAPTERS.items():
        service.load(name, adapters / source)
    assert answers(service) == expected
    assert placement_of(service).num_ranks == 2
    whole, parts = loaded.memory(), service.memory()
    assert sum(rank.base_expert_bytes for rank in parts) == sum(rank.base_expert_bytes for rank in whole)
    model = ModelSpec.from_directory(models / "qwen3moe-T")
    forms = {name: read_adapter(adapters / source, model, max_lora_rank=512) for name, source in ADAPTERS.items()}
    plans = plan_memory(model, placement_of(service), forms, element_bytes=4, num_sequences=1, expert_tp=2)
    planned = [sum(adapter.expert_bytes + adapter.dense_bytes for adapter in plan.adapters) for plan in plans]
    assert [rank.adapter_bytes for rank in parts] == planned
    traffic = Traffic(service, expected)
    traffic.wait_for(2)
    rebalance(service, "--redundant", "2")
    traffic.wait_for(2)
    traffic.stop()
    assert traffic.failures == []
    assert answers(service) == expected
