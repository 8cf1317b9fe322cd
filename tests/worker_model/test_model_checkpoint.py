"""Reading checkpoints: shards, tied and fused weights, what is missing or wrong, bytes and growth of memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from worker_model_families import CONFIGS, family_config, write_multimodal
from worker_model_support import Prompt, Rank, prompt_tokens, reference_logits, small_config, write_model

from compute_worker.checkpoint import load_model
from compute_worker.runner_parts import register_functions
from epilora.errors import InvalidArgumentError, NotFoundError
from epilora.load_spec import MoEEPLoadSpec
from epilora.model_spec import ModelSpec
from epilora.placement import ExpertPlacement
from epilora.settings import WorkerSettings

CPU = torch.device("cpu")
PROMPT = prompt_tokens(1, 8)


def _check_logits(model: Path, work: Path, reference: Path | None = None) -> None:
    rank = Rank(model, work=work)
    expected = reference_logits(reference or model, None, rank.spec, PROMPT)
    torch.testing.assert_close(rank.prefill([Prompt(tokens=PROMPT)])[0], expected, atol=1e-5, rtol=1e-5)


def _edit(directory: Path, edit: dict[str, torch.Tensor | None]) -> None:
    """Replaces tensors of a single-file checkpoint, or takes them away (None)."""
    file = directory / "model.safetensors"
    tensors = {**load_file(file), **edit}
    save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, file, {"format": "pt"})


def test_sharded_checkpoint(tmp_path: Path) -> None:
    model = write_model(small_config("qwen3_moe"), tmp_path / "model", max_shard_size="40KB")
    assert len(list(model.glob("model-*.safetensors"))) > 2
    _check_logits(model, tmp_path)


def test_tied_embeddings(tmp_path: Path) -> None:
    model = write_model(small_config("qwen3_moe", tie_word_embeddings=True), tmp_path / "model")
    assert "lm_head.weight" not in load_file(model / "model.safetensors")
    _check_logits(model, tmp_path)


def test_fused_expert_keys(tmp_path: Path) -> None:
    plain = write_model(small_config("qwen3_moe"), tmp_path / "plain")
    fused = write_model(small_config("qwen3_moe"), tmp_path / "fused")
    tensors = load_file(fused / "model.safetensors")
    edit: dict[str, torch.Tensor | None] = {key: None for key in tensors if ".experts." in key}
    for layer in (0, 1):
        path = f"model.layers.{layer}.mlp.experts"
        names = [[f"{path}.{expert}.{part}_proj.weight" for part in ("gate", "up")] for expert in range(7)]
        edit[f"{path}.gate_up_proj"] = torch.stack([torch.cat([tensors[name] for name in pair]) for pair in names])
        edit[f"{path}.down_proj"] = torch.stack([tensors[f"{path}.{e}.down_proj.weight"] for e in range(7)])
    _edit(fused, edit)
    _check_logits(fused, tmp_path, reference=plain)


def test_experts_stored_the_other_way_round(tmp_path: Path) -> None:
    """Qwen3-VL-MoE as released; transformers 5 reads that, and writes what its own modules hold."""
    whole = write_multimodal("qwen3_vl_moe", tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    keys = [key for key in tensors if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert {tuple(tensors[key].shape) for key in keys} == {(5, 40, 32), (5, 32, 20)}
    with torch.no_grad():
        expected = whole(input_ids=torch.tensor([PROMPT])).logits[0]
    for swapped in (False, True):
        if swapped:
            _edit(tmp_path / "model", {key: tensors[key].transpose(1, 2).contiguous() for key in keys})
        (logits,) = Rank(tmp_path / "model", work=tmp_path).prefill([Prompt(tokens=PROMPT)])
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["deepseek_v3", "nemotron_h", "qwen3_next"])
def test_dense_weights_have_the_types_and_values_of_transformers(tmp_path: Path, name: str) -> None:
    """In bfloat16 some stay float32: a rounded router bias would choose other experts."""
    model = write_model(family_config(name, CONFIGS[name]), tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    biases = {key: torch.randn(tensor.shape) for key, tensor in tensors.items() if key.endswith("correction_bias")}
    _edit(model, dict(biases))
    expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).state_dict()
    got = Rank(model, work=tmp_path, dtype="bfloat16").runner._model.state_dict()
    kinds = set()
    for key, tensor in expected.items():
        if ".experts." not in key:
            torch.testing.assert_close(got[key].as_subclass(torch.Tensor), tensor, atol=0, rtol=0, msg=key)
            kinds.add(tensor.dtype)
    assert kinds == ({torch.bfloat16, torch.float32} if biases else {torch.bfloat16})


@pytest.mark.parametrize(
    "key, value, reason, named",
    [
        ("model.layers.0.mlp.experts.3.up_proj.weight", None, "MISSING_WEIGHT", "layers.0.mlp.experts.gate_up_proj[3]"),
        ("model.layers.1.self_attn.q_proj.weight", None, "MISSING_WEIGHT", "layers.1.self_attn.q_proj.weight"),
        ("model.layers.1.mlp.gate.weight", torch.zeros(7, 31), "WEIGHT_SHAPE_MISMATCH", "[7, 32]"),
        ("model.layers.0.mlp.experts.3.up_proj.weight", torch.zeros(23, 32), "WEIGHT_SHAPE_MISMATCH", "[24, 32]"),
        ("model.layers.0.mlp.extra.weight", torch.zeros(2), "UNEXPECTED_WEIGHT", "model.layers.0.mlp.extra.weight"),
    ],
    ids=["expert missing", "dense missing", "router shape", "expert shape", "unexpected"],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, key: str, value: torch.Tensor | None, reason: str, named: str
) -> None:
    model = write_model(small_config("qwen3_moe"), tmp_path / "model")
    _edit(model, {key: value})
    with pytest.raises(InvalidArgumentError) as caught:
        Rank(model, work=tmp_path)
    assert caught.value.reason == reason
    assert named in caught.value.message


def test_truncated_and_missing_files(tmp_path: Path) -> None:
    model = write_model(small_config("qwen3_moe"), tmp_path / "model", max_shard_size="40KB")
    shard = sorted(model.glob("model-*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    with pytest.raises(InvalidArgumentError, match=shard.name) as caught:
        Rank(model, work=tmp_path)
    assert caught.value.reason == "BAD_CHECKPOINT"
    shard.unlink()
    with pytest.raises(NotFoundError, match=shard.name):
        Rank(model, work=tmp_path)


def _load(model: Path, *, ep_rank: int, num_ranks: int, placement: str = "linear", **settings: object):  # type: ignore[no-untyped-def]
    register_functions()
    spec = ModelSpec.from_directory(model)
    load_spec = MoEEPLoadSpec.make(spec, ExpertPlacement.make(placement, spec, num_ranks), ep_rank)
    return load_model(WorkerSettings(model=model, num_ranks=num_ranks, **settings), load_spec, CPU)  # type: ignore[arg-type]


def test_random_weights_do_not_depend_on_placement(tmp_path: Path) -> None:
    write_model(small_config("qwen2_moe"), tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    whole = _load(tmp_path / "model", ep_rank=0, num_ranks=1, load_format="random", dtype="bfloat16").model
    for ep_rank in (0, 1):
        part = _load(
            tmp_path / "model",
            ep_rank=ep_rank,
            num_ranks=2,
            placement="round_robin",
            load_format="random",
            dtype="bfloat16",
        ).model
        for name, weight in part.named_parameters():
            expected = whole.get_parameter(name)
            assert torch.equal(weight, expected[ep_rank::2] if ".experts." in name else expected), name
    assert 0.015 < float(whole.get_parameter("model.layers.1.mlp.experts.down_proj").float().std()) < 0.025
    assert torch.equal(whole.get_parameter("model.norm.weight"), torch.ones(32, dtype=torch.bfloat16))


_GROWTH_SCRIPT = """
import json, sys, torch
from pathlib import Path
from compute_worker.checkpoint import load_model
from compute_worker.runner_parts import register_functions
from epilora.load_spec import MoEEPLoadSpec
from epilora.model_spec import ModelSpec
from epilora.placement import ExpertPlacement
from epilora.settings import WorkerSettings
register_functions()
path = Path(sys.argv[1])
spec = ModelSpec.from_directory(path)
load_spec = MoEEPLoadSpec.make(spec, ExpertPlacement.make("round_robin", spec, 2), 1)
loaded = load_model(WorkerSettings(model=path, num_ranks=2), load_spec, torch.device("cpu"))
print(json.dumps([loaded.base_expert_bytes, loaded.base_expert_growth_bytes, loaded.base_dense_bytes]))
"""


def test_memory_grows_by_the_local_experts_only(tmp_path: Path) -> None:
    """In a process of its own: other tests' freed memory would hide growth."""
    wide = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 31, "vocab_size": 256}
    model = write_model(small_config("qwen3_moe", **wide), tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", _GROWTH_SCRIPT, str(model)], capture_output=True, text=True, timeout=120, check=True
    )
    expert_bytes, growth, dense_bytes = json.loads(done.stdout.splitlines()[-1])
    assert expert_bytes == 2 * 15 * 3 * 512 * 512 * 4
    assert abs(growth - expert_bytes) < 0.05 * expert_bytes
    tensors = load_file(model / "model.safetensors")
    in_file = sum(tensor.nbytes for key, tensor in tensors.items() if ".experts." not in key)
    rotary_tables = 2 * 4 * 4
    assert dense_bytes == in_file + rotary_tables
