"""What one would write first: every rank opens the file, takes what it needs and stacks it."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from epilora.load_spec import MoEEPLoadSpec

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


def save_rank(weights: Path, spec: MoEEPLoadSpec, layout: str, target: Path) -> None:
    """Writes one rank's tensors, stacked by expert."""
    save_file(_per_expert(weights, spec) if layout == "per_expert" else _stacked(weights, spec), target)


def _per_expert(weights: Path, spec: MoEEPLoadSpec) -> dict[str, torch.Tensor]:
    local = set(spec.layers[0].local_experts)
    found: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    tensors = {}
    with safe_open(weights, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  # not a dict
            match = _EXPERT.fullmatch(name)
            if match is None:
                tensors[name] = file.get_tensor(name)
            elif int(match[2]) in local:
                found[f"{match[1]}.{match[3]}"][int(match[2])] = file.get_tensor(name)
    return tensors | {name: torch.stack([experts[e] for e in sorted(experts)]) for name, experts in found.items()}


def _stacked(weights: Path, spec: MoEEPLoadSpec) -> dict[str, torch.Tensor]:
    experts = list(spec.layers[0].local_experts)
    num_experts = spec.layers[0].moe.num_experts
    tensors = {}
    with safe_open(weights, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  # not a dict
            tensor = file.get_tensor(name)
            if ".experts." in name and "lora_A" in name:
                tensor = tensor.view(num_experts, -1, tensor.shape[1])[experts]
            elif ".experts." in name:
                tensor = tensor.view(tensor.shape[0], -1, num_experts).permute(2, 0, 1)[experts].contiguous()
            tensors[name] = tensor
    return tensors
