"""`epilora convert` against PEFT: what is written gives PEFT the logits of the original, without a missing tensor."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForImageTextToText
from worker_model_families import CONFIGS, family_config, write_multimodal
from worker_model_support import prompt_tokens, reference_model, write_model

from compute_worker.model_description import load_spec_of_model
from epilora.adapters.convert import ConvertedLayout, convert_adapter
from epilora.adapters.open_adapter import open_adapter
from epilora.errors import AbortedError, InvalidArgumentError

peft = pytest.importorskip("peft")

_TOKENS = prompt_tokens(2, 11)
_QWEN3: dict[str, Any] = {"num_experts": 5, "moe_intermediate_size": 20, "head_dim": 8}


def _logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([_TOKENS])).logits[0]
    return logits


def _trained(base: nn.Module, out: Path, **options: Any) -> torch.Tensor:
    """Writes an adapter by PEFT, and gives PEFT's logits with it."""
    torch.manual_seed(5)
    config = peft.LoraConfig(**{"r": 3, "lora_alpha": 6, "init_lora_weights": False, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(base, config).eval()
    adapted.save_pretrained(out)
    return _logits(adapted)


def _read_by_peft(base: nn.Module, adapter: Path) -> torch.Tensor:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapted = peft.PeftModel.from_pretrained(base, adapter).eval()
    assert [str(each.message) for each in caught if "missing" in str(each.message)] == []
    return _logits(adapted)


def _convert(adapter: Path, model: Path, out: Path, layout: ConvertedLayout = ConvertedLayout.FUSED) -> None:
    spec = load_spec_of_model(model)
    with open_adapter(adapter) as opened:
        convert_adapter(opened, spec, out, layout)
    with open_adapter(out) as opened:
        assert opened.resolve(spec).warnings == (), "its own output is not what it reads"


_EXPERTS = "mlp.experts"
_LLAMA4 = {**CONFIGS["llama4_text"], "intermediate_size": 32}
_FUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama4": (
        "llama4_text",
        CONFIGS["llama4_text"],
        {"target_parameters": ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"]},
    ),
    "llama4, square": ("llama4_text", _LLAMA4, {"target_parameters": ["feed_forward.experts.down_proj"]}),
    "layers that adapt different parameters": (
        "qwen3_moe",
        _QWEN3,
        {
            "target_parameters": [
                f"layers.0.{_EXPERTS}.gate_up_proj",
                f"layers.1.{_EXPERTS}.down_proj",
                f"layers.2.{_EXPERTS}.gate_up_proj",
                f"layers.2.{_EXPERTS}.down_proj",
            ]
        },
    ),
    "alpha 0 for one parameter": (
        "qwen3_moe",
        _QWEN3,
        {
            "target_parameters": [f"{_EXPERTS}.gate_up_proj", f"{_EXPERTS}.down_proj"],
            "lora_alpha": 0,
            "alpha_pattern": {"down_proj": 4},
        },
    ),
    "a router that is no linear map": (
        "gpt_oss",
        CONFIGS["gpt_oss"],
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.router.weight", f"{_EXPERTS}.down_proj"]},
    ),
}


@pytest.mark.parametrize("case", _FUSED)
def test_fused_adapters_mean_the_same_to_peft(tmp_path: Path, case: str) -> None:
    model_type, options, lora = _FUSED[case]
    model = write_model(family_config(model_type, options), tmp_path / "model")
    expected = _trained(reference_model(model), tmp_path / "a", **{"target_modules": [], **lora})
    _convert(tmp_path / "a", model, tmp_path / "out")
    got = _read_by_peft(reference_model(model), tmp_path / "out")
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert (got - _logits(reference_model(model))).abs().max() > 1e-2


def test_a_multimodal_models_adapter_stays_one(tmp_path: Path) -> None:
    """PEFT ignores tensors without the path of the text model in the whole one."""
    model = tmp_path / "model"
    whole = write_multimodal("qwen3_vl_moe", model)
    read: Callable[[], nn.Module] = lambda: AutoModelForImageTextToText.from_pretrained(  # noqa: E731
        model, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    expected = _trained(
        whole,
        tmp_path / "a",
        target_modules=r".*language_model.*\.(q_proj|o_proj)",
        target_parameters=[f"{_EXPERTS}.gate_up_proj", f"{_EXPERTS}.down_proj"],
    )
    _convert(tmp_path / "a", model, tmp_path / "out")
    torch.testing.assert_close(_read_by_peft(read(), tmp_path / "out"), expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(InvalidArgumentError, match="use --layout fused"):
        _convert(tmp_path / "a", model, tmp_path / "single", ConvertedLayout.PER_EXPERT)


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("minimax_m2", "model.layers.0.block_sparse_moe.experts.0.w1"),
        ("phimoe", "model.layers.0.block_sparse_moe.experts.0.w1"),
        ("nemotron_h", "backbone.layers.1.mixer.experts.0.up_proj"),
        ("jamba", "model.layers.1.feed_forward.experts.0.gate_proj"),
        ("lfm2_moe", "model.layers.1.feed_forward.experts.0.w1"),
        ("granitemoe", ""),
        ("gpt_oss", ""),
        ("llama4_text", ""),
        ("gemma4_text", ""),
    ],
)
def test_single_experts_have_the_names_of_released_checkpoints(tmp_path: Path, model_type: str, expected: str) -> None:
    """Or, where every checkpoint holds stacked experts, there is nobody to write them for."""
    model = write_model(family_config(model_type, CONFIGS[model_type]), tmp_path / "model")
    moe = load_spec_of_model(model).moe_layers[0]
    experts = moe.module.split(f"layers.{moe.layer}.")[1]
    first = "up_proj" if model_type == "nemotron_h" else "gate_up_proj"
    _trained(
        reference_model(model),
        tmp_path / "a",
        target_modules=[],
        target_parameters=[f"{experts}.{first}", f"{experts}.down_proj"],
    )
    if not expected:
        with pytest.raises(InvalidArgumentError, match="use --layout fused") as refused:
            _convert(tmp_path / "a", model, tmp_path / "out", ConvertedLayout.PER_EXPERT)
        assert refused.value.reason == "UNSUPPORTED_ADAPTER"
        return
    _convert(tmp_path / "a", model, tmp_path / "out", ConvertedLayout.PER_EXPERT)
    with safe_open(tmp_path / "out" / "adapter_model.safetensors", "np") as file:
        names = list(file.keys())
    assert f"base_model.model.{expected}.lora_A.weight" in names
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == {name.split(".")[-3] for name in names}


def test_nothing_stays_of_a_conversion_that_failed(tmp_path: Path) -> None:
    model = write_model(family_config("qwen3_moe", _QWEN3), tmp_path / "model")
    _trained(reference_model(model), tmp_path / "a", target_modules=[], target_parameters=[f"{_EXPERTS}.down_proj"])
    weights = tmp_path / "a" / "adapter_model.safetensors"
    with open_adapter(tmp_path / "a") as opened:
        # The file becomes shorter after its header was read.
        with weights.open("r+b") as stream:
            stream.truncate(weights.stat().st_size - 4)
        with pytest.raises(AbortedError, match="was changed"):
            convert_adapter(opened, load_spec_of_model(model), tmp_path / "out", ConvertedLayout.FUSED)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "model"]
