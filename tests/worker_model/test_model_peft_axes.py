"""Which axis of a stacked parameter PEFT takes for what: the table of families against transformers and PEFT."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel
from worker_model_families import CONFIGS, MULTIMODAL, family_config
from worker_model_files import write_adapter_slice
from worker_model_support import Prompt, Rank, prompt_tokens, reference_model, write_model

from compute_worker.experts_modules import ExpertsTraits, experts_modules
from epilora.families import FAMILIES, StackedAxes, family_of

peft = pytest.importorskip("peft")

_SIZED: dict[str, Any] = {"num_experts": 5, "moe_intermediate_size": 20, "head_dim": 8}


def _experts_of(model_type: str) -> tuple[nn.Module, ExpertsTraits]:
    """The first experts module of a family, without memory."""
    if model_type in MULTIMODAL:
        text, vision = MULTIMODAL[model_type]
        config = AutoConfig.for_model(model_type, text_config=text, vision_config=vision).get_text_config()
    else:
        config = family_config(model_type, CONFIGS.get(model_type, _SIZED))
    with torch.device("meta"):
        _, module, traits = next(experts_modules(AutoModel.from_config(config)))
    return module, traits


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_table_says_what_peft_reads_from_the_module(model_type: str) -> None:
    module, traits = _experts_of(model_type)
    family = family_of(model_type, traits.layout)
    marked = getattr(module, "is_transposed", False)
    expected = {
        (False, False): StackedAxes.OUT_IN,
        (True, True): StackedAxes.IN_OUT,
        (True, False): StackedAxes.IN_OUT_UNMARKED,
    }[traits.is_transposed, marked]
    assert family.stacked_axes in (expected, None)
    if family.stacked_axes is None:
        # Then the newest releases are taken to write what PEFT makes of a module that says how it stores.
        assert expected is not StackedAxes.IN_OUT_UNMARKED
    declared = [name for name, _ in module.named_parameters() if name in family.stacked_parameters]
    assert declared == list(family.stacked_parameters)


def _served_and_expected(model: Path, work: Path, parameters: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a prompt with an adapter that PEFT wrote: ours, and PEFT's own."""
    config = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=[], target_parameters=parameters, init_lora_weights=False
    )
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(reference_model(model), config).eval()
    adapted.save_pretrained(work / "adapter")
    tokens = prompt_tokens(2, 11)
    with torch.no_grad():
        expected = adapted(input_ids=torch.tensor([tokens])).logits[0]
    rank = Rank(model, work=work)
    rank.stage(write_adapter_slice(work / "adapter", rank.spec, rank.load_spec, work / "slice"), generation=1)
    rank.runner.pool.activate(1, 0)
    with_adapter, without = rank.prefill([Prompt(tokens=tokens, slot=0), Prompt(tokens=tokens)])
    assert (without - expected).abs().max() > 1e-2, "the adapter changes nothing: the test would prove nothing"
    return with_adapter, expected


@pytest.mark.parametrize(
    ("model_type", "inner", "parameters"),
    [
        ("llama4_text", 32, ["feed_forward.experts.down_proj"]),
        ("llama4_text", 16, ["feed_forward.experts.gate_up_proj"]),
        ("gpt_oss", 32, ["mlp.experts.down_proj"]),
    ],
)
def test_square_parameters_are_served_as_peft_trained_them(
    tmp_path: Path, model_type: str, inner: int, parameters: list[str]
) -> None:
    """Shapes do not say which axis is which: what today's PEFT writes for the family has to be known."""
    options = {**CONFIGS[model_type], "intermediate_size": inner}
    model = write_model(family_config(model_type, options), tmp_path / "model")
    served, expected = _served_and_expected(model, tmp_path, parameters)
    torch.testing.assert_close(served, expected, atol=1e-4, rtol=1e-4)


def test_square_experts_without_a_gate_are_told_apart_by_the_order_of_wrapping(tmp_path: Path) -> None:
    """Nemotron-H with as many rows as columns: both parameters have one shape, and PEFT wraps up_proj first."""
    options = {**CONFIGS["nemotron_h"], "moe_latent_size": 16, "moe_intermediate_size": 16}
    model = write_model(family_config("nemotron_h", options), tmp_path / "model")
    # In the other order than PEFT wraps them.
    served, expected = _served_and_expected(model, tmp_path, ["mixer.experts.down_proj", "mixer.experts.up_proj"])
    torch.testing.assert_close(served, expected, atol=1e-4, rtol=1e-4)
