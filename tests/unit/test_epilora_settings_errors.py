"""What is said of wrong EPILORA_* variables."""

from __future__ import annotations

import pytest

from epilora.settings import GatewaySettings, LoaderSettings, WorkerSettings
from epilora.settings_errors import EXIT_BAD_SETTINGS, settings_or_exit


def _refused(cls: type[WorkerSettings | LoaderSettings | GatewaySettings], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_:
        settings_or_exit(cls)
    assert exit_.value.code == EXIT_BAD_SETTINGS
    return capsys.readouterr().err


def test_one_line_each(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("EPILORA_NUM_ADAPTER_SLOTS", "many")
    monkeypatch.setenv("EPILORA_DTYPE", "float7")
    monkeypatch.delenv("EPILORA_MODEL", raising=False)
    lines = _refused(WorkerSettings, capsys).splitlines()
    assert len(lines) == 3
    assert any("EPILORA_NUM_ADAPTER_SLOTS is 'many'" in line and "integer" in line for line in lines)
    assert any("EPILORA_DTYPE is 'float7'" in line and "bfloat16" in line for line in lines)
    assert any("EPILORA_MODEL is not set" in line for line in lines)


def test_a_list_that_is_no_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("EPILORA_MODEL", "/m")
    monkeypatch.setenv("EPILORA_ADAPTER_ROOTS", "/adapters")
    assert "EPILORA_ADAPTER_ROOTS is '/adapters': expected a JSON list" in _refused(LoaderSettings, capsys)


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "127.0.0.1", ":50051", "localhost:http"])
def test_addresses(address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("EPILORA_MODEL", "/m")
    monkeypatch.setenv("EPILORA_LISTEN", address)
    assert "host:port with a port of 0 to 65535" in _refused(GatewaySettings, capsys)


def test_no_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPILORA_MODEL", "/m")
    monkeypatch.setenv("EPILORA_METRICS_LISTEN", "")
    monkeypatch.setenv("EPILORA_LISTEN", "[::]:0")
    settings = settings_or_exit(GatewaySettings)
    assert (settings.metrics_listen, settings.listen) == ("", "[::]:0")


@pytest.mark.parametrize("variable", ["WORKER_ADDRESS", "WORKER_LISTEN", "LOADER_ADDRESS", "LOADER_LISTEN"])
@pytest.mark.parametrize("address", ["{", "unix:{nope}/x", "unix:{}/x", "{run_dir.nope}", "{run_dir[0]}"])
def test_addresses_that_cannot_be_filled_in(
    variable: str, address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EPILORA_MODEL", "/m")
    monkeypatch.setenv(f"EPILORA_{variable}", address)
    said = _refused(WorkerSettings, capsys)
    assert f"EPILORA_{variable} is {address!r}" in said
    assert "{run_dir}" in said


@pytest.mark.parametrize("seconds", ["inf", "nan"])
def test_times_have_an_end(seconds: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("EPILORA_MODEL", "/m")
    monkeypatch.setenv("EPILORA_COLLECTIVE_TIMEOUT_SECONDS", seconds)
    assert "EPILORA_COLLECTIVE_TIMEOUT_SECONDS" in _refused(WorkerSettings, capsys)
