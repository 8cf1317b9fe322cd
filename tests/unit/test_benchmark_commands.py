"""The benchmarks' command lines: what they refuse before they measure anything, and what they leave behind."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests" / "fixtures" / "models" / "qwen3moe-T"
SECONDS = 60.0

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a benchmark on a machine without a GPU: exit status, and what it printed on stderr."""
    pytest.importorskip("triton", reason="the benchmarks of kernels need triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(name: str, *args: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(f"benchmarks.{name}").main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    "name, args",
    [
        ("cache_to_gpu", []),
        ("decode_kernels", []),
        ("decode_step", []),
        ("gpu_service", ["--out", "unused.json"]),
        ("kernel_variants", ["--out", "unused.json"]),
        ("kernels", []),
        ("kernels", ["--tune"]),
        ("warm_load", []),
    ],
)
def test_a_machine_without_a_gpu_is_told_in_one_line(command: Command, name: str, args: list[str]) -> None:
    assert command(name, *args) == (2, f"{name}: error: a CUDA device is needed\n")


def test_fewer_gpus_than_ranks_are_refused(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    status, printed = command("gpu_service", "--ranks", 2, "--out", "unused.json")
    assert (status, printed) == (2, "gpu_service: error: 2 CUDA devices are needed, 1 is there\n")


@pytest.mark.parametrize(
    "line, words",
    [
        ("kernels --shapes z", "argument --shapes: 'z' is none of a, b, c"),
        ("kernels --shapes a,", "argument --shapes: '' is none of a, b, c"),
        ("kernels --tokens 64,7", "argument --tokens: '7' is none of 1, 8, 32, 64, 256, 1024, 4096, 16384"),
        ("kernels --profile x", "argument --profile: 'x' is none of 1, 8"),
        ("kernels --compile-processes -1", "argument --compile-processes: '-1' is no whole number of at least 0"),
        ("kernel_variants --out o --shapes a,z", "argument --shapes: 'z' is none of a, b, c"),
        ("kernel_variants --out o --tokens 7", "argument --tokens: '7' is none of 1, 8, 32, 64"),
        (
            "kernel_variants --out o --shapes b --tokens 32",
            "--tokens: with these shapes 32 is none of 1, 64, 256, 1024",
        ),
        ("kernel_variants --out o --compile-processes 0", "'0' is no whole number of at least 1"),
        ("kernel_compile --shapes z", "argument --shapes: 'z' is none of a, b, c"),
        ("kernel_compile --tokens 7", "argument --tokens: '7' is none of 1, 8, 32, 64"),
        ("kernel_compile --set span", "argument --set: 'span': expected JSON after the ="),
        ("kernel_compile --set spam=1", "argument --set: 'spam' is none of "),
        ("gpu_service --out o --ranks 0", "argument --ranks: '0' is no whole number of at least 1"),
    ],
)
def test_a_wrong_value_is_named_with_the_choices_before_a_gpu_is_asked_for(
    command: Command, line: str, words: str
) -> None:
    status, printed = command(*line.split())
    assert (status, words in printed) == (2, True), printed
    assert "CUDA" not in printed


@contextmanager
def running(*args: str) -> Iterator[subprocess.Popen[bytes]]:
    """Python with these arguments; it and its children are gone at the end."""
    process = subprocess.Popen([sys.executable, *args], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        yield process
        assert process.poll() is not None
    finally:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
            child.kill()
        process.kill()
        process.wait()


def in_shared_memory(*pids: int) -> list[Path]:
    """What benchmarks made there."""
    return [path for pid in pids for path in Path("/dev/shm").glob(f"epilora-bench-{pid}-*")]


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


SERVICE = """
import signal
import sys
from pathlib import Path
from benchmarks.command_line import end_in_order
from benchmarks.gpu_service import running_service
signal.signal(signal.SIGINT, signal.SIG_DFL)  # whatever the tests were started with
end_in_order()
with running_service(Path(sys.argv[1]), Path(sys.argv[2]), 1) as service:
    service.wait_ready()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_service_ends_with_its_benchmark_and_leaves_no_cache(number: signal.Signals, tmp_path: Path) -> None:
    with running("-c", SERVICE, str(MODEL), str(tmp_path)) as process:
        wait_for((tmp_path / "run" / "loader.sock").exists)
        assert in_shared_memory(process.pid)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(number)
        process.send_signal(number)
        assert process.wait(SECONDS) == 128 + number
    assert not in_shared_memory(process.pid)
    assert not any(child.is_running() for child in children)
    assert not (tmp_path / "run" / "loader.sock").exists()


def test_a_cell_that_is_a_process_of_its_own_cleans_up_too() -> None:
    with running("-m", "benchmarks.loader", "--layers", "1") as process:
        cells: list[int] = []

        def cell_began() -> bool:
            assert process.poll() is None
            cells[:] = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
            return bool(in_shared_memory(*cells))

        wait_for(cell_began)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(SECONDS) == 128 + signal.SIGTERM
    assert not in_shared_memory(*cells)
