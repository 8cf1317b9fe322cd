"""`epilora inspect` and `epilora convert`: findings from headers alone, and converted adapters with the same deltas."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from epilora.adapters.checks import DEFAULT_MAX_LORA_RANK
from epilora.adapters.convert import ConvertedLayout, convert_adapter
from epilora.adapters.inspection import Refusal, inspect_adapter
from epilora.adapters.open_adapter import open_adapter
from epilora.cli.app import app
from epilora.model_spec import ModelSpec
from epilora.settings import LoaderSettings
from tests.unit.epilora_adapters import AdapterArrays, resolve, write_adapter
from tests.unit.epilora_commands import error_of, run_command
from tests.unit.epilora_layouts import LAYOUTS, reference_deltas, tensors_of
from tests.unit.epilora_models import write_model
from tests.unit.test_epilora_layouts import deltas_of

FIXTURES = Path(__file__).parent.parent / "fixtures"


def _json(*arguments: object, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run_command("inspect", *arguments, "--json", code=code))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inspect_says_layout_and_bytes_of_each_rank(tmp_path: Path, layout: str) -> None:
    model = write_model(tmp_path / "model")
    tensors, changes = tensors_of(ModelSpec.from_directory(model), layout, 3)
    adapter = write_adapter(tmp_path / "a", tensors, **changes)
    found = _json(adapter, "--model", model, "--ep", 3, "--placement", "round_robin")
    assert (found["expert_layout"], found["refused"], found["num_tensors"]) == (LAYOUTS[layout][0], None, len(tensors))
    assert all(experts == [0, 1, 2, 3] for by in found["experts"].values() for experts in by.values())
    assert found["lora_ranks"] == [3]
    assert found["scales"] == [2.0]
    # Rank 0 has experts 0 and 3, each other rank one.
    first, second, third = found["bytes_per_rank"]
    assert second == third
    assert first > second > 0


def test_inspect_without_a_model_goes_by_names(tmp_path: Path) -> None:
    adapter = FIXTURES / "adapters" / "peft-0.17.1-transformers-4.57.3" / "mixtral-T-experts_0_2_layer_1"
    found = _json(adapter)
    assert found["likely_families"] == ["mixtral", "minimax_m2"]
    assert {module["path"] for module in found["modules"]} >= {"model.layers.*.block_sparse_moe.experts.*.w1"}
    assert found["refused"] is None
    output = run_command("inspect", adapter)
    assert "1 |█ █" in output, output


def test_inspect_draws_what_is_touched(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    tensors, changes = tensors_of(ModelSpec.from_directory(model), "F1", 3)
    some = {name: array for name, array in tensors.items() if "layers.1.mlp.experts.2" in name}
    adapter = write_adapter(tmp_path / "a", some, **changes)
    output = run_command("inspect", adapter, "--model", model)
    assert "   1 |  █ |" in output
    assert "would be served" in output


def test_inspect_says_why_an_adapter_would_be_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", hidden_size=16)
    other = ModelSpec.from_directory(write_model(tmp_path / "other"))
    tensors, changes = tensors_of(other, "F1", 3)
    adapter = write_adapter(tmp_path / "a", tensors, **changes)
    found = _json(adapter, "--model", model, code=1)
    assert found["refused"]["reason"] == "SHAPE_MISMATCH"
    assert "would be refused (SHAPE_MISMATCH)" in run_command("inspect", adapter, "--model", model, code=1)
    dora = write_adapter(tmp_path / "dora", tensors, **changes, use_dora=True)
    assert _json(dora, code=1)["refused"]["reason"] == "UNSUPPORTED_ADAPTER"
    for name in ("none", "n" * 300):
        assert "does not exist" in run_command("inspect", tmp_path / name, code=1)


# Reading it is an error of the system, also for root.
UNREADABLE = Path("/proc/self/mem")


@pytest.mark.parametrize(
    "broken, code, reason",
    [
        ("", "NOT_FOUND", "SOURCE_NOT_FOUND"),
        ("adapter_config.json", "INVALID_ARGUMENT", "SOURCE_UNREADABLE"),
        ("adapter_model.safetensors", "INVALID_ARGUMENT", "SOURCE_UNREADABLE"),
    ],
)
def test_errors_are_json_if_asked(tmp_path: Path, broken: str, code: str, reason: str) -> None:
    model = write_model(tmp_path / "model")
    tensors, changes = tensors_of(ModelSpec.from_directory(model), "F1", 3)
    good, adapter = write_adapter(tmp_path / "good", tensors, **changes), tmp_path / "a"
    if broken:
        write_adapter(adapter, tensors, **changes)
        (adapter / broken).unlink()
        (adapter / broken).symlink_to(UNREADABLE)
    plan = ("plan", "--model", model, "--adapter", good, "--adapter", f"other={adapter}", "--json")
    for command in (("inspect", adapter, "--json"), plan):
        found = error_of(*command)
        assert set(found) == {"path", "error"}
        assert found["path"] == str(adapter)
        assert (found["error"]["code"], found["error"]["reason"]) == (code, reason)
        assert str(adapter) in found["error"]["message"]
    shown = CliRunner().invoke(app, ["inspect", str(adapter)])
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert f"error: {code} ({reason})" in shown.stderr


def test_errors_that_are_no_adapters_are_json_too(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    found = error_of("plan", "--model", tmp_path / "none", "--json")
    assert (found["path"], found["error"]["code"]) == (None, "NOT_FOUND")
    found = error_of("plan", "--model", model, "--load-from", " ", "--json")
    assert (found["path"], found["error"]["reason"]) == (None, "BAD_ADDRESS")
    away = CliRunner().invoke(app, ["plan", "--model", str(model), "--load-from", "127.0.0.1:1", "--json"])
    assert (away.exit_code, away.stderr) == (3, "")
    assert json.loads(away.stdout)["error"]["code"] == "UNAVAILABLE"


def test_values_that_cannot_be_read_are_a_finding(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    tensors, changes = tensors_of(ModelSpec.from_directory(model), "F1", 3)
    directory = os.open(tmp_path, os.O_RDONLY)
    with open_adapter(write_adapter(tmp_path / "a", tensors, **changes)) as opened:
        # The system reads no bytes of a directory.
        os.dup2(directory, opened.weights.descriptors[0])
        found = inspect_adapter(opened, verify=True)
    os.close(directory)
    assert found.refusal == Refusal(
        reason="SOURCE_UNREADABLE", message=f"{tmp_path / 'a'} cannot be read: Is a directory"
    )
    assert not found.values_read


def test_inspect_reads_headers_only(tmp_path: Path) -> None:
    """A file with a hole for its data: reading it would take long, and a value would be no number."""
    model = write_model(tmp_path / "model", hidden_size=2048, moe_intermediate_size=768, num_experts=64)
    spec = ModelSpec.from_directory(model)
    entries, end = {}, 0
    for layer in (0, 1):
        for expert in range(64):
            for name, inputs, outputs in (("gate_proj", 2048, 768), ("up_proj", 2048, 768), ("down_proj", 768, 2048)):
                for side, shape in (("A", [16, inputs]), ("B", [outputs, 16])):
                    key = f"model.layers.{layer}.mlp.experts.{expert}.{name}.lora_{side}.weight"
                    size = 4 * shape[0] * shape[1]
                    entries[key] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
                    end += size
    adapter = write_adapter(tmp_path / "a", {"x": np.zeros(1, np.float32)}, r=16)
    header = json.dumps(entries).encode()
    with (adapter / "adapter_model.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + end)
    found = _json(adapter, "--model", model, "--ep", 8)
    assert found["refused"] is None
    assert len(found["bytes_per_rank"]) == 8
    assert sum(found["bytes_per_rank"]) >= end
    assert spec.num_layers == 2


@pytest.mark.parametrize("layout", ["F1", "F2a", "F2b", "F3", "F5"])
def test_inspect_reads_values_if_asked(tmp_path: Path, layout: str) -> None:
    model = write_model(tmp_path / "model")
    tensors, changes = tensors_of(ModelSpec.from_directory(model), layout, 3)
    first = min(name for name in tensors if "layers.1" in name)
    bad = {name: array.copy() for name, array in tensors.items()}
    bad[first].flat[-1] = np.nan
    broken = write_adapter(tmp_path / "nan", bad, **changes)
    assert _json(broken, "--model", model)["refused"] is None
    for options in ((), ("--model", model)):
        refused = _json(broken, "--verify", *options, code=1)["refused"]
        assert (refused["reason"], first in refused["message"]) == ("NON_FINITE", True)
    # An expert that was never chosen: its block is zero.
    tensors = {name: array.copy() for name, array in tensors.items()}
    block = {"F1": (...,), "F2a": (slice(None), slice(2, None, 4)), "F3": (2,), "F5": (2,)}.get(layout)
    for name, array in tensors.items():
        is_b = name.removesuffix(".weight").endswith("_B") and (layout != "F1" or "experts.2." in name)
        if "layers.1" in name and layout != "F2b" and is_b:
            array[block] = 0
        elif "layers.1" in name and layout == "F2b" and "lora_A" in name:
            array[6:9] = 0
    found = _json(write_adapter(tmp_path / "zero", tensors, **changes), "--model", model, "--verify")
    count = "3 of 24" if layout == "F1" else "2 of 16"
    assert [warning.split(" pairs have a matrix")[0] for warning in found["warnings"]] == [count]
    assert _json(tmp_path / "zero", "--model", model)["warnings"] == []


def test_a_zero_may_have_a_sign(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    tensors, changes = tensors_of(ModelSpec.from_directory(model), "F2a", 3)
    zeros = {name: array * np.float32(-0.0) if "lora_B" in name else array for name, array in tensors.items()}
    assert any(np.signbit(array).any() for name, array in zeros.items() if "lora_B" in name)
    found = _json(write_adapter(tmp_path / "a", zeros, **changes), "--model", model, "--verify")
    assert "The adapter changes nothing" in found["warnings"][0]


def test_contested_patterns_are_warned_of(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    tensors, changes = tensors_of(ModelSpec.from_directory(model), "F1", 3)
    patterns = {"alpha_pattern": {"down_proj": 4, r".*experts\.2.*": 9}}
    (warning,) = _json(write_adapter(tmp_path / "a", tensors, **changes, **patterns), "--model", model)["warnings"]
    assert "model.layers.0.mlp.experts.2.down_proj by 'down_proj' (4) and by" in warning


def test_inspect_says_what_a_service_would_need(tmp_path: Path) -> None:
    """A larger rank than the default, values that were read, a rank without experts."""
    assert LoaderSettings.model_fields["max_lora_rank"].default == DEFAULT_MAX_LORA_RANK
    model = write_model(tmp_path / "model")
    tensors, changes = tensors_of(ModelSpec.from_directory(model), "F1", 600)
    adapter = write_adapter(tmp_path / "a", tensors, **{**changes, "r": 600})
    found = _json(adapter, "--model", model, "--ep", 6)
    assert found["values_read"] is False
    assert [warning for warning in found["warnings"] if "lora_rank 600 is above 512" in warning]
    assert "2 of 6 EP ranks hold no expert, the first is rank 4" in found["warnings"]
    assert "the values were not read" in run_command("inspect", adapter, "--model", model).replace("\n", " ")
    assert _json(adapter, "--model", model, "--verify")["values_read"] is True


def test_inspect_takes_the_hint_of_the_parameter(tmp_path: Path) -> None:
    """What settles AMBIGUOUS_PARAMETER for a service can be tried here, too."""
    model = write_model(tmp_path / "model", moe_intermediate_size=4)
    tensors, changes = tensors_of(ModelSpec.from_directory(model), "F2a", 3)
    first = {name: array for name, array in tensors.items() if ".base_layer." not in name}
    adapter = write_adapter(tmp_path / "a", first, **{**changes, "target_parameters": None})
    assert _json(adapter, "--model", model, "--parameter", "down_proj")["refused"] is None
    refused = _json(adapter, "--model", model, "--parameter", "w9", code=1)["refused"]
    assert (refused["reason"], "w9" in refused["message"]) == ("BAD_LAYOUT_HINTS", True)


@pytest.mark.parametrize("kind", ["directory", "pipe"])
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_what_is_no_file_is_said_to_be_none(tmp_path: Path, kind: str, name: str) -> None:
    adapter = write_adapter(tmp_path / "a", {"x": np.zeros(1, np.float32)})
    (adapter / "adapter_model.safetensors").unlink()
    if kind == "directory":
        (adapter / name).mkdir()
    else:
        os.mkfifo(adapter / name)
    assert "no regular file" in run_command("inspect", adapter, code=1).replace("\n", " ")


@pytest.mark.parametrize("target", ConvertedLayout)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_converted_adapters_have_the_same_deltas(tmp_path: Path, layout: str, target: ConvertedLayout) -> None:
    model = ModelSpec.from_directory(write_model(tmp_path / "model"))
    tensors, changes = tensors_of(model, layout, 3)
    adapter = write_adapter(tmp_path / "a", tensors, **changes)
    with open_adapter(adapter) as opened:
        convert_adapter(opened, model, tmp_path / "out", target)
    form = resolve(tmp_path / "out", model)
    expected = {"per-expert": "per_expert", "fused": "target_parameters"}[target.value]
    assert form.expert_layout == expected
    assert form.warnings == form.rank_differences == ()
    deltas = deltas_of(form, tmp_path / "out", model)
    for place, delta in reference_deltas(model, 3).items():
        np.testing.assert_allclose(deltas[place], delta, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("target", ConvertedLayout)
def test_converted_ranks_and_scales_are_those_of_the_original(tmp_path: Path, target: ConvertedLayout) -> None:
    """rank_pattern, alpha_pattern and rsLoRA of a recorded adapter, attention included."""
    model = FIXTURES / "models" / "qwen3moe-T"
    adapter = FIXTURES / "adapters" / "peft-0.17.1-transformers-4.57.3" / "qwen3moe-T-ranks"
    run_command("convert", adapter, tmp_path / "out", "--layout", target.value, "--model", model)
    spec = ModelSpec.from_directory(model)
    original, converted = resolve(adapter, spec), resolve(tmp_path / "out", spec)
    expected, got = deltas_of(original, adapter, spec), deltas_of(converted, tmp_path / "out", spec)
    assert expected.keys() <= got.keys()
    for place, delta in got.items():
        wanted = expected.get(place, np.zeros_like(delta))
        np.testing.assert_allclose(delta, wanted, rtol=1e-5, atol=1e-7, err_msg=str(place))
    arrays, others = AdapterArrays(adapter), AdapterArrays(tmp_path / "out")
    assert original.dense.keys() == converted.dense.keys()
    for module, pair in original.dense.items():
        np.testing.assert_allclose(others.delta(converted.dense[module]), arrays.delta(pair), rtol=1e-6)


def test_experts_of_scale_zero_are_written_as_such(tmp_path: Path) -> None:
    """lora_alpha 0, and one expert of which a pattern says otherwise: the common scale is no divisor."""
    model = ModelSpec.from_directory(write_model(tmp_path / "model"))
    tensors, changes = tensors_of(model, "F1", 3)
    config = {**changes, "lora_alpha": 0, "alpha_pattern": {r".*experts\.2\..*": 4}}
    adapter = write_adapter(tmp_path / "a", tensors, **config)
    with open_adapter(adapter) as opened:
        convert_adapter(opened, model, tmp_path / "out", ConvertedLayout.FUSED)
    expected = deltas_of(resolve(adapter, model), adapter, model)
    got = deltas_of(resolve(tmp_path / "out", model), tmp_path / "out", model)
    assert any(delta.any() for delta in expected.values())
    for place, delta in expected.items():
        np.testing.assert_allclose(got[place], delta, rtol=1e-6, atol=1e-6)


def test_convert_writes_no_existing_directory(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    tensors, changes = tensors_of(ModelSpec.from_directory(model), "F3", 3)
    adapter = write_adapter(tmp_path / "a", tensors, **changes)
    assert "exists" in run_command("convert", adapter, adapter, "--layout", "fused", "--model", model, code=1)
    too_long = tmp_path / ("n" * 300)
    assert "cannot be written" in run_command(
        "convert", adapter, too_long, "--layout", "fused", "--model", model, code=1
    )


def test_peft_reads_a_fused_adapter_as_we_do(tmp_path: Path) -> None:
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    from safetensors.torch import load_file

    from tests.unit.epilora_merge import load_model

    model = FIXTURES / "models" / "qwen3moe-T"
    adapter = FIXTURES / "adapters" / "peft-0.17.1-transformers-4.57.3" / "qwen3moe-T-all"
    run_command("convert", adapter, tmp_path / "out", "--layout", "fused", "--model", model)
    expected = load_file(adapter / "expected.safetensors")
    loaded = peft.PeftModel.from_pretrained(load_model(model), tmp_path / "out").eval()
    with torch.no_grad():
        logits = loaded(expected["input_ids"]).logits
    torch.testing.assert_close(logits, expected["logits"], atol=1e-4, rtol=1e-4)


def test_names_of_a_foreign_file_do_not_steer_the_terminal(tmp_path: Path) -> None:
    module = "model.layers.0.\x1b[2J\x1b]0;x\x07q_proj"
    tensors = {
        f"base_model.model.{module}.lora_{side}.weight": np.ones((3, 8) if side == "A" else (8, 3), np.float32)
        for side in "AB"
    }
    adapter = write_adapter(tmp_path / "a", tensors)
    model = write_model(tmp_path / "model")
    for output in (run_command("inspect", adapter), run_command("inspect", adapter, "--model", model, code=1)):
        assert r"\x1b[2J" in output
        assert not set(output) & {"\x1b", "\x07"}
