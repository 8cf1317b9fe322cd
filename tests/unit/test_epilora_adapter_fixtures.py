"""Adapters that PEFT wrote, read by us and merged into the model, give the logits that PEFT recorded or computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402

from tests.unit.epilora_merge import load_model, merged_model  # noqa: E402

FIXTURES = Path(__file__).parent.parent / "fixtures"
SUPPORTED = ("qwen3moe-T", "qwen2moe-T", "mixtral-T")


def _model_of(adapter: Path) -> Path:
    return FIXTURES / "models" / f"{adapter.name.split('-T-')[0]}-T"


CASES = [
    pytest.param(path, id=f"{path.parent.name}/{path.name}")
    for path in sorted(FIXTURES.glob("adapters/*/*"))
    if path.is_dir() and _model_of(path).name in SUPPORTED
]


def test_there_are_fixtures_of_every_writer() -> None:
    assert len(CASES) == 9 + 5 * 10


@pytest.mark.parametrize("adapter", CASES)
def test_merged_normal_form_gives_the_recorded_logits(adapter: Path) -> None:
    model, form = merged_model(_model_of(adapter), adapter)
    expected = load_file(adapter / "expected.safetensors")
    base = load_file(_model_of(adapter) / "expected.safetensors")["logits"]
    with torch.no_grad():
        logits = model(expected["input_ids"]).logits
    assert form.ignored == ()
    torch.testing.assert_close(logits, expected["logits"], atol=1e-4, rtol=1e-4)
    assert (expected["logits"] - base).abs().max() > 1e-3, "the adapter changes nothing: the test would prove nothing"


# What today's PEFT writes for routers and shared experts, which the recorded adapters do not have.
LIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "router": ("qwen3moe-T", {"target_parameters": ["mlp.gate.weight"]}),
    "router, experts and attention": (
        "qwen3moe-T",
        {
            "target_parameters": ["mlp.gate.weight", "mlp.experts.down_proj", "mlp.experts.gate_up_proj"],
            "target_modules": ["q_proj", "v_proj"],
            "rank_pattern": {"gate.weight": 2, "experts.gate_up_proj": 5},
            "alpha_pattern": {"mlp.gate.weight": 9, r".*layers\.1\..*down_proj": 11},
            "use_rslora": True,
        },
    ),
    "shared expert and its gate": (
        "qwen2moe-T",
        {
            "target_modules": ["shared_expert.gate_proj", "shared_expert.down_proj", "shared_expert_gate", "k_proj"],
            "target_parameters": ["experts.down_proj"],
        },
    ),
    "embedding, lm_head and attention": ("qwen3moe-T", {"target_modules": ["embed_tokens", "lm_head", "v_proj"]}),
    "one layer by its full name": ("mixtral-T", {"target_parameters": ["model.layers.1.mlp.experts.gate_up_proj"]}),
}


@pytest.mark.parametrize("kind", LIVE)
def test_merged_normal_form_gives_the_logits_of_peft_here(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    name, options = LIVE[kind]
    directory = FIXTURES / "models" / name
    torch.manual_seed(7)
    # init_lora_weights=False: B is random, as if it had been trained.
    config = peft.LoraConfig(**{"r": 3, "lora_alpha": 6, "target_modules": [], "init_lora_weights": False, **options})
    model = peft.get_peft_model(load_model(directory), config)
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    merged, form = merged_model(directory, tmp_path)
    input_ids = torch.randint(0, 64, (2, 9))
    with torch.no_grad():
        expected = model.eval()(input_ids).logits
        torch.testing.assert_close(merged.eval()(input_ids).logits, expected, atol=1e-4, rtol=1e-4)
        with model.disable_adapter():
            assert (model(input_ids).logits - expected).abs().max() > 1e-3
    assert not form.rank_differences
