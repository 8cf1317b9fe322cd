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

ADAPTER = "peft-0.21.2/qwen3moe-T-both"
PROMPT = [1, 2, 3, 4, 5]
NUM_TOKENS = 48
COLLECTIVE_TIMEOUT_SECONDS = 10
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
        self._threads = [threading.Thread(target=self._run, args=(name,), daemon=True) for name in [*expected] * 2]
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


def lose_ranks(service: Service, adapters: Path, num_rounds: int) -> None:
    """Rounds of each signal, in turn, each at a random rank and time."""
    rng = random.Random(6)
    service.load("a", adapters / ADAPTER)
    expected = {name: service.tokens(PROMPT, name, max_tokens=NUM_TOKENS, ignore_eos=True) for name in ("", "a")}
    assert all(len(tokens) == NUM_TOKENS for tokens in expected.values())
    for number in SIGNALS * num_rounds:
        traffic = Traffic(service, expected)
        time.sleep(rng.uniform(0.2, 1.5))
        assert not traffic.errors
        service.kill(service.worker_pid(rng.randrange(service.ranks)), number=number)
        assert service.until_health("NOT_SERVING", NOTICED_SECONDS) < NOTICED_SECONDS
        traffic.join(NOTICED_SECONDS)
        assert traffic.wrong == []
        for error in traffic.errors:
            assert error_from(error).code is grpc.StatusCode.UNAVAILABLE, error  # type: ignore[arg-type]
        service.until_health("SERVING", RESTORED_SECONDS)
        for name, tokens in expected.items():
            assert service.tokens(PROMPT, name, max_tokens=NUM_TOKENS, ignore_eos=True) == tokens


def _start(start_service: Callable[..., Service], models: Path, ranks: int) -> Service:
    environment = {"EPILORA_COLLECTIVE_TIMEOUT_SECONDS": str(COLLECTIVE_TIMEOUT_SECONDS)}
    return start_service(models / "qwen3moe-T", ranks=ranks, environment=environment)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_lost_ranks_come_back(start_service: Callable[..., Service], models: Path, adapters: Path) -> None:
    lose_ranks(_start(start_service, models, 2), adapters, 1)


@pytest.mark.soak
def test_fifty_rounds_of_lost_ranks(start_service: Callable[..., Service], models: Path, adapters: Path) -> None:
    lose_ranks(_start(start_service, models, 3), adapters, 25)
