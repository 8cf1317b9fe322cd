"""Processes that are killed: what callers see, how fast, and what comes back."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from epilora.cli.app import app
from epilora.v1 import adapter_service_pb2, generation_service_pb2, generation_service_pb2_grpc, types_pb2
from tests.service.harness import Service

PER_EXPERT = "peft-0.17.1-transformers-4.57.3/qwen3moe-T-all"
FUSED = "peft-0.21.2/qwen3moe-T-both"
PROMPT = [1, 2, 3, 4, 5]
NOTICED_SECONDS = 5.0
RESTORED_SECONDS = 90.0


class Traffic:
    """Long generations in threads, each of which starts the next at once, and how they end.

    A thread ends with its first error or, `while_stopping`, with the first that does not say that the gateway stops.
    """

    def __init__(self, service: Service, adapter: str, num_calls: int, *, while_stopping: bool = False) -> None:
        self.errors: list[grpc.RpcError] = []
        self._while_stopping = while_stopping
        # Its own: closing a channel ends its calls as CANCELLED, which would say nothing of the service.
        self._channel = service.new_channel()
        self.first_tokens = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._run, args=(adapter,), daemon=True) for _ in range(num_calls)]
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            assert self.first_tokens.acquire(timeout=60)

    def _run(self, adapter: str) -> None:
        first = True
        generation = generation_service_pb2_grpc.GenerationServiceStub(self._channel)
        while True:
            request = generation_service_pb2.GenerateRequest(
                token_ids=generation_service_pb2.TokenIds(ids=PROMPT),
                adapter_name=adapter,
                stop=generation_service_pb2.StopOptions(max_tokens=10_000, ignore_eos=True),
            )
            try:
                for _ in generation.Generate(request, timeout=120):
                    if first:
                        first = False
                        self.first_tokens.release()
            except grpc.RpcError as error:
                self.errors.append(error)
                if not (self._while_stopping and "the gateway is stopping" in str(error.details())):
                    return

    def join(self, seconds: float) -> None:
        for thread in self._threads:
            thread.join(seconds)
        assert not any(thread.is_alive() for thread in self._threads), "a call hangs"
        self._channel.close()


@pytest.mark.soak
def test_killed_gateway_loader_torchelastic_and_supervisor(
    start_service: Callable[..., Service], models: Path, adapters: Path
) -> None:
    service = start_service(models / "qwen3moe-T", ranks=2)
    loaded = service.load("a", adapters / PER_EXPERT)
    before = service.tokens(PROMPT, "a")
    workers = [service.worker_pid(0), service.worker_pid(1)]

    service.kill(*service.pids()["gateway"])
    service.until(lambda: service.health() == "", "lose its gateway", NOTICED_SECONDS)
    service.until_health("SERVING", RESTORED_SECONDS)
    adapter = service.get("a")
    assert (adapter.generation, adapter.adapter_slot, adapter.report) == (
        loaded.generation,
        loaded.adapter_slot,
        loaded.report,
    )
    assert service.tokens(PROMPT, "a") == before
    assert [service.worker_pid(0), service.worker_pid(1)] == workers

    [loader] = service.pids()["loader"]
    service.kill(loader)
    assert service.tokens(PROMPT, "a") == before
    service.until(
        lambda: service.pids()["loader"] not in ([], [loader]) and _loads(service, "b", adapters / FUSED),
        "load with a new loader",
        RESTORED_SECONDS,
    )

    service.kill(*service.pids()["torchelastic"])
    service.until_health("NOT_SERVING", NOTICED_SECONDS)
    service.until_health("SERVING", RESTORED_SECONDS)
    assert service.tokens(PROMPT, "a") == before
    assert service.get("b").state == types_pb2.ADAPTER_STATE_SERVING

    # Nobody outlives the supervisor, whatever ends it.
    [supervisor] = service.pids()["supervisor"]
    service.kill(supervisor)
    deadline = time.monotonic() + 10
    while service.survivors() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert service.survivors() == []


def _loads(service: Service, name: str, source: Path) -> bool:
    try:
        return service.load(name, source).state == types_pb2.ADAPTER_STATE_SERVING
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        return False


def test_registry_survives_the_death_of_everything_and_a_stop(
    start_service: Callable[..., Service], models: Path, adapters: Path
) -> None:
    service = start_service(models / "qwen3moe-T", ranks=2, args=["--drain-timeout=3"])
    service.load("a", adapters / PER_EXPERT)
    service.load("b", adapters / FUSED)
    service.load("gone", adapters / FUSED)
    service.unload("gone")
    before = {name: (service.get(name).generation, service.tokens(PROMPT, name)) for name in ("a", "b")}
    service.kill_everything()
    assert service.survivors() == []
    service.start()
    assert {name: (service.get(name).generation, service.tokens(PROMPT, name)) for name in ("a", "b")} == before
    listed = service.adapters().ListAdapters(adapter_service_pb2.ListAdaptersRequest(), timeout=10).adapters
    assert [adapter.name for adapter in listed] == ["a", "b"]
    assert service.load("c", adapters / FUSED).generation > max(generation for generation, _ in before.values())

    # They go on calling as fast as they can, while the gateway drains, at its very end and after it.
    traffic = Traffic(service, "a", 6, while_stopping=True)
    started = time.monotonic()
    assert service.stop() == 0
    assert time.monotonic() - started < 30
    traffic.join(20)
    assert any("the gateway is stopping" in str(error.details()) for error in traffic.errors)
    assert {error.code() for error in traffic.errors} == {grpc.StatusCode.UNAVAILABLE}
    assert service.survivors() == []
    # Neither of those that were killed nor of this one is anything left.
    assert [path.name for path in (service.state_dir.parent / "run").iterdir()] == ["serve.lock"]
    assert not service.ready_file.exists()
    registry = json.loads((service.state_dir / "registry.json").read_text())
    assert list(registry["adapters"]) == ["a", "b", "c"]


ADAPTER_SERVICE = "epilora.v1.AdapterService"


def test_a_loader_that_cannot_start_any_more_ends_the_service(
    start_service: Callable[..., Service], models: Path, adapters: Path
) -> None:
    service = start_service(models / "qwen3moe-T")
    service.load("a", adapters / PER_EXPERT)
    before = service.tokens(PROMPT, "a")
    shutil.rmtree(service.cache_dir)
    service.cache_dir.write_text("no directory any more")
    service.kill(*service.pids()["loader"])
    # Until then the service does what it can, and says what it cannot.
    service.until_health("NOT_SERVING", NOTICED_SECONDS, ADAPTER_SERVICE)
    shown = CliRunner().invoke(app, ["status", "--address", service.address])
    assert (shown.exit_code, "the loader is away" in shown.stdout) == (0, True), shown.output
    assert service.health() == "SERVING"
    assert service.tokens(PROMPT, "a") == before
    assert service.wait() == 1
    assert service.survivors() == []
    message = service.log_tail().rpartition("\nerror: ")[2]
    assert "FAILED_PRECONDITION (CANNOT_START)" in message
    assert "the loader process cannot be kept running" in message
    assert "started again 5 times within 60 s" in message
    assert f"Its last error: [Errno 17] File exists: '{service.cache_dir}'" in message
    assert "start the service again" in message
    service.cache_dir.unlink()
    service.start()
    assert service.tokens(PROMPT, "a") == before


def test_a_process_that_is_lost_while_the_service_stops_is_no_failure(
    start_service: Callable[..., Service], models: Path
) -> None:
    service = start_service(
        models / "qwen3moe-T", args=["--drain-timeout=5"], environment={"EPILORA_MAX_RESTARTS": "0"}
    )
    pids = service.pids()
    traffic = Traffic(service, "", 1)
    service.kill(*pids["supervisor"], number=signal.SIGTERM)
    service.until_health("NOT_SERVING", NOTICED_SECONDS)
    service.kill(*pids["loader"])
    assert service.wait() == 0
    assert "process ended, not starting it again" in service.log_tail()
    traffic.join(20)


def test_a_ready_file_that_cannot_be_written_any_more_ends_the_service(models: Path, tmp_path: Path) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    service = Service(models / "qwen3moe-T", args=[f"--ready-file={directory / 'ready.json'}"])
    try:
        service.start(wait=False)
        socket = service.state_dir.parent / "run" / "loader.sock"
        service.until(socket.exists, "start its loader", RESTORED_SECONDS)
        directory.rmdir()
        assert service.wait() == 1
        message = service.log_tail().rpartition("\nerror: ")[2]
        assert "INVALID_ARGUMENT (BAD_READY_FILE)" in message
        assert "ready.json, which cannot be written: No such file or directory" in message
    finally:
        service.close()


@pytest.mark.soak
@pytest.mark.parametrize("has_weights", [False, True])
def test_ranks_that_cannot_start_any_more_end_the_service(
    start_service: Callable[..., Service], models: Path, tmp_path: Path, has_weights: bool
) -> None:
    """Some say that they cannot, which is tried again like the end of any process; others are killed whenever."""
    model = shutil.copytree(models / "qwen3moe-T", tmp_path / "model")
    service = start_service(model, ranks=2, environment={"EPILORA_MAX_RESTARTS": "1"})
    first = service.worker_pid(1)
    if not has_weights:
        for path in model.glob("*.safetensors*"):
            path.unlink()
    service.kill(first)
    service.until_health("NOT_SERVING", NOTICED_SECONDS)
    if has_weights:
        service.until_health("SERVING", RESTORED_SECONDS)
        service.kill(service.worker_pid(0))
    assert service.wait() == 1
    assert service.survivors() == []
    message = service.log_tail().rpartition("\nerror: ")[2]
    assert "the workers process cannot be kept running" in message
    assert ("rank 0 ended with SIGKILL" if has_weights else "model.safetensors does not exist") in message
