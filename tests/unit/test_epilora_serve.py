"""`epilora serve` before it starts anything: settings, directories, what it refuses."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import typer

from epilora.cli.children import descendants
from epilora.cli.directories import Directories
from epilora.cli.serve import _check_model, read_settings
from epilora.errors import FailedPreconditionError, InvalidArgumentError
from epilora.last_error import WORKERS, read_last_error
from epilora.settings import WorkerSettings
from tests.unit.test_epilora_cli import REPOSITORY, run

SECONDS = 60.0
MODELS = Path(__file__).resolve().parents[1] / "fixtures" / "models"


def test_option_then_variable_then_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPILORA_MODEL", "/from/variable")
    monkeypatch.setenv("EPILORA_NUM_ADAPTER_SLOTS", "5")
    monkeypatch.setenv("EPILORA_LISTEN", "127.0.0.1:7")
    monkeypatch.setenv("EPILORA_ADAPTER_ROOTS", '["/a"]')
    worker, loader, gateway = read_settings({"listen": "127.0.0.1:8", "num_ranks": 2})
    assert (worker.model, worker.num_adapter_slots, worker.num_ranks) == (Path("/from/variable"), 5, 2)
    assert (gateway.listen, gateway.metrics_listen) == ("127.0.0.1:8", "127.0.0.1:9400")
    assert loader.adapter_roots == [Path("/a")]
    assert "run_dir" not in worker.model_fields_set


def test_exit_codes_tell_options_from_variables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("EPILORA_MODEL", raising=False)
    with pytest.raises(typer.Exit) as usage:
        read_settings({"log_level": "NOPE"})
    printed = capsys.readouterr().err
    assert usage.value.exit_code == 2
    assert "--log-level is 'NOPE'" in printed
    assert "neither --model nor EPILORA_MODEL" in printed
    monkeypatch.setenv("EPILORA_DTYPE", "float7")
    with pytest.raises(typer.Exit) as variable:
        read_settings({"model": Path("/m")})
    assert variable.value.exit_code == 78
    assert "EPILORA_DTYPE is 'float7'" in capsys.readouterr().err


def test_directories_are_held_by_one_and_removed_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A run directory must be short enough for Unix sockets, which pytest's own may not be.
    with tempfile.TemporaryDirectory(prefix="run-") as short:
        monkeypatch.setattr("tempfile.tempdir", short)
        check_ownership(tmp_path)


def check_ownership(tmp_path: Path) -> None:
    first = Directories.choose(state=tmp_path / "state", run=None, cache=None)
    shares_run = Directories.choose(state=tmp_path / "other", run=first.run, cache=None)
    assert shares_run.temporary == (shares_run.cache,)
    shares_cache = Directories.choose(state=tmp_path / "third", run=None, cache=first.cache)
    with first.owned():
        (first.run / "loader.sock").touch()
        for second, reason in (
            (first, "STATE_DIR_IN_USE"),
            (shares_run, "RUN_DIR_IN_USE"),
            (shares_cache, "CACHE_DIR_IN_USE"),
        ):
            with pytest.raises(FailedPreconditionError) as refused, second.owned():
                pass
            assert refused.value.reason == reason
        assert (first.run / "loader.sock").exists()
        assert first.cache.exists()
    assert not first.run.exists()
    with pytest.raises(ZeroDivisionError), first.owned():
        _ = first.run.stat().st_size // 0
    assert not first.run.exists()
    with shares_run.owned():
        pass
    assert first.run.exists(), "it was named, so it stays"


@pytest.mark.parametrize(
    "names, options",
    [
        ("aab", "--state-dir and --run-dir"),
        ("aba", "--state-dir and --cache-dir"),
        ("abb", "--run-dir and --cache-dir"),
    ],
)
def test_no_directory_serves_for_two(names: str, options: str) -> None:
    with tempfile.TemporaryDirectory(prefix="run-") as short:
        state, run, cache = (Path(short) / name for name in names)
        with pytest.raises(InvalidArgumentError, match=f"{options} are both .*; give each its own"):
            Directories.choose(state=state, run=run, cache=cache)


def test_a_start_that_is_refused_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="run-") as short:
        monkeypatch.setattr("tempfile.tempdir", short)
        first, second = (
            Directories.choose(state=tmp_path / name, run=None, cache=tmp_path / "cache") for name in ("one", "two")
        )
        with first.owned():
            with pytest.raises(FailedPreconditionError), second.owned():
                pass
            assert not second.run.exists()
            assert first.run.exists()


def test_a_named_run_directory_keeps_what_is_not_ours(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="run-") as short:
        named = Directories.choose(state=tmp_path / "state", run=Path(short), cache=tmp_path / "cache")
        theirs = ["worker-x.sock", "notes.json", "worker-1.sock", "torchelastic/notes/a"]
        with named.owned():
            for name in ("loader.sock", "worker-0.sock"):
                with socket.socket(socket.AF_UNIX) as made:
                    made.bind(f"{short}/{name}")
            ours = ["addresses.json", "loader-error.json", f"torchelastic/{'0a' * 16}_x1_b/attempt_0/0/a"]
            for name in (*ours, *theirs):
                (named.run / name).parent.mkdir(parents=True, exist_ok=True)
                (named.run / name).write_text("")
        files = {str(path.relative_to(named.run)) for path in named.run.rglob("*") if not path.is_dir()}
        assert files == {"serve.lock", *theirs}
        assert not (named.run / "torchelastic" / f"{'0a' * 16}_x1_b").exists()
        (named.run / "torchelastic" / "notes" / "a").unlink()
        (named.run / "torchelastic" / "notes").rmdir()
        with named.owned():
            pass
        assert not (named.run / "torchelastic").exists()
        assert named.cache.exists()


@contextmanager
def starting(tmp_path: Path, *args: str, terminal: str = "") -> Iterator[subprocess.Popen[str]]:
    """A service of which the loader listens, and which is not ready yet."""
    command = [*("-m", "epilora.cli", "serve", f"--model={MODELS / 'qwen3moe-T'}", f"--state-dir={tmp_path / 's'}")]
    command += [
        "--listen=127.0.0.1:0",
        "--metrics-listen=127.0.0.1:0",
        f"--ready-file={tmp_path / 'ready.json'}",
        *args,
    ]
    # A session's leader has the terminal that it opens as its own. Under nohup SIGHUP is ignored, and stays so.
    opens = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
    opens += "fd = os.open(sys.argv[1], os.O_RDWR); [os.dup2(fd, i) for i in range(3)]; "
    opens += "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
    (tmp_path / "ready.json").write_text("of a service that is gone")
    directories = Directories.choose(state=tmp_path / "s", run=None, cache=None)
    service = subprocess.Popen(
        [sys.executable, *(["-c", opens, terminal] if terminal else []), *command],
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + SECONDS
        while not (directories.run / "loader.sock").exists():
            assert service.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert not (tmp_path / "ready.json").exists()
        yield service
        assert not directories.run.exists()
        assert not directories.cache.exists()
    finally:
        service.kill()
        service.communicate()


def test_a_terminal_that_closes_stops_it_in_order(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    try:
        with starting(tmp_path, terminal=os.ttyname(theirs)) as service:
            os.close(theirs)
            os.close(ours)
            # From the shell, after the kernel's.
            service.send_signal(signal.SIGHUP)
            assert service.wait(SECONDS) == 0
    finally:
        for descriptor in (ours, theirs):
            with suppress(OSError):
                os.close(descriptor)


def test_a_second_signal_shows_in_the_exit_code(tmp_path: Path) -> None:
    with starting(tmp_path) as service:
        assert service.stderr is not None
        (loader,) = [child for child in descendants(service.pid) if "loader_service" in child.cmdline()]
        # It does not heed the first signal now, so that the stop lasts.
        loader.suspend()
        service.send_signal(signal.SIGTERM)
        while "stopping" not in (line := service.stderr.readline()):
            assert line
        service.send_signal(signal.SIGTERM)
        assert service.wait(SECONDS) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    "option, reason",
    [
        ("--cache-dir=/proc/x", "BAD_DIRECTORY"),
        ("--cache-dir=/proc", "BAD_DIRECTORY"),
        ("--run-dir=/proc/x", "BAD_DIRECTORY"),
        ("--ready-file=/proc/x/r", "BAD_READY_FILE"),
        ("--ready-file=/tmp", "BAD_READY_FILE"),
    ],
)
def test_what_cannot_be_written_is_refused_at_once(option: str, reason: str, tmp_path: Path) -> None:
    failed = run("serve", f"--model={MODELS / 'qwen3moe-T'}", f"--state-dir={tmp_path}", option)
    assert failed.returncode == 1
    assert f"error: INVALID_ARGUMENT ({reason})" in failed.stderr
    assert f"{option.replace('=', ' is ')}, which cannot be written: " in failed.stderr
    assert "Traceback" not in failed.stderr


@pytest.mark.soak
def test_serve_ends_when_the_loader_can_never_start(tmp_path: Path) -> None:
    """The gateway would be ready without it."""
    failed = run(
        *("serve", f"--model={MODELS / 'qwen3moe-T'}", f"--state-dir={tmp_path}"),
        *("--listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0"),
        environment={"EPILORA_LOADER_LISTEN": "unix:/proc/x/loader.sock"},
    )
    assert failed.returncode == 1
    assert "the loader process cannot be kept running" in failed.stderr
    assert '"event": "ready", "process": "serve"' not in failed.stderr


@pytest.mark.parametrize(
    "args, variable, code, words",
    [
        (["--log-level=NOPE"], {}, 2, "--log-level is 'NOPE'"),
        (["--listen=127.0.0.1:99999"], {}, 2, "--listen is '127.0.0.1:99999'"),
        ([], {"EPILORA_NUM_RANKS": "two"}, 78, "EPILORA_NUM_RANKS is 'two'"),
        (["--placement=/none.json"], {}, 1, "/none.json"),
        (["--ranks=4"], {"EPILORA_EXPERT_TP": "3"}, 78, "EPILORA_EXPERT_TP is 3, which does not divide the 4 ranks"),
        (["--device=cpu"], {"EPILORA_EXPERT_BACKEND": "triton"}, 78, "is triton, but the device is a CPU; use auto"),
        (
            [],
            {"EPILORA_EXPERT_BACKEND": "triton", "EPILORA_ADAPTER_DTYPE": "file"},
            78,
            "EPILORA_ADAPTER_DTYPE is file",
        ),
    ],
)
def test_refused_before_anything_starts(
    args: list[str], variable: dict[str, str], code: int, words: str, tmp_path: Path
) -> None:
    failed = run(
        "serve", f"--model={MODELS / 'qwen3moe-T'}", f"--state-dir={tmp_path / 's'}", *args, environment=variable
    )
    assert failed.returncode == code, failed.stderr
    assert words in failed.stderr
    assert "Traceback" not in failed.stderr
    assert not (tmp_path / "s").exists()


@pytest.fixture
def without_weights(tmp_path: Path) -> Path:
    """A model of which no weights can be read."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_bytes((MODELS / "qwen3moe-T" / "config.json").read_bytes())
    return model


NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "EPILORA_EXPERT_BACKEND": "triton"}


def test_a_backend_that_the_device_cannot_have_ends_the_service_before_weights_are_read(
    without_weights: Path, tmp_path: Path
) -> None:
    """What the device is, only the workers' launcher knows."""
    failed = run(
        *("serve", f"--model={without_weights}", f"--state-dir={tmp_path / 's'}"),
        *("--listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0"),
        environment=NO_GPU,
    )
    assert failed.returncode == 78, failed.stderr
    assert failed.stderr.endswith("EPILORA_EXPERT_BACKEND is triton, but the device is a CPU; use auto or grouped\n")
    assert "Traceback" not in failed.stderr


@pytest.mark.parametrize("module", ["compute_worker", "compute_worker.launch"])
def test_workers_alone_find_such_a_backend_before_weights_are_read(
    module: str, without_weights: Path, tmp_path: Path
) -> None:
    failed = subprocess.run(
        [sys.executable, "-m", module],
        cwd=REPOSITORY,
        env={
            "PATH": "/usr/bin:/bin",
            "EPILORA_MODEL": str(without_weights),
            "EPILORA_RUN_DIR": str(tmp_path),
            **NO_GPU,
        },
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert failed.returncode == 78, failed.stderr
    assert "EPILORA_EXPERT_BACKEND is triton, but the device is a CPU" in failed.stdout + failed.stderr
    assert "Traceback" not in failed.stderr
    error = read_last_error(tmp_path, WORKERS)
    assert error is not None
    assert error.reason == "EXPERT_BACKEND"


def test_a_placement_is_over_the_ranks_that_do_not_share_experts(tmp_path: Path) -> None:
    model, saved = MODELS / "qwen3moe-T", tmp_path / "placement.json"
    assert run("plan", f"--model={model}", "--ranks=4", "--expert-tp=2", f"--save={saved}").returncode == 0
    settings = WorkerSettings(model=model, num_ranks=4, expert_tp=2, placement=str(saved))
    _check_model(settings)
    with pytest.raises(InvalidArgumentError, match="expected 4"):
        _check_model(settings.model_copy(update={"expert_tp": 1}))
    with pytest.raises(InvalidArgumentError, match="EPILORA_EXPERT_TP is 3, which does not divide the 4 ranks"):
        _check_model(settings.model_copy(update={"expert_tp": 3}))
