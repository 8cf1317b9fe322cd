"""A loader that is killed at any moment leaves nothing that is torn, and nothing for ever."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.unit.epilora_adapters import write_adapter
from tests.unit.epilora_models import model_spec

ROOT = Path(__file__).resolve().parents[2]


def write_inputs(directory: Path) -> None:
    """A model and a small adapter for it, as killed_steps wants them."""
    model_spec(directory / "model", num_experts=4)
    rng = np.random.default_rng(0)
    tensors = {}
    for expert in range(4):
        module = f"base_model.model.model.layers.0.mlp.experts.{expert}.up_proj"
        tensors[f"{module}.lora_A.weight"] = rng.random((3, 8), dtype=np.float32)
        tensors[f"{module}.lora_B.weight"] = rng.random((6, 3), dtype=np.float32)
    write_adapter(directory / "adapters" / "a", tensors)


def test_sigkill_before_each_change_of_the_cache(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    command = [sys.executable, "-m", "tests.loader.killed_steps", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=120)
    steps = [json.loads(line) for line in result.stdout.splitlines() if line.startswith(b"{")]
    names = [step["name"] for step in steps]
    for kind, at_least in (("os.mkdir", 1), ("open", 4), ("pwrite", 2), ("os.rename", 2), ("os.remove", 2)):
        assert sum(name.startswith(kind) for name in names) >= at_least, (kind, names)
    assert any(len(step["left"]) > 1 for step in steps), "some kills leave something behind"
    for step in steps:
        assert step["killed"], step
        assert step["torn"] == [], step
        assert step["status"] == 0, step
        assert step["after"]["found"] == [".lock"], step
        assert step["after"]["digests"] == steps[0]["after"]["digests"], step
