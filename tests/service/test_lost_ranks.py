"""Ranks that die or hang at random times under load: no wrong token, no call that hangs, and everything comes back."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from epilora.rpc import error_from
from epilora.v1 import generation_service_pb2
from tests.service.harness import Service

ADAPTERS = {"a": "peft-0.17.1-transformers-4.57.3/qwen3moe-T-all", "b": "peft-0.21.2/qwen3moe-T-both"}
PROMPT = [1, 2, 3, 4, 5]
NUM_TOKENS = 48
KILL_NOTICED_SECONDS = 5.0
NOTICED_SECONDS = 15.0
# Loading takes a while on a busy machine.
RESTORED_SECONDS = 150.0
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)


class Traffic:
    """Generations one after another in threads, each token checked, until calls fail."""

    def __init__(self, service: Service, expected: dict[str, list[int]]) -> None:
        self.wrong: list[str] = []
        self.errors: list[grpc.RpcError] = []
        self._service, self._expected = service, expected
        self._threads = [threading.Thread(target=self._run, args=(name,), daemon=True) for name in expected]
        for thread in self._threads:
            thread.start()

    def _run(self, adapter: str) -> None:
        expected = self._expected[adapter]
        while True:
            request = generation_service_pb2.GenerateRequest(
                token_ids=generation_service_pb2.TokenIds(ids=PROMPT),
                adapter_name=adapter,
                stop=generation_service_pb2.StopOptions(max_tokens=NUM_TOKENS, ignore_eos=True),
            )
            got: list[int] = []
            try:
                for response in self._service.generation().Generate(request, timeout=120):
                    got += response.token_ids
            except grpc.RpcError as error:
                self.errors.append(error)
            if got != expected[: len(got)]:
                self.wrong.append(f"{adapter!r}: {got}, expected {expected}")
            if self.errors or self.wrong:
                return

    def join(self, seconds: float) -> None:
        for thread in self._threads:
            thread.join(seconds)
        assert not any(thread.is_alive() for thread in self._threads), "a call hangs"


def check_errors(errors: list[grpc.RpcError]) -> None:
    """Calls in flight were told that they lost a rank; those that came just after, that the ranks are away."""
    mapped = [error_from(error) for error in errors]  # type: ignore[arg-type]
    assert {error.code for error in mapped} == {grpc.StatusCode.UNAVAILABLE}, mapped
    assert "RANK_LOST" in {error.reason for error in mapped} <= {"RANK_LOST", "GROUP_NOT_READY"}, mapped
    assert all(error.retry_after_seconds for error in mapped)


def lose_ranks(service: Service, adapters: Path, num_rounds: int) -> None:
    """Rounds of each signal, in turn, each at a random rank and time."""
    rng = random.Random(6)
    generations = {name: service.load(name, adapters / source).generation for name, source in ADAPTERS.items()}
    expected = {name: service.tokens(PROMPT, name, max_tokens=NUM_TOKENS) for name in ("", *ADAPTERS)}
    assert all(len(tokens) == NUM_TOKENS for tokens in expected.values())
    for number in SIGNALS * num_rounds:
        traffic = Traffic(service, expected)
        time.sleep(rng.uniform(0.2, 1.5))
        assert not traffic.errors
        service.kill(service.worker_pid(rng.randrange(service.ranks)), number=number)
        service.until_health("NOT_SERVING", KILL_NOTICED_SECONDS if number == signal.SIGKILL else NOTICED_SECONDS)
        traffic.join(NOTICED_SECONDS)
        assert traffic.wrong == []
        check_errors(traffic.errors)
        service.until_health("SERVING", RESTORED_SECONDS)
        assert {name: service.tokens(PROMPT, name, max_tokens=NUM_TOKENS) for name in expected} == expected
        assert {name: service.get(name).generation for name in ADAPTERS} == generations


def _start(
    start_service: Callable[..., Service], models: Path, ranks: int, timeout_seconds: float, consensus: str = "auto"
) -> Service:
    environment = {"EPILORA_COLLECTIVE_TIMEOUT_SECONDS": str(timeout_seconds), "EPILORA_CONSENSUS": consensus}
    # More are lost than a service that is left alone would put up with.
    environment["EPILORA_MAX_RESTARTS"] = "1000"
    return start_service(models / "qwen3moe-T", ranks=ranks, environment=environment)


@pytest.mark.timeout(900)
def test_lost_ranks_come_back(start_service: Callable[..., Service], models: Path, adapters: Path) -> None:
    """Three rounds of each signal; a short deadline, since each rank that stops costs one."""
    lose_ranks(_start(start_service, models, 2, 4.0), adapters, 3)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_lost_ranks_come_back_where_steps_are_planned_ahead(
    start_service: Callable[..., Service], models: Path, adapters: Path
) -> None:
    lose_ranks(_start(start_service, models, 3, 4.0, "gloo"), adapters, 5)


@pytest.mark.soak
def test_fifty_rounds_of_lost_ranks(start_service: Callable[..., Service], models: Path, adapters: Path) -> None:
    lose_ranks(_start(start_service, models, 3, 10.0), adapters, 25)
