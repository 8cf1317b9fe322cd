"""What today's PEFT writes for each family, read and run by us, gives PEFT's own logits."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from worker_model_families import CONFIGS, family_config, parameters, write_multimodal
from worker_model_files import write_adapter_slice
from worker_model_support import Prompt, Rank, prompt_tokens, reference_model, write_model

from compute_worker.experts_modules import ExpertsTraits
from compute_worker.model_description import load_spec_of_model

peft = pytest.importorskip("peft")


_RECURRENT_MODULES = {
    "qwen3_next": ("in_proj_qkvz", "in_proj_ba", "out_proj"),
    "qwen3_5_moe_text": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    # PEFT itself refuses out_proj and conv1d of this family.
    "nemotron_h": ("in_proj",),
    "jamba": ("in_proj", "x_proj", "out_proj"),
    "granitemoehybrid": ("in_proj", "out_proj"),
    "lfm2_moe": ("in_proj", "out_proj"),
    "kimi_linear": ("q_proj", "b_proj", "g_a_proj"),
}
"""Linear maps of layers that keep a recurrent state."""


@pytest.mark.parametrize("name", parameters(CONFIGS))
def test_logits_equal_pefts(tmp_path: Path, name: str) -> None:
    model = write_model(family_config(name, CONFIGS[name]), tmp_path / "model")
    spec = load_spec_of_model(model)
    base = reference_model(model)
    moe = spec.moe_layers[0]
    traits = ExpertsTraits.of(base.get_submodule(moe.module))
    assert traits is not None
    experts = moe.module.split(f"layers.{moe.layer}.")[1]
    config = peft.LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=["o_proj", *_RECURRENT_MODULES.get(name, ())],
        target_parameters=[f"{experts}.{traits.first_name}", f"{experts}.down_proj"],
        init_lora_weights=False,
    )
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(base, config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    tokens = prompt_tokens(2, 11)
    with torch.no_grad():
        expected = adapted(input_ids=torch.tensor([tokens])).logits[0]
    rank = Rank(model, work=tmp_path)
    rank.stage(write_adapter_slice(tmp_path / "adapter", spec, rank.load_spec, tmp_path / "slice"), generation=1)
    rank.runner.pool.activate(1, 0)
    with_adapter, without = rank.prefill([Prompt(tokens=tokens, slot=0), Prompt(tokens=tokens)])
    torch.testing.assert_close(with_adapter, expected, atol=1e-4, rtol=1e-4)
    assert (without - expected).abs().max() > 1e-2, "the adapter changes nothing: the test would prove nothing"


def test_an_adapter_of_a_whole_multimodal_model_serves_text(tmp_path: Path) -> None:
    """Its keys go through the language model inside; the vision part is not touched."""
    whole = write_multimodal("qwen3_vl_moe", tmp_path / "model")
    config = peft.LoraConfig(
        r=3,
        target_modules=r".*language_model.*\.(q_proj|o_proj)",
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
    )
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(whole, config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    tokens = prompt_tokens(2, 11)
    with torch.no_grad():
        expected = adapted(input_ids=torch.tensor([tokens])).logits[0]
    rank = Rank(tmp_path / "model", work=tmp_path)
    rank.stage(write_adapter_slice(tmp_path / "adapter", rank.spec, rank.load_spec, tmp_path / "slice"), generation=1)
    rank.runner.pool.activate(1, 0)
    with_adapter, without = rank.prefill([Prompt(tokens=tokens, slot=0), Prompt(tokens=tokens)])
    torch.testing.assert_close(with_adapter, expected, atol=1e-4, rtol=1e-4)
    assert (without - expected).abs().max() > 1e-2, "the adapter changes nothing: the test would prove nothing"
