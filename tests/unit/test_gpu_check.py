"""scripts/gpu_check.sh: which steps run, what a failure or the end of the time does, what is left behind."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check.sh"


@pytest.fixture
def check(tmp_path: Path):
    """Runs the script on a machine with so many GPUs, where Python fails on commands that hold a word."""

    def run(*args: str, gpus: int = 1, fails_on: str = "nothing") -> tuple[int, dict[str, str], str]:
        bin_folder = tmp_path / "bin"
        bin_folder.mkdir(exist_ok=True)
        for name, body in {
            "nvidia-smi": f"for i in $(seq {gpus}); do echo GPU; done",
            "python": f'echo "python $*"; case "$*" in *{fails_on}*) exit 3;; esac',
        }.items():
            (bin_folder / name).write_text(f"#!/bin/sh\n{body}\n")
            (bin_folder / name).chmod(0o755)
        environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHON": str(bin_folder / "python")}
        results = tmp_path / "results"
        done = subprocess.run(
            [SCRIPT, results, *args], capture_output=True, text=True, env=environment, check=False, timeout=60
        )
        summary = (results / "summary.txt").read_text().splitlines() if (results / "summary.txt").exists() else []
        lines = dict(line.split(maxsplit=1) for line in summary)
        return done.returncode, lines, done.stdout + done.stderr

    return run


def test_a_failed_step_stops_no_other(check, tmp_path):
    status, lines, _ = check("tests", "decode_step", "smoke", fails_on="decode_step")
    assert status == 1
    assert lines["tests"].startswith("passed")
    assert lines["decode_step"].startswith("FAILED: exit status 3")
    assert lines["smoke"].startswith("passed")
    assert "-m gpu tests/kernels tests/worker_model" in (tmp_path / "results" / "log.txt").read_text()


def test_steps_that_pass_are_success(check):
    assert check("smoke", "demo")[0] == 0


def test_a_step_for_which_no_time_is_left_counts_as_not_run(check):
    status, lines, _ = check("--seconds", "60", "smoke", "decode_step")
    assert status == 1
    assert lines["smoke"].startswith("passed")
    assert lines["decode_step"].startswith("not run")


def test_a_step_of_two_gpus_fails_on_one(check):
    status, lines, _ = check("dispatch")
    assert status == 1
    assert lines["dispatch"].startswith("FAILED: needs 2 GPUs")
    assert check("dispatch", gpus=2)[0] == 0


def test_unknown_steps_and_machines_without_gpus(check):
    assert check("nonsense")[0] == 2
    status, _, output = check(gpus=0)
    assert status == 1
    assert "no GPU" in output


@pytest.mark.parametrize(
    "args, words",
    [
        ([], ["RESULTS [--seconds N] [STEP...]"]),
        (["--seconds", "60"], ["RESULTS [--seconds N] [STEP...]"]),
        (["{folder}", "--seconds"], ["RESULTS [--seconds N] [STEP...]", "--seconds is '', expected a whole number"]),
        (["{folder}", "--seconds", "smoke"], ["--seconds is 'smoke', expected a whole number"]),
        (["{folder}", "nonsense"], ["unknown step 'nonsense'; see --list"]),
        (["{folder}", ""], ["unknown step ''; see --list"]),
        (["/proc/none", "smoke"], ["RESULTS is /proc/none: no folder that can be made and written"]),
        (["/proc", "smoke"], ["RESULTS is /proc: no folder that can be made and written"]),
        (["--step", "nonsense"], ["unknown step 'nonsense'; see --list"]),
        (["--step", "smoke"], ["give RESULTS and the names of steps"]),
    ],
)
def test_wrong_usage_is_said_and_nothing_written(tmp_path: Path, args: list[str], words: list[str]) -> None:
    folder = tmp_path / "results"
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": "false"}
    command = [SCRIPT, *(arg.format(folder=folder) for arg in args)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert all(said in done.stderr for said in words), done.stderr
    assert not folder.exists()
    assert not Path("/summary.txt").exists()


def test_help_is_its_own(tmp_path: Path) -> None:
    for option in ("--help", "-h"):
        # From another folder: the text is read from the script.
        command = [os.path.relpath(SCRIPT, tmp_path), option]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert "RESULTS [--seconds N] [STEP...]" in done.stdout
        assert done.stdout.splitlines()[-1].startswith("Environment: PYTHON")


def test_results_are_where_the_caller_is(tmp_path: Path) -> None:
    subprocess.run(
        [SCRIPT, "here", "--seconds", "0", "dispatch"], cwd=tmp_path, capture_output=True, check=False, timeout=60
    )
    assert (tmp_path / "here" / "summary.txt").read_text().startswith("dispatch ")
