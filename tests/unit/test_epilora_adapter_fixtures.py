"""Adapters that PEFT wrote, read by us and merged into the model, give the logits that PEFT recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from epilora.families import FAMILIES, Projection
from epilora.model_spec import ModelSpec
from tests.unit.epilora_adapters import AdapterArrays, resolve

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

FIXTURES = Path(__file__).parent.parent / "fixtures"
ADAPTERS = sorted(path for path in FIXTURES.glob("adapters/*/*") if path.is_dir())
SUPPORTED = {"qwen3moe-T", "qwen2moe-T", "mixtral-T"}


def _cases() -> list[object]:
    return [
        pytest.param(path, id=f"{path.parent.name}/{path.name}")
        for path in ADAPTERS
        if path.name.split("-T-")[0] + "-T" in SUPPORTED
    ]


def test_there_are_fixtures_of_every_writer() -> None:
    assert len(_cases()) == 9 + 5 * 10


@pytest.mark.parametrize("adapter", _cases())
def test_merged_normal_form_gives_the_recorded_logits(adapter: Path) -> None:
    directory = FIXTURES / "models" / (adapter.name.split("-T-")[0] + "-T")
    spec = ModelSpec.from_directory(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager"
    )
    form = resolve(adapter, spec)
    assert form.ignored == ()
    arrays = AdapterArrays(adapter)
    modules = dict(model.named_modules())
    inner = {layer.layer: layer.intermediate_size for layer in spec.moe_layers}
    paths = {layer.layer: layer.module for layer in spec.moe_layers}
    with torch.no_grad():
        for module, pair in form.dense.items():
            modules[module].weight += torch.from_numpy(arrays.delta(pair)).float()
        for (layer, projection), by_expert in form.experts.items():
            experts = modules[paths[layer]]
            rows = {
                Projection.GATE_UP: slice(None),
                Projection.GATE: slice(0, inner[layer]),
                Projection.UP: slice(inner[layer], None),
                Projection.DOWN: slice(None),
            }[projection]
            weight = experts.down_proj if projection is Projection.DOWN else experts.gate_up_proj
            for expert, pair in by_expert.items():
                weight[expert, rows] += torch.from_numpy(arrays.delta(pair)).float()
        expected = load_file(adapter / "expected.safetensors")
        logits = model(expected["input_ids"]).logits
    base = load_file(directory / "expected.safetensors")["logits"]
    torch.testing.assert_close(logits, expected["logits"], atol=1e-4, rtol=1e-4)
    assert (expected["logits"] - base).abs().max() > 1e-3, "the adapter changes nothing: the test would prove nothing"


def test_families_of_fixtures_are_in_the_table() -> None:
    assert {ModelSpec.from_directory(FIXTURES / "models" / name).model_type for name in SUPPORTED} <= set(FAMILIES)
