"""Files that cannot be read, and names that look like something else: one error each, or shown as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from epilora.model_spec import ModelSpec
from tests.unit.epilora_adapters import write_adapter
from tests.unit.epilora_commands import error_of, run_command
from tests.unit.epilora_layouts import tensors_of
from tests.unit.epilora_models import write_model


def _change_config(model: Path, **changes: object) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    "broken, reason",
    [
        (lambda model: (model / "model.safetensors").symlink_to(model / "gone"), "MODEL_UNREADABLE"),
        (lambda model: (model / "model.safetensors").mkdir(), "MODEL_UNREADABLE"),
        (lambda model: _change_config(model, mlp_only_layers="x"), "BAD_MODEL_CONFIG"),
    ],
    ids=["dangling_link", "directory", "layers"],
)
def test_a_checkpoint_that_cannot_be_read_is_oneerror_of(tmp_path: Path, broken: Any, reason: str) -> None:
    model = write_model(tmp_path / "model")
    tensors, changes = tensors_of(ModelSpec.from_directory(model), "F1", 3)
    adapter = write_adapter(tmp_path / "a", tensors, **changes)
    broken(model)
    for command in (("inspect", adapter, "--model", model, "--json"), ("plan", "--model", model, "--json")):
        assert error_of(*command)["error"]["reason"] == reason


@pytest.mark.parametrize("header", [b"[]", b"{", b'{"a": []}', b'{"a": {"shape": "x"}}'])
def test_a_broken_header_of_a_checkpoint_is_oneerror_of(tmp_path: Path, header: bytes) -> None:
    model = write_model(tmp_path / "model")
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    found = error_of("plan", "--model", model, "--json")["error"]
    assert found["reason"] == "BAD_MODEL_WEIGHTS"
    assert "model.safetensors" in found["message"]


def test_a_dtype_that_is_no_name_is_oneerror_of(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    _change_config(model, dtype=[])
    # [] counts as none; a table does not.
    run_command("plan", "--model", model)
    _change_config(model, dtype={"a": 1})
    assert error_of("plan", "--model", model, "--json")["error"]["reason"] == "BAD_DTYPE"


@pytest.mark.parametrize("long", ["", "long" * 40], ids=["short", "longer_than_a_line"])
def test_brackets_in_names_are_shown_as_they_are(tmp_path: Path, long: str) -> None:
    """rich takes them for markup: a closing one without its opening one is an error there."""
    model = write_model(tmp_path / f"{long}a[" / "v2]")
    tensors, changes = tensors_of(ModelSpec.from_directory(model), "F1", 3)
    adapter = write_adapter(tmp_path / f"{long}b[" / "v2]", tensors, **changes)
    for command in (
        ("plan", "--model", model),
        ("convert", adapter, tmp_path / f"{long}c[" / "v2]", "--model", model, "--layout", "per-expert"),
        ("inspect", adapter),
    ):
        if command[0] == "convert":
            (tmp_path / f"{long}c[").mkdir()
        shown = "".join(run_command(*command).split())
        assert "[/v2]" in shown
        assert long in shown


def test_what_the_user_may_not_read_is_not_the_command_lines_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_args, **_kwargs: False)
    monkeypatch.setattr("epilora.adapters.open_adapter.os.path.isdir", lambda _path: False)
    assert error_of("inspect", tmp_path, "--json")["error"]["reason"] == "SOURCE_NOT_FOUND"
