"""Prometheus metrics, on a port of their own.

Counters are counted here; gauges are read from the gateway's state when they are scraped, so that
an adapter that is gone leaves no series behind.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from epilora.v1 import loader_service_pb2
from gateway.adapter_table import AdapterTable, state_name
from gateway.in_flight import InFlight
from gateway.ranks import Group, Rank

_LATENCY_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """What the gateway counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "epilora_requests",
            "RPCs answered, by full method name and status code.",
            ["method", "code"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "epilora_request_seconds",
            "Duration of RPCs, seconds.",
            ["method"],
            buckets=_LATENCY_SECONDS,
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "epilora_prompt_tokens", "Tokens of prompts that were computed.", registry=self.registry
        )
        self.generated_tokens = Counter("epilora_generated_tokens", "Tokens generated.", registry=self.registry)
        self._server: Any = None

    def observe(self, method: str, code: str, seconds: float) -> None:
        """Counts one RPC."""
        self._requests.labels(method, code).inc()
        self._seconds.labels(method).observe(seconds)

    def listen(self, address: str) -> str:
        """Serves the metrics at "host:port" (port 0: any free one); the address bound."""
        host, _, port = address.rpartition(":")
        self._server, _ = start_http_server(int(port), addr=host.strip("[]"), registry=self.registry)
        return f"{host}:{self._server.server_address[1]}"

    def close(self) -> None:
        """Stops serving."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


class CacheView(Protocol):
    """What is read of the loader."""

    cache: loader_service_pb2.GetCacheResponse | None


class StateCollector(Collector):
    """Gauges and the ranks' own counters."""

    def __init__(self, *, group: Group, table: AdapterTable, in_flight: InFlight, loader: CacheView) -> None:
        self._group = group
        self._table = table
        self._in_flight = in_flight
        self._loader = loader

    def collect(self) -> Iterable[Metric]:
        """Everything as it is now."""
        yield from self._adapters()
        yield from self._ranks()
        yield from self._steps()
        yield from self._expert_rows()
        yield from self._cache()

    def _adapters(self) -> Iterator[Metric]:
        shown = [generation for entry in self._table.entries() if (generation := entry.shown()) is not None]
        tally = Tally(state_name(generation.state) for generation in shown)
        states = GaugeMetricFamily("epilora_adapters", "Adapters by state.", labels=["state"])
        for state in ("LOADING", "STAGED", "SERVING", "DRAINING", "FAILED"):
            states.add_metric([state], tally[state])
        yield states
        resident = GaugeMetricFamily(
            "epilora_adapter_resident_bytes", "Bytes of an adapter on all ranks together.", labels=["adapter"]
        )
        requests = GaugeMetricFamily(
            "epilora_adapter_requests_in_flight", "Calls that use an adapter now.", labels=["adapter"]
        )
        for generation in shown:
            if generation.resident_bytes:
                resident.add_metric([generation.name], generation.resident_bytes)
                requests.add_metric([generation.name], len(generation.uses))
        yield resident
        yield requests

    def _ranks(self) -> Iterator[Metric]:
        yield _by_rank("epilora_rank_ready", "1 while the rank answers and steps.", self._group, _ready)
        yield _by_rank(
            "epilora_requests_in_flight",
            "Calls of this gateway on the rank.",
            self._group,
            lambda rank: self._in_flight.on_rank(rank.ep_rank),
        )
        yield _by_rank("epilora_requests_running", "Requests being generated.", self._group, _running)
        yield _by_rank("epilora_requests_queued", "Generate requests that wait on the rank.", self._group, _queued)
        yield _by_rank("epilora_rank_adapter_bytes", "Bytes of resident adapters.", self._group, _adapter_bytes)
        yield _by_rank("epilora_rank_pinned_cache_bytes", "Bytes of registered slices.", self._group, _pinned_bytes)
        yield _by_rank("epilora_rank_pin_failures", "Slices that could not be registered.", self._group, _pin_failures)
        restarts = CounterMetricFamily("epilora_group_restarts", "Times the group came back as a new incarnation.")
        restarts.add_metric([], self._group.num_restarts)
        yield restarts

    def _steps(self) -> Iterator[Metric]:
        labels = ["ep_rank", "kind"]
        steps = CounterMetricFamily("epilora_steps", "Steps that computed something.", labels=labels)
        seconds = CounterMetricFamily("epilora_steps_seconds", "Seconds spent in steps.", labels=labels)
        tokens = CounterMetricFamily("epilora_steps_tokens", "Tokens computed in steps.", labels=labels)
        times = HistogramMetricFamily("epilora_step_seconds", "Duration of generate steps.", labels=["ep_rank"])
        waits = SummaryMetricFamily(
            "epilora_consensus_wait_seconds",
            "How long a rank waited for the other ranks' messages between two steps that computed something.",
            labels=["ep_rank"],
        )
        for rank in self._group.ranks:
            if rank.info is None:
                continue
            statistics, label = rank.info.steps, str(rank.ep_rank)
            for family, values in (
                (steps, statistics.num_steps),
                (seconds, statistics.seconds),
                (tokens, statistics.num_tokens),
            ):
                for kind, value in sorted(values.items()):
                    family.add_metric([label, kind], value)
            waits.add_metric([label], statistics.num_consensus_waits, statistics.consensus_wait_seconds)
            bounds = [*(str(bound) for bound in statistics.bucket_bounds), "+Inf"]
            if len(bounds) == len(statistics.bucket_counts):
                buckets = list(zip(bounds, statistics.bucket_counts, strict=True))
                times.add_metric([label], buckets, sum_value=statistics.seconds.get("generate", 0.0))
        yield from (steps, seconds, tokens, times, waits)
        yield from self._forms()

    def _forms(self) -> Iterator[Metric]:
        layers = CounterMetricFamily(
            "epilora_expert_layers", "MoE layers computed, by expert backend.", labels=["ep_rank", "backend"]
        )
        forms = CounterMetricFamily(
            "epilora_generate_steps",
            "Generate steps by form: graph (a replayed CUDA graph), fixed (the same shapes, not captured yet), eager.",
            labels=["ep_rank", "form"],
        )
        for rank in self._group.ranks:
            if rank.info is not None:
                for family, values in (
                    (layers, rank.info.steps.num_expert_layers),
                    (forms, rank.info.steps.num_steps_by_form),
                ):
                    for kind, value in sorted(values.items()):
                        family.add_metric([str(rank.ep_rank), kind], value)
        yield from (layers, forms)

    def _expert_rows(self) -> Iterator[Metric]:
        rows = CounterMetricFamily(
            "epilora_expert_rows", "(token, expert) pairs that a rank has computed.", labels=["ep_rank", "layer"]
        )
        for rank in self._group.ranks:
            for entry in rank.info.expert_load if rank.info is not None else ():
                rows.add_metric([str(rank.ep_rank), str(entry.layer)], sum(entry.num_rows))
        yield rows

    def _cache(self) -> Iterator[Metric]:
        cache = self._loader.cache
        ready = GaugeMetricFamily("epilora_loader_ready", "1 while the loader answers.")
        ready.add_metric([], int(cache is not None))
        yield ready
        if cache is None:
            return
        for name, text, value in (
            ("used_bytes", "Bytes of slices in the loader's cache.", cache.used_bytes),
            ("budget_bytes", "Bytes the loader's cache may use.", cache.budget_bytes),
            ("entries", "Entries in the loader's cache.", cache.num_entries),
            ("leases", "Leases held on entries of the loader's cache.", cache.num_leases),
        ):
            family = GaugeMetricFamily(f"epilora_loader_cache_{name}", text)
            family.add_metric([], value)
            yield family
        for name, text, value in (
            ("epilora_loader_builds", "Adapters that the loader has read and sliced.", cache.num_builds),
            ("epilora_loader_redis_pulls", "Adapters whose slices came from Redis.", cache.num_redis_pulls),
            ("epilora_loader_redis_pushes", "Adapters whose slices were given to Redis.", cache.num_redis_pushes),
            (
                "epilora_loader_redis_losses",
                "Adapters of which Redis had lost a part; built again.",
                cache.num_redis_losses,
            ),
            (
                "epilora_loader_redis_errors",
                "Times that Redis failed, was too slow or had no room.",
                cache.num_redis_errors,
            ),
        ):
            counter = CounterMetricFamily(name, text)
            counter.add_metric([], value)
            yield counter


def _by_rank(name: str, text: str, group: Group, value: Any) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=["ep_rank"])
    for rank in group.ranks:
        family.add_metric([str(rank.ep_rank)], value(rank))
    return family


def _ready(rank: Rank) -> int:
    return int(not rank.problem)


def _running(rank: Rank) -> int:
    return rank.info.rank.num_running_requests if rank.info is not None and not rank.problem else 0


def _queued(rank: Rank) -> int:
    return rank.info.rank.num_queued_requests if rank.info is not None and not rank.problem else 0


def _pinned_bytes(rank: Rank) -> int:
    return rank.info.memory.pinned_cache_bytes if rank.info is not None and not rank.problem else 0


def _pin_failures(rank: Rank) -> int:
    return rank.info.memory.num_pin_failures if rank.info is not None and not rank.problem else 0


def _adapter_bytes(rank: Rank) -> int:
    return rank.info.memory.adapter_bytes if rank.info is not None and not rank.problem else 0
