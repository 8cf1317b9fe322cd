"""Runs a whole service as its users do: `epilora serve` in processes of its own, talked to over gRPC."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from epilora.v1 import (
    adapter_service_pb2,
    adapter_service_pb2_grpc,
    cluster_service_pb2,
    cluster_service_pb2_grpc,
    expert_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
    types_pb2,
)

REPOSITORY = Path(__file__).resolve().parents[2]
START_SECONDS = 120.0
STOP_SECONDS = 45.0
LOG_TAIL_LINES = 80
MAX_MESSAGE_BYTES = 64 << 20

_MODULES = {
    "loader": "loader_service",
    "gateway": "gateway",
    "torchelastic": "compute_worker.launch",
    "worker": "compute_worker",
}


class ServiceError(AssertionError):
    """The service did not do what a test waited for; the message ends with its log."""


class Service:
    """One running `epilora serve`.

    Args:
        model: checkpoint directory.
        ranks: number of ranks.
        adapter_roots: directories that adapters may lie under.
        args: further options of `epilora serve`.
        environment: further EPILORA_* variables.
        state_dir: registry directory; by default one of its own, removed at the end.
    """

    def __init__(
        self,
        model: Path,
        *,
        ranks: int = 1,
        adapter_roots: Sequence[Path] = (),
        args: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        state_dir: Path | None = None,
    ) -> None:
        # Short, since paths of Unix sockets are limited.
        self._directory = Path(tempfile.mkdtemp(prefix="epl-"))
        self.cache_dir = Path("/dev/shm") / f"epilora-test-{uuid.uuid4().hex[:8]}"
        self.state_dir = state_dir or self._directory / "state"
        self.log_path = self._directory / "service.log"
        self.ready_file = self._directory / "ready.json"
        self._command = [
            *(sys.executable, "-m", "epilora.cli", "serve"),
            f"--model={model}",
            f"--ranks={ranks}",
            "--listen=127.0.0.1:0",
            "--metrics-listen=127.0.0.1:0",
            f"--state-dir={self.state_dir}",
            f"--run-dir={self._directory / 'run'}",
            f"--cache-dir={self.cache_dir}",
            f"--ready-file={self.ready_file}",
            *(f"--adapter-root={root}" for root in adapter_roots),
            *args,
        ]
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: grpc.Channel | None = None
        self._seen: dict[int, psutil.Process] = {}
        self.ranks = ranks
        self.address = ""
        self.metrics_address = ""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, *, wait: bool = True) -> None:
        """Starts it, again if it was stopped or killed, and waits until it is ready."""
        self.ready_file.unlink(missing_ok=True)
        with open(self.log_path, "ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=REPOSITORY, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        if not wait:
            return
        self.until(self.ready_file.exists, "be ready", START_SECONDS)
        description = json.loads(self.ready_file.read_text())
        self.address, self.metrics_address = description["address"], description["metrics"]
        self.pids()

    def until(self, condition: Callable[[], bool], what: str, seconds: float) -> None:
        """Waits for a condition; fails with the log's end if the service exits or time is up."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self._process is not None and self._process.poll() is not None:
                raise self.failure(f"the service exited with {self._process.returncode} before it could {what}")
            if time.monotonic() > deadline:
                raise self.failure(f"the service did not {what} within {seconds:g} s")
            time.sleep(0.05)

    def failure(self, message: str) -> ServiceError:
        """An error with the end of the service's log."""
        return ServiceError(f"{message}\n--- end of its log ---\n{self.log_tail()}")

    def log_tail(self, num_lines: int = LOG_TAIL_LINES) -> str:
        """The last lines of everything the processes printed."""
        lines = self.log_path.read_text(errors="replace").splitlines() if self.log_path.exists() else []
        return "\n".join(lines[-num_lines:])

    def pids(self) -> dict[str, list[int]]:
        """Process ids by role: supervisor, loader, gateway, torchelastic, worker (as many as ranks)."""
        assert self._process is not None
        found: dict[str, list[int]] = {"supervisor": [self._process.pid], **{role: [] for role in _MODULES}}
        for process in self._descendants():
            self._seen[process.pid] = process
            role = _role(process)
            if role is not None:
                found[role].append(process.pid)
        return found

    def _descendants(self) -> list[psutil.Process]:
        assert self._process is not None
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def worker_pid(self, ep_rank: int) -> int:
        """Process id of one rank's worker."""
        topology = self.cluster().GetTopology(cluster_service_pb2.GetTopologyRequest(), timeout=10)
        return topology.groups[0].ranks[ep_rank].pid

    def kill(self, *pids: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to processes of this service."""
        for pid in pids:
            os.kill(pid, number)

    def kill_everything(self) -> None:
        """SIGKILL to every process at once, as when the machine loses power."""
        family = []
        for pid in (pid for pids in self.pids().values() for pid in pids):
            # One may be a fork on its way to another program, which is gone by now.
            with suppress(psutil.NoSuchProcess):
                family.append(psutil.Process(pid))
                family[-1].kill()
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive, alive
        self._reap()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        assert self._process is not None
        self.pids()
        self._process.terminate()
        return self.wait()

    def wait(self) -> int:
        """The exit code of a service that stops."""
        assert self._process is not None
        try:
            code = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise self.failure(f"the service did not stop within {STOP_SECONDS:g} s") from None
        self._reap()
        return code

    def _reap(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process.wait(10)
            self._process = None

    def survivors(self) -> list[psutil.Process]:
        """Processes of this service that still run although it has ended."""
        return [process for process in self._seen.values() if process.is_running() and not _is_zombie(process)]

    def close(self) -> None:
        """Ends everything and removes its files."""
        if self._process is not None:
            self.pids()
            if self._process.poll() is None:
                self._process.terminate()
                try:
                    self._process.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    self._process.kill()
            self._reap()
        for process in self.survivors():
            process.kill()
        psutil.wait_procs(list(self._seen.values()), timeout=10)
        shutil.rmtree(self.cache_dir, ignore_errors=True)
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def channel(self) -> grpc.Channel:
        """A channel to the gateway, closed when the service stops."""
        if self._channel is None:
            self._channel = self.new_channel()
        return self._channel

    def new_channel(self) -> grpc.Channel:
        """A channel to the gateway that is the caller's."""
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 500),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        return grpc.insecure_channel(self.address, options=options)

    def adapters(self) -> Any:
        """Stub of AdapterService."""
        return adapter_service_pb2_grpc.AdapterServiceStub(self.channel)

    def generation(self) -> Any:
        """Stub of GenerationService."""
        return generation_service_pb2_grpc.GenerationServiceStub(self.channel)

    def experts(self) -> Any:
        """Stub of ExpertService."""
        return expert_service_pb2_grpc.ExpertServiceStub(self.channel)

    def cluster(self) -> Any:
        """Stub of ClusterService."""
        return cluster_service_pb2_grpc.ClusterServiceStub(self.channel)

    def health(self, service: str = "") -> str:
        """Name of a health status; "" if the gateway does not answer."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        try:
            response = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=2)
        except grpc.RpcError:
            return ""
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))

    def until_health(self, status: str, seconds: float, service: str = "") -> float:
        """Waits for a health status; seconds it took."""
        started = time.monotonic()
        self.until(lambda: self.health(service) == status, f"be {status}", seconds)
        return time.monotonic() - started

    def load(self, name: str, source: Path | str, *, allow_partial: bool = False) -> types_pb2.Adapter:
        """Loads an adapter."""
        request = adapter_service_pb2.LoadAdapterRequest(name=name, source=str(source), allow_partial=allow_partial)
        return self.adapters().LoadAdapter(request, timeout=120).adapter

    def unload(self, name: str) -> adapter_service_pb2.UnloadAdapterResponse:
        """Unloads an adapter."""
        return self.adapters().UnloadAdapter(adapter_service_pb2.UnloadAdapterRequest(name=name), timeout=120)

    def unload_all(self) -> None:
        """Unloads whatever is there."""
        request = adapter_service_pb2.ListAdaptersRequest(page_size=1000)
        for adapter in self.adapters().ListAdapters(request, timeout=30).adapters:
            self.unload(adapter.name)

    def get(self, name: str) -> types_pb2.Adapter:
        """Describes an adapter."""
        return self.adapters().GetAdapter(adapter_service_pb2.GetAdapterRequest(name=name), timeout=30).adapter

    def memory(self) -> list[cluster_service_pb2.RankMemory]:
        """Memory of every rank."""
        return list(self.cluster().GetMemory(cluster_service_pb2.GetMemoryRequest(), timeout=30).ranks)

    def generate(
        self,
        prompt: str | Sequence[int],
        adapter: str = "",
        *,
        max_tokens: int = 16,
        ignore_eos: bool = True,
        timeout: float = 120,
        **options: Any,
    ) -> list[generation_service_pb2.GenerateResponse]:
        """All messages of one greedy generation; `options` are further fields of the request."""
        stop = generation_service_pb2.StopOptions(max_tokens=max_tokens, ignore_eos=ignore_eos)
        request = generation_service_pb2.GenerateRequest(adapter_name=adapter, **{"stop": stop, **options})
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        return list(self.generation().Generate(request, timeout=timeout))

    def tokens(self, prompt: str | Sequence[int], adapter: str = "", **options: Any) -> list[int]:
        """Tokens of one greedy generation."""
        return [token for message in self.generate(prompt, adapter, **options) for token in message.token_ids]


def anonymous_bytes(pid: int) -> int:
    """RssAnon of a process: memory of its own, without files and shared memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def _role(process: psutil.Process) -> str | None:
    try:
        command, name = process.cmdline(), process.name()
    except psutil.NoSuchProcess:
        return None
    if name.startswith("worker-"):
        return "worker"  # it may be a fork of torchelastic's process, with the same command
    # `python -m epilora.process PARENT MODULE ...`
    if "epilora.process" not in command:
        return None
    module = command[command.index("epilora.process") + 2]
    return next((role for role, name in _MODULES.items() if name == module), None)


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@contextmanager
def running(model: Path, **options: Any) -> Iterator[Service]:
    """A service for the duration of a with block."""
    with Service(model, **options) as service:
        yield service
