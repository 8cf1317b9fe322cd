"""What `epilora plan` says before anything is loaded is what a worker holds afterwards."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner
from worker_model_families import CONFIGS, MULTIMODAL, family_config, write_multimodal
from worker_model_support import FIXTURES, Rank, fixture_adapter, small_config, write_model, write_slice

from compute_worker.model_description import describe_model
from epilora.cli.app import app
from epilora.cli.plan import ranges
from epilora.errors import InvalidArgumentError
from epilora.memory_plan import plan_memory, read_adapter
from epilora.model_spec import ModelDescription, ModelSpec
from epilora.placement import ExpertPlacement

ADAPTERS = ("qwen3moe-T-both", "mixtral-T-rslora_pattern", "qwen2moe-T-attn_only")
# Tables of rotary positions are in memory, but in no file.
TABLE_BYTES = 4096


def run(*arguments: object) -> dict[str, object]:
    result = CliRunner().invoke(app, ["plan", "--json", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    parsed: dict[str, object] = json.loads(result.stdout)
    return parsed


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_those_of_a_worker(tmp_path: Path, family: str, tied: bool) -> None:
    model = write_model(small_config(family, tie_word_embeddings=tied), tmp_path / "model")
    report = Rank(model, work=tmp_path).runner.memory()
    (plan,) = run("--model", model)["ranks"]
    assert plan["base_expert_bytes"] == report.base_expert_bytes
    assert 0 <= report.base_dense_bytes - plan["base_dense_bytes"] < TABLE_BYTES


@pytest.mark.parametrize("name", ["nemotron_h", "deepseek_v3", "qwen3_vl_moe"])
def test_families_by_their_module_tree_are_those_of_a_worker(tmp_path: Path, name: str) -> None:
    """States of recurrent layers; what a checkpoint has beside the text model, as vision parts, does not count."""
    model = tmp_path / "model"
    if name in MULTIMODAL:
        write_multimodal(name, model)
    else:
        write_model(family_config(name, CONFIGS[name]), model)
    rank = Rank(model, work=tmp_path, max_num_sequences=3, dtype="bfloat16")
    report = rank.runner.memory()
    # Read as a command reads it from the process that has transformers.
    read = ModelDescription.from_json(json.loads(json.dumps(dataclasses.asdict(describe_model(model)))))
    spec = ModelSpec.from_description(model, read)
    (plan,) = plan_memory(spec, ExpertPlacement.make("linear", spec, 1), {}, element_bytes=2, num_sequences=3)
    assert plan.state_bytes == report.state_cache_bytes
    assert (plan.state_bytes > 0) == (name == "nemotron_h")
    assert plan.base_expert_bytes == report.base_expert_bytes
    assert 0 <= report.base_dense_bytes - plan.base_dense_bytes < TABLE_BYTES
    assert plan.total_bytes == plan.base_expert_bytes + plan.base_dense_bytes + plan.state_bytes


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_are_those_of_a_worker(tmp_path: Path, name: str) -> None:
    model, adapter = (
        FIXTURES / "models" / f"{name.split('-T', maxsplit=1)[0]}-T",
        FIXTURES / "adapters" / "peft-0.21.2" / name,
    )
    rank = Rank(model, work=tmp_path)
    path = write_slice(tmp_path / "slice", fixture_adapter(adapter, rank.spec), rank.load_spec)
    resident = rank.stage(path, generation=1)
    (plan,) = run("--model", model, "--adapter", f"mine={adapter}")["ranks"]
    (planned,) = plan["adapters"]
    assert planned["name"] == "mine"
    assert planned["expert_bytes"] + planned["dense_bytes"] == resident
    assert plan["total_bytes"] == plan["base_expert_bytes"] + plan["base_dense_bytes"] + resident


def test_ranks_share_the_experts_and_repeat_the_rest(tmp_path: Path) -> None:
    spec = ModelSpec.from_directory(FIXTURES / "models" / "qwen3moe-T")
    form = read_adapter(FIXTURES / "adapters" / "peft-0.21.2" / "qwen3moe-T-both", spec, max_lora_rank=512)
    (one,) = plan_memory(spec, ExpertPlacement.make("linear", spec, 1), {"a": form}, element_bytes=2, num_sequences=1)
    num_experts = spec.moe_layers[0].num_experts
    table = tmp_path / "placement.json"
    table.write_text(json.dumps({"all_layers": [[*range(num_experts)], [0], []]}))
    for placement, copies in (("linear", 0), ("round_robin", 0), (str(table), len(spec.moe_layers))):
        ranks = plan_memory(
            spec, ExpertPlacement.make(placement, spec, 3), {"a": form}, element_bytes=2, num_sequences=1
        )
        assert sum(rank.num_experts for rank in ranks) == one.num_experts + copies
        expert_bytes = one.base_expert_bytes // one.num_experts
        assert [rank.base_expert_bytes for rank in ranks] == [rank.num_experts * expert_bytes for rank in ranks]
        assert {rank.base_dense_bytes for rank in ranks} == {one.base_dense_bytes}
        assert {rank.adapters[0].dense_bytes for rank in ranks} == {one.adapters[0].dense_bytes}
        per_expert = one.adapters[0].expert_bytes // one.num_experts
        assert [r.adapters[0].expert_bytes for r in ranks] == [r.num_experts * per_expert for r in ranks]


def test_ranks_that_share_experts_hold_parts() -> None:
    spec = ModelSpec.from_directory(FIXTURES / "models" / "qwen3moe-T")
    form = read_adapter(FIXTURES / "adapters" / "peft-0.21.2" / "qwen3moe-T-both", spec, max_lora_rank=512)
    placement = ExpertPlacement.make("linear", spec, 2)
    whole = plan_memory(spec, placement, {"a": form}, element_bytes=4, num_sequences=1)
    parts = plan_memory(spec, placement, {"a": form}, element_bytes=4, num_sequences=1, expert_tp=2)
    assert [rank.ep_rank for rank in parts] == [0, 1, 2, 3]
    for part in parts:
        rank = whole[part.ep_rank // 2]
        assert (part.num_experts, part.base_dense_bytes) == (rank.num_experts, rank.base_dense_bytes)
        assert 2 * part.base_expert_bytes == rank.base_expert_bytes
        assert rank.adapters[0].expert_bytes < 2 * part.adapters[0].expert_bytes < 2 * rank.adapters[0].expert_bytes
    with pytest.raises(InvalidArgumentError, match="7 ranks cannot share the experts"):
        plan_memory(spec, placement, {}, element_bytes=4, num_sequences=1, expert_tp=7)
    report = run("--model", FIXTURES / "models" / "qwen3moe-T", "--ranks", 4, "--expert-tp", 2)
    assert [rank["base_expert_bytes"] for rank in report["ranks"]] == [part.base_expert_bytes for part in parts]


def test_config_alone_is_enough(tmp_path: Path) -> None:
    small_config("mixtral", dtype="bfloat16").save_pretrained(tmp_path)
    report = run("--model", tmp_path, "--ranks", 2)
    sizes = [rank["base_expert_bytes"] for rank in report["ranks"]]
    assert sizes == [2 * 4 * 3 * 32 * 24 * 2, 2 * 3 * 3 * 32 * 24 * 2]
    assert report["placement"]["layers"]["1"] == [[0, 1, 2, 3], [4, 5, 6]]


def test_table_for_people() -> None:
    result = CliRunner().invoke(
        app, ["plan", "--model", str(FIXTURES / "models" / "qwen3moe-T"), "--ranks", "2"], env={"COLUMNS": "120"}
    )
    assert result.exit_code == 0
    assert "expert weights" in result.stdout
    assert "0-" in result.stdout


def test_refusals(tmp_path: Path) -> None:
    model = str(FIXTURES / "models" / "qwen3moe-T")
    for arguments, reason in (
        (["--model", str(tmp_path / "none")], "MODEL_NOT_FOUND"),
        (["--model", model, "--dtype", "int8"], "BAD_DTYPE"),
        (["--model", model, "--adapter", str(tmp_path)], "NO_ADAPTER_CONFIG"),
        (["--model", model, "--adapter", str(tmp_path / "none")], "SOURCE_NOT_FOUND"),
    ):
        result = CliRunner().invoke(app, ["plan", *arguments])
        assert result.exit_code == 1
        assert reason in result.stderr


def test_wrong_usage(tmp_path: Path) -> None:
    fixture = FIXTURES / "adapters" / "peft-0.17.1-transformers-4.57.3" / "qwen3moe-T-all"
    named = [tmp_path / parent / "final" for parent in ("one", "two")]
    for path in named:
        path.parent.mkdir()
        path.symlink_to(fixture)
    model = ["--model", str(FIXTURES / "models" / "qwen3moe-T")]
    adapters = [argument for path in named for argument in ("--adapter", str(path))]
    for arguments, words in (
        (adapters, "'final'"),
        (["--save", str(tmp_path / "none" / "placement.json")], "cannot be written"),
    ):
        result = CliRunner().invoke(app, ["plan", *model, *arguments], env={"COLUMNS": "400"})
        assert result.exit_code == 2
        assert words in result.stderr


def test_ranges() -> None:
    assert ranges((0, 1, 2, 5, 7, 8)) == "0-2 5 7-8"
    assert ranges(()) == ""


def test_an_adapter_in_a_pickle_is_planned_like_one_in_safetensors(tmp_path: Path) -> None:
    spec = ModelSpec.from_directory(FIXTURES / "models" / "qwen3moe-T")
    saved = FIXTURES / "adapters" / "peft-0.21.2" / "qwen3moe-T-both"
    shutil.copy(saved / "adapter_config.json", tmp_path)
    torch.save(load_file(saved / "adapter_model.safetensors"), tmp_path / "adapter_model.bin")
    placement = ExpertPlacement.make("linear", spec, 2)
    plans = [
        plan_memory(
            spec, placement, {"a": read_adapter(path, spec, max_lora_rank=512)}, element_bytes=2, num_sequences=1
        )
        for path in (saved, tmp_path)
    ]
    assert plans[0] == plans[1]
