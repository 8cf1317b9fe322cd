"""The benchmarks' command lines: what they refuse before they measure anything, and what they leave behind."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch

from benchmarks.kernel_report import BEGIN, END

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests" / "fixtures" / "models" / "qwen3moe-T"
RESULTS = ROOT / "benchmarks" / "results" / "kernels.json"
SECONDS = 60.0


class Ended(NamedTuple):
    """How a command ended, and what it printed."""

    status: int
    out: str
    err: str


Command = Callable[..., Ended]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a benchmark on a machine without a GPU."""
    pytest.importorskip("triton", reason="the benchmarks of kernels need triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(name: str, *args: object) -> Ended:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, args)])
        status = 0
        try:
            importlib.import_module(f"benchmarks.{name}").main()
        except SystemExit as ended:
            status = ended.code
        return Ended(status, *capsys.readouterr())

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
    assert command(name, *args) == (2, "", f"{name}: error: a CUDA device is needed\n")


def test_fewer_gpus_than_ranks_are_refused(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    ended = command("gpu_service", "--ranks", 2, "--out", "unused.json")
    assert ended == (2, "", "gpu_service: error: 2 CUDA devices are needed, 1 is there\n")


@pytest.mark.parametrize(
    "line, error",
    [
        ("dispatch", "dispatch: error: a CUDA device is needed; --device cpu tries the code without one"),
        ("dispatch --device cpu", "dispatch: error: WORLD_SIZE is 1, expected EPILORA_NUM_RANKS = 2; start torchrun "),
        ("consensus", "consensus: error: WORLD_SIZE is 1, expected EPILORA_NUM_RANKS = 2; start torchrun "),
    ],
)
def test_ranks_without_torchrun_or_gpus_are_told_in_one_line(command: Command, line: str, error: str) -> None:
    ended = command(*line.split())
    assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert ended.err.startswith(error)


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
    ended = command(*line.split())
    assert (ended.status, words in ended.err) == (2, True), ended.err
    assert "CUDA" not in ended.err


CELL = {"shape": "a", "tokens": 8, "adapters": 8, "lora_rank": 16, "half": False, "base_us": 1.0, "lora_us": 2.0,
        "floor_base_us": 0.5, "floor_lora_us": 1.0, "rel_error": 1e-3}  # fmt: skip
BROKEN = {
    "missing": (None, "cannot be read: No such file or directory"),
    "no JSON": ("{", "is no JSON: Expecting property name"),
    "a list": ("[]", 'is no object with a list "cells"'),
    "no cells": ("{}", 'is no object with a list "cells"'),
    "a string": ('{"cells": [7]}', "cells[0] is 7, no object"),
    "no shape": (json.dumps({"cells": [CELL, {"tokens": 8}]}), "cells[1] has no shape"),
    "other shape": (json.dumps({"cells": [CELL | {"shape": "z"}]}), 'cells[0] has shape "z", none of "a", "b", "c"'),
    "other tokens": (json.dumps({"cells": [CELL | {"tokens": 7}]}), "cells[0] has tokens 7, none of 1, 8, 32, 64"),
    "a number for a truth": (json.dumps({"cells": [CELL | {"half": 0}]}), "cells[0] has half 0, none of false, true"),
    "a time in words": (json.dumps({"cells": [CELL | {"lora_us": "2"}]}), 'cells[0] has lora_us "2", no number'),
    "no floor": (json.dumps({"cells": [CELL | {"floor_lora_us": 0}]}), "floor_lora_us 0, expected more than 0"),
    "half a pair": (json.dumps({"cells": [CELL | {"lora_half_us": 1.0}]}), "not both base_half_us and lora_half_us"),
}


@pytest.mark.parametrize(
    "mode, name",
    # A file that is missing is made by what measures.
    [(mode, name) for mode in ("--check", "--report", "--merge", "") for name in BROKEN if mode or name != "missing"],
)
def test_results_that_are_broken_are_one_line_with_the_path(
    command: Command, tmp_path: Path, mode: str, name: str
) -> None:
    path = tmp_path / "results.json"
    content, words = BROKEN[name]
    if content is not None:
        path.write_text(content)
    merge = [RESULTS] if mode == "--merge" else []
    ended = command("kernels", "--out", path, *([mode] if mode else []), *merge)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith(f"kernels: error: {path}")
    assert words in ended.err
    assert ended.err.endswith("; expected a file that `python -m benchmarks.kernels` wrote\n")
    assert ended.err.count("\n") == 1


def test_a_file_to_merge_or_to_compare_with_is_checked_too(command: Command, tmp_path: Path) -> None:
    kept, other = tmp_path / "kept.json", tmp_path / "other.json"
    kept.write_text(RESULTS.read_text())
    ended = command("kernels", "--out", kept, "--merge", other)
    assert (ended.status, f"{other} cannot be read" in ended.err) == (2, True), ended.err
    assert kept.read_text() == RESULTS.read_text()
    other.write_text("{}")
    ended = command("kernel_variants", "--out", tmp_path / "out.json", "--recorded", other)
    assert (ended.status, str(other) in ended.err, "CUDA" in ended.err) == (2, True, False), ended.err


def test_a_cell_that_is_not_measured_fails_the_check_and_a_missed_limit_does_not(
    command: Command, tmp_path: Path
) -> None:
    ended = command("kernels", "--check", "--out", RESULTS)
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.endswith("cells of the plan not measured: none\n")
    results = json.loads(RESULTS.read_text())
    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps({"cells": [cell | {"lora_us": 1e6} for cell in results["cells"]]}))
    ended = command("kernels", "--check", "--out", slow)
    assert (ended.status, " > " in ended.out) == (0, True)
    part = tmp_path / "part.json"
    part.write_text(json.dumps({"cells": results["cells"][1:]}))
    ended = command("kernels", "--check", "--out", part)
    assert (ended.status, "not measured: a 1 n1 r16\n" in ended.out) == (1, True), ended.out
    part.write_text(json.dumps({"cells": []}))
    assert command("kernels", "--check", "--out", part).status == 1


@pytest.mark.parametrize(
    "text", ["a page", f"{END}\n{BEGIN}\n", f"{BEGIN}\n", f"{BEGIN}\n{END}\n{BEGIN}\n{END}\n"],
    ids=["none", "wrong order", "no end", "twice"],
)  # fmt: skip
def test_a_page_without_marks_stays_as_it_is(command: Command, tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    ended = command("kernels", "--report", "--docs", page, "--out", RESULTS)
    words = f"kernels: error: {page}: expected {BEGIN} and after it {END}, once each, around the table to replace\n"
    assert ended == (2, "", words)
    assert page.read_text() == text


def test_a_page_takes_the_table(command: Command, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    ended = command("kernels", "--report", "--docs", page, "--out", RESULTS)
    assert (ended.status, f"{page} cannot be read and written: No such file" in ended.err) == (2, True)
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    ended = command("kernels", "--report", "--docs", page, "--out", RESULTS)
    assert (ended.status, ended.err) == (0, "")
    assert page.read_text() == f"before\n{BEGIN}\n{ended.out}{END}\nafter\n"


@pytest.mark.parametrize(
    "args, words",
    [
        (["--check", "--report"], "argument --report: not allowed with argument --check"),
        (["--check", "--tune"], "argument --tune: not allowed with argument --check"),
        (["--report", "--merge", "other.json"], "argument --merge: not allowed with argument --report"),
        (["--check", "--docs", "page.md"], "argument --docs: expected with --report only"),
    ],
)
def test_modes_exclude_each_other(command: Command, args: list[str], words: str) -> None:
    ended = command("kernels", *args)
    assert (ended.status, words in ended.err) == (2, True), ended.err


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
