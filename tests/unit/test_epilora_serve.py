"""`epilora serve` before it starts anything: settings, directories, what it refuses."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import typer

from epilora.cli.directories import Directories
from epilora.cli.serve import read_settings
from epilora.errors import FailedPreconditionError
from tests.unit.test_epilora_cli import run

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
    with first.owned():
        (first.run / "loader.sock").touch()
        for second, reason in ((first, "STATE_DIR_IN_USE"), (shares_run, "RUN_DIR_IN_USE")):
            with pytest.raises(FailedPreconditionError) as refused, second.owned():
                pass
            assert refused.value.reason == reason
        assert (first.run / "loader.sock").exists()
    assert not first.run.exists()
    with pytest.raises(ZeroDivisionError), first.owned():
        _ = first.run.stat().st_size // 0
    assert not first.run.exists()
    with shares_run.owned():
        pass
    assert first.run.exists(), "it was named, so it stays"


@pytest.mark.parametrize(
    "args, variable, code, words",
    [
        (["--log-level=NOPE"], {}, 2, "--log-level is 'NOPE'"),
        (["--listen=127.0.0.1:99999"], {}, 2, "--listen is '127.0.0.1:99999'"),
        ([], {"EPILORA_NUM_RANKS": "two"}, 78, "EPILORA_NUM_RANKS is 'two'"),
        (["--placement=/none.json"], {}, 1, "/none.json"),
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
