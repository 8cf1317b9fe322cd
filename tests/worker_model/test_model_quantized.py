"""Checkpoints in 8 and 4 bits are served with the weights that transformers dequantizes them to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from worker_model_families import CONFIGS, family_config
from worker_model_support import Prompt, Rank, prompt_tokens, reference_logits, small_config, write_model

from epilora.errors import InvalidArgumentError

TOKENS = prompt_tokens(1, 9)
BLOCK = 16


def _rewrite(model: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, object] | None) -> Path:
    save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()}, model / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((model / "config.json").read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
    (model / "config.json").write_text(json.dumps(config))
    return model


def _logits(model: Path, work: Path, **settings: object) -> torch.Tensor:
    (logits,) = Rank(model, work=work, dtype="float32", **settings).prefill([Prompt(tokens=TOKENS)])
    return logits


def test_float8_blocks(tmp_path: Path) -> None:
    """Experts of 24 rows: the last block of 16 is cut off."""
    plain, quantized = (write_model(small_config("qwen3_moe"), tmp_path / name) for name in ("plain", "quantized"))
    tensors, stored = load_file(plain / "model.safetensors"), {}
    dequantize, exact_blocks = Fp8Dequantize(None), 0
    for key, weight in tensors.items():
        stored[key] = weight
        if weight.dim() != 2 or "proj" not in key:
            continue
        rows, columns = weight.shape
        scale = torch.rand(-(-rows // BLOCK), -(-columns // BLOCK)) + 0.5
        factors = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
        stored[key] = (weight / factors).to(torch.float8_e4m3fn)
        stored[f"{key}_scale_inv"] = scale
        tensors[key] = stored[key].float() * factors
        if rows % BLOCK == columns % BLOCK == 0:
            assert torch.equal(tensors[key], dequantize._dequantize_one(stored[key], scale).float())
            exact_blocks += 1
    assert exact_blocks
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    _rewrite(plain, tensors, None)
    _rewrite(quantized, stored, quantization)
    rank = Rank(plain, work=tmp_path)
    expected = reference_logits(plain, None, rank.spec, TOKENS)
    torch.testing.assert_close(_logits(quantized, tmp_path), expected, atol=1e-5, rtol=1e-5)


def test_mxfp4_experts(tmp_path: Path) -> None:
    options = {**CONFIGS["gpt_oss"], "hidden_size": 64, "intermediate_size": 32}
    plain, quantized = (write_model(family_config("gpt_oss", options), tmp_path / n) for n in ("plain", "quantized"))
    tensors, stored = load_file(plain / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(1)
    for key, weight in tensors.items():
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[key] = weight
            continue
        experts, width_in, width_out = weight.shape
        blocks = torch.randint(256, (experts, width_out, width_in // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, (experts, width_out, width_in // 32), dtype=torch.uint8, generator=generator)
        stored[f"{key}_blocks"], stored[f"{key}_scales"] = blocks, scales
        tensors[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    _rewrite(plain, tensors, None)
    _rewrite(quantized, stored, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    rank = Rank(plain, work=tmp_path)
    expected = reference_logits(plain, None, rank.spec, TOKENS)
    torch.testing.assert_close(_logits(quantized, tmp_path), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
    ],
    ids=["awq", "static activations"],
)
def test_other_ways_are_refused_by_name(tmp_path: Path, quantization: dict[str, object]) -> None:
    model = write_model(small_config("qwen3_moe"), tmp_path / "model")
    _rewrite(model, load_file(model / "model.safetensors"), quantization)
    with pytest.raises(InvalidArgumentError, match=f"quantized weights \\({quantization['quant_method']}") as caught:
        Rank(model, work=tmp_path)
    assert caught.value.reason == "UNSUPPORTED_CHECKPOINT"


def test_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = write_model(small_config("qwen3_moe"), tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    key = "model.layers.0.self_attn.q_proj.weight"
    tensors[key] = tensors[key].to(torch.float8_e4m3fn)
    tensors[f"{key}_scale_inv"] = torch.ones(3, 2)
    _rewrite(model, tensors, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]})
    with pytest.raises(InvalidArgumentError, match="expected \\[2, 2\\] for blocks") as caught:
        Rank(model, work=tmp_path)
    assert caught.value.reason == "WEIGHT_SHAPE_MISMATCH"


def test_experts_that_move_here_later_are_dequantized_too(tmp_path: Path) -> None:
    model = write_model(small_config("qwen3_moe"), tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    for key in [key for key in tensors if ".experts." in key]:
        tensors[key] = tensors[key].to(torch.float8_e4m3fn)
        tensors[f"{key}_scale_inv"] = torch.tensor([[0.5]])
    _rewrite(model, tensors, {"quant_method": "fp8", "weight_block_size": None})
    loaded = Rank(model, work=tmp_path, dtype="float32").runner._loaded
    name = "model.layers.1.mlp.experts.down_proj"
    weight = torch.empty(loaded.model.get_parameter(name).shape[1:])
    with loaded.reader.open() as fill:
        fill(name, 4, weight)
    assert torch.equal(weight, tensors["model.layers.1.mlp.experts.4.down_proj.weight"].float() * 0.5)
    assert torch.equal(weight, loaded.model.get_parameter(name)[4])
