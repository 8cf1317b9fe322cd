"""Whether a config leaves a module out: as PEFT's own function says, for every kind of entry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists

from epilora.adapters.targets import TargetModules
from tests.unit.epilora_adapters import resolve, write_adapter
from tests.unit.epilora_models import model_spec

MODULES = [
    *(
        f"model.layers.{layer}.self_attn.{name}"
        for layer in (0, 1, 10)
        for name in ("q_proj", "o_proj", "qkv_proj", "my_q_proj")
    ),
    "model.language_model.layers.3.mlp.shared_expert.up_proj",
    "vision.blocks.2.attn.q_proj",
    "lm_head",
    "q_proj",
]
CONFIGS: dict[str, dict[str, Any]] = {
    "ends": {"target_modules": ["q_proj", "shared_expert.up_proj"]},
    "whole names": {"target_modules": ["model.layers.1.self_attn.o_proj", "lm_head"]},
    "expression": {"target_modules": r".*layers\.1\d?\..*(q_proj|o_proj)"},
    "excluded": {"target_modules": ["q_proj", "o_proj"], "exclude_modules": ["layers.1.self_attn.q_proj", "o_proj"]},
    "excluded by expression": {"target_modules": ["q_proj"], "exclude_modules": r"model\.layers\.0\..*"},
    "layers": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 3]},
    "one layer": {"target_modules": ["q_proj"], "layers_to_transform": 10},
    "layers of a list": {"target_modules": ["q_proj"], "layers_to_transform": [2], "layers_pattern": "blocks"},
    "layers of lists": {
        "target_modules": ["q_proj"],
        "layers_to_transform": [1, 2],
        "layers_pattern": ["blocks", "layers"],
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_as_peft_says(name: str) -> None:
    values = CONFIGS[name]
    config, targets = LoraConfig(**values), TargetModules.of(values)
    ours = [not targets.leaves_out(module) for module in MODULES]
    assert ours == [bool(check_target_module_exists(config, module)) for module in MODULES]
    assert len(set(ours)) == 2


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"target_modules": "all-linear"},
        {"target_modules": "((((a+)+)+)+)+"},
        {"target_modules": {"a": 1}, "layers_to_transform": ["0"], "exclude_modules": 5},
        {"target_modules": [], "layers_to_transform": [], "layers_pattern": "("},
    ],
)
def test_what_is_not_understood_leaves_nothing_out(values: dict[str, Any]) -> None:
    targets = TargetModules.of(values)
    assert not any(targets.leaves_out(module) for module in MODULES)


def test_a_file_that_says_otherwise_is_reported(tmp_path: Path) -> None:
    """The pair counts, as always; its trainer may not have had it."""
    model = model_spec(tmp_path / "model")
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{side}.weight": np.ones(
            (3, 8) if side == "A" else (8, 3), np.float32
        )
        for layer in (0, 1)
        for name in ("q_proj", "o_proj")
        for side in "AB"
    }
    options = {"target_modules": ["q_proj", "o_proj"]}
    path = write_adapter(tmp_path / "a", tensors, **options)
    assert not resolve(path, model).warnings
    path = write_adapter(tmp_path / "b", tensors, **options, exclude_modules=["o_proj"], layers_to_transform=[0])
    form = resolve(path, model)
    assert len(form.dense) == 4
    [warning] = form.warnings
    assert "exclude_modules, layers_to_transform of adapter_config.json leaves out 3 modules" in warning
    assert "model.layers.1.self_attn.q_proj" in warning
