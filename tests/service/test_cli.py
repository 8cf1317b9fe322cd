"""The `epilora` command, as people run it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.service.harness import REPOSITORY, Service

FUSED = "peft-0.21.2/qwen3moe-T-both"


def run(*args: str, service: Service | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "epilora.cli", *args]
    if service is not None:
        command.append(f"--address={service.address}")
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(autouse=True)
def _clean(service: Service) -> Iterator[None]:
    yield
    service.unload_all()


def test_life_of_an_adapter(service: Service, adapters: Path) -> None:
    loaded = run("adapter", "load", "mine", str(adapters / FUSED), service=service)
    assert loaded.returncode == 0, loaded.stderr
    assert "SERVING" in loaded.stdout
    assert "target_parameters" in loaded.stdout
    assert "mine" in run("adapter", "list", service=service).stdout
    assert "SERVING" in run("adapter", "get", "mine", service=service).stdout
    generated = run("generate", "--ids", "1,2,3", "--adapter=mine", "--max-tokens=5", "--ignore-eos", service=service)
    assert generated.returncode == 0, generated.stderr
    assert [int(token) for token in generated.stdout.split()] == service.tokens([1, 2, 3], "mine", max_tokens=5)
    assert "3 + 5 tokens" in generated.stderr
    unloaded = run("adapter", "unload", "mine", service=service)
    assert unloaded.returncode == 0
    assert "freed" in unloaded.stdout


def test_status(service: Service) -> None:
    shown = run("status", service=service)
    assert shown.returncode == 0, shown.stderr
    assert "SERVING" in shown.stdout
    assert "qwen3_moe" in shown.stdout


@pytest.mark.parametrize(
    "args, code, words",
    [
        (["adapter", "load", "a", "/etc"], 1, ["PERMISSION_DENIED", "SOURCE_OUTSIDE_ROOTS", "/etc"]),
        (["adapter", "load", "../a", "/etc"], 1, ["INVALID_ARGUMENT", "BAD_ADAPTER_NAME"]),
        (["adapter", "get", "none"], 1, ["NOT_FOUND", "ADAPTER_NOT_FOUND"]),
        (["generate", "hello"], 1, ["FAILED_PRECONDITION", "NO_TOKENIZER"]),
        (["generate"], 2, ["TEXT", "--ids"]),
        (["generate", "--ids", "1,x"], 2, ["whole numbers"]),
    ],
)
def test_errors_are_one_clear_block(service: Service, args: list[str], code: int, words: list[str]) -> None:
    failed = run(*args, service=service)
    assert failed.returncode == code, failed.stderr
    for word in words:
        assert word in failed.stderr
    assert "Traceback" not in failed.stderr
    assert failed.stdout == ""


def test_no_gateway() -> None:
    failed = run("status", "--address=127.0.0.1:1", "--timeout=5")
    assert failed.returncode == 3
    assert "no gateway answers at 127.0.0.1:1" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_serve_refuses_what_cannot_work(service: Service, tmp_path: Path, models: Path) -> None:
    model = f"--model={models / 'qwen3moe-T'}"
    no_model = run("serve", f"--model={tmp_path}", f"--state-dir={tmp_path}")
    assert (no_model.returncode, "NO_MODEL" in no_model.stderr) == (1, True)
    in_use = run("serve", model, f"--state-dir={service.state_dir}", f"--run-dir={tmp_path}")
    assert (in_use.returncode, "STATE_DIR_IN_USE" in in_use.stderr) == (1, True)
    run_dir = service.state_dir.parent / "run"
    run_in_use = run("serve", model, f"--state-dir={tmp_path / 'state'}", f"--run-dir={run_dir}")
    assert (run_in_use.returncode, "RUN_DIR_IN_USE" in run_in_use.stderr) == (1, True)
    assert run("serve", model, "--adapter=nonsense").returncode == 2
    assert service.health() == "SERVING"


@pytest.mark.soak
def test_serve_ends_when_a_worker_can_never_start(tmp_path: Path, models: Path) -> None:
    """No weights: only a worker finds it out, and says so through torchelastic."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes((models / "qwen3moe-T" / "config.json").read_bytes())
    state = f"--state-dir={tmp_path / 'state'}"
    ports = ("--listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0")
    failed = run("serve", f"--model={tmp_path / 'model'}", state, f"--run-dir={tmp_path / 'run'}", *ports)
    assert failed.returncode == 1, failed.stderr
    assert "error: NOT_FOUND (WEIGHTS_NOT_FOUND)" in failed.stderr
    assert "model.safetensors does not exist" in failed.stderr.rpartition("error: ")[2]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["serve.lock"]


def test_ready_file_and_metrics(service: Service) -> None:
    service.tokens([1, 2, 3])
    text = urllib.request.urlopen(f"http://{service.metrics_address}/metrics", timeout=10).read().decode()
    for name in ("epilora_requests_total", 'epilora_adapters{state="SERVING"}', "epilora_step_seconds_bucket"):
        assert name in text
    pids = service.pids()
    assert {role: len(found) for role, found in pids.items()} == {
        "supervisor": 1,
        "loader": 1,
        "gateway": 1,
        "torchelastic": 1,
        "worker": 2,
    }
    assert json.loads((service.state_dir / "registry.json").read_text())["adapters"] == {}


def test_ranks_at_rest_cost_little(service: Service) -> None:
    pids = service.pids()
    processes = [psutil.Process(pid) for role in ("worker", "torchelastic") for pid in pids[role]]
    time.sleep(0.3)
    before, start = [sum(process.cpu_times()[:2]) for process in processes], time.monotonic()
    time.sleep(2)
    seconds = time.monotonic() - start
    used = [sum(process.cpu_times()[:2]) - then for process, then in zip(processes, before, strict=True)]
    assert max(used) / seconds < 0.05, dict(zip(pids, used, strict=False))
