"""Counts and times of the steps of one rank."""

from __future__ import annotations

import bisect
import threading
from collections import Counter
from collections.abc import Mapping

from epilora.v1 import worker_service_pb2

_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class StepStatistics:
    """Written by the step thread, read by RPC handlers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}
        self._buckets = [0] * (len(_BOUNDS) + 1)
        self._num_waits = 0
        self._wait_seconds = 0.0

    def record(self, kind: str, *, num_tokens: int, seconds: float) -> None:
        """Notes a step of a kind ("generate" or "expert") that computed something on this rank or another."""
        with self._lock:
            self._steps[kind] += 1
            self._tokens[kind] += num_tokens
            self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds
            if kind == "generate":
                self._buckets[bisect.bisect_left(_BOUNDS, seconds)] += 1

    def record_wait(self, seconds: float) -> None:
        """Notes how long this rank waited for the others' messages between two steps that computed something."""
        with self._lock:
            self._num_waits += 1
            self._wait_seconds += seconds

    def to_proto(
        self, *, num_expert_layers: Mapping[str, int], num_steps_by_form: Mapping[str, int]
    ) -> worker_service_pb2.StepStatistics:
        """As a message, with cumulative buckets; see there for the arguments."""
        with self._lock:
            cumulative, total = [], 0
            for count in self._buckets:
                total += count
                cumulative.append(total)
            return worker_service_pb2.StepStatistics(
                num_steps=dict(self._steps),
                seconds=dict(self._seconds),
                num_tokens=dict(self._tokens),
                bucket_bounds=_BOUNDS,
                bucket_counts=cumulative,
                num_expert_layers=num_expert_layers,
                num_steps_by_form=num_steps_by_form,
                num_consensus_waits=self._num_waits,
                consensus_wait_seconds=self._wait_seconds,
            )
