"""Adapters loaded, unloaded and reloaded under traffic for a minute: nothing fails, nothing mixes, nothing grows.

EPILORA_SOAK_SECONDS sets another duration.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import pytest

from tests.service.harness import REPOSITORY, Service, anonymous_bytes

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

SECONDS = float(os.environ.get("EPILORA_SOAK_SECONDS", "60"))
FIXTURES = REPOSITORY / "tests" / "fixtures"
WRITER = FIXTURES / "adapters" / "peft-0.21.2"
SOURCES = [WRITER / f"qwen3moe-T-{kind}" for kind in ("both", "rslora_pattern", "gate_up_only", "attn_only")]
NUM_TOKENS = 6
GROWTH_BYTES = 6 << 20
"""What a process may be larger after the churn than after a warm-up: arenas of the allocator, not leaks."""


class Churn:
    """Traffic, and a hand that loads and unloads meanwhile."""

    def __init__(self, service: Service, prompt: list[int], answers: dict[str, list[int]]) -> None:
        self.service = service
        self.prompt = prompt
        self.answers = answers
        self.failures: list[str] = []
        self.counts: Counter[str] = Counter()
        self.source_of: dict[int, str] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Traffic on the base model, on an adapter that stays, and on one that is reloaded all the time."""
        targets = ["", "steady", "hot", "hot", "hot"]
        threads = [threading.Thread(target=self._guard, args=(self._ask, name)) for name in targets]
        threads += [threading.Thread(target=self._guard, args=(step,)) for step in (self._reload, self._come_and_go)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(60)
            assert not any(thread.is_alive() for thread in threads), "a call hangs"

    def _guard(self, step: Callable[..., None], *args: str) -> None:
        while not self._stop.is_set():
            try:
                step(*args)
            except (grpc.RpcError, AssertionError) as error:
                with self._lock:
                    self.failures.append(f"{step.__name__}{args}: {error}")
                return

    def _ask(self, name: str) -> None:
        messages = self.service.generate(self.prompt, name, max_tokens=NUM_TOKENS)
        tokens = [token for message in messages for token in message.token_ids]
        generations = {message.adapter_generation for message in messages}
        assert len(generations) == 1, generations
        with self._lock:
            self.counts[f"ask {name}"] += 1
        if name == "hot":
            # Which source a generation came from is known once its LoadAdapter has returned.
            assert tokens in (self.answers[SOURCES[0].name], self.answers[SOURCES[1].name]), tokens
            source = self.source_of.get(generations.pop())
            assert source is None or tokens == self.answers[source]
        else:
            assert tokens == self.answers["base" if not name else SOURCES[3].name]

    def _reload(self) -> None:
        source = SOURCES[self.counts["reload"] % 2]
        generation = self.service.load("hot", source).generation
        with self._lock:
            self.source_of[generation] = source.name
            self.counts["reload"] += 1

    def _come_and_go(self) -> None:
        name = f"guest-{random.randrange(3)}"
        self.service.load(name, random.choice(SOURCES))
        if random.random() < 0.5:
            self.service.tokens(self.prompt, name, max_tokens=1)
        self.service.unload(name)
        with self._lock:
            self.counts["guests"] += 1


def _answers(service: Service, prompt: list[int]) -> dict[str, list[int]]:
    """Greedy tokens of the base model and of each source, alone."""
    answers = {"base": service.tokens(prompt, max_tokens=NUM_TOKENS)}
    for source in SOURCES:
        service.load("probe", source)
        answers[source.name] = service.tokens(prompt, "probe", max_tokens=NUM_TOKENS)
    service.unload("probe")
    return answers


def _prompt_that_tells_apart(service: Service) -> tuple[list[int], dict[str, list[int]]]:
    """A prompt whose answers by the two sources of "hot" differ at every token, and the answers."""
    rng = random.Random(1)
    for _ in range(50):
        prompt = [rng.randrange(64) for _ in range(rng.randrange(3, 9))]
        answers = _answers(service, prompt)
        first, second = answers[SOURCES[0].name], answers[SOURCES[1].name]
        if all(a != b for a, b in zip(first, second, strict=True)):
            return prompt, answers
    raise AssertionError("no prompt tells the two adapters apart at every token")


@pytest.mark.parametrize(
    ("ranks", "consensus"), [(1, "auto"), (2, "auto"), (3, "gloo")], ids=["1 rank", "2 ranks", "3 ranks, gloo"]
)
def test_churn_under_traffic(ranks: int, consensus: str) -> None:
    model = FIXTURES / "models" / "qwen3moe-T"
    environment = {"EPILORA_CONSENSUS": consensus}
    with Service(model, ranks=ranks, adapter_roots=[FIXTURES / "adapters"], environment=environment) as service:
        prompt, answers = _prompt_that_tells_apart(service)
        service.load("steady", SOURCES[3])
        service.load("hot", SOURCES[0])
        churn = Churn(service, prompt, answers)
        with churn.running():
            time.sleep(SECONDS / 4)
            pids = [pid for role in ("worker", "loader", "gateway") for pid in service.pids()[role]]
            warm = {pid: anonymous_bytes(pid) for pid in pids}
            time.sleep(SECONDS)
        print(dict(churn.counts))
        assert churn.failures == []
        assert min(churn.counts[key] for key in ("ask ", "ask steady", "ask hot", "reload", "guests")) >= 10
        # The generation before the last goes in the background.
        service.until(lambda: [len(m.adapters) for m in service.memory()] == [2] * ranks, "free old generations", 30)
        for name in ("hot", "steady"):
            service.unload(name)
        service.until(lambda: [m.adapter_bytes for m in service.memory()] == [0] * ranks, "free everything", 30)
        growth = {pid: anonymous_bytes(pid) - warm[pid] for pid in pids}
        assert max(growth.values()) < GROWTH_BYTES, growth
