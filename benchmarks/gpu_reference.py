"""Reference answers for `gpu_service.py`: transformers' own model, with an adapter's deltas merged into its weights.

The random weights are drawn as the workers draw them, name by name; everything else (experts, attention, routing) is
transformers' code in one process, without dispatch, cache, or LoRA products.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from compute_worker.checkpoint import random_dense
from compute_worker.checkpoint_experts import random_expert


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """How a generated continuation compares with the reference's logits at each of its positions.

    Attributes:
        num_tokens: tokens compared.
        num_equal: tokens that are the reference's most likely one.
        worst_gap: largest difference between the reference's largest logit and that of the token chosen.
        logit_std: standard deviation of the reference's logits, to read the gap against.
    """

    num_tokens: int
    num_equal: int
    worst_gap: float
    logit_std: float


class Reference:
    """A model directory with random weights, on one GPU, with at most one adapter merged."""

    def __init__(self, model: Path) -> None:
        config = AutoConfig.from_pretrained(model)
        with torch.device("meta"):
            self._model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, experts_implementation="grouped_mm", attn_implementation="sdpa", dtype=torch.bfloat16
            )
        self._model.to_empty(device="cuda")
        for module in self._model.modules():
            if module._buffers:
                self._model._init_weights(module)
        self._model.requires_grad_(False).eval()
        self.reset()

    def reset(self) -> None:
        """Draws all weights anew: no adapter."""
        for name, parameter in self._model.named_parameters():
            if parameter.dim() < 3:
                random_dense({name}, parameter)
                continue
            for expert in range(parameter.shape[0]):
                random_expert(name, expert, parameter[expert])

    def merge(self, adapter: Path) -> None:
        """Adds an adapter's deltas, in fp32, to the weights."""
        config = json.loads((adapter / "adapter_config.json").read_text())
        scale = config["lora_alpha"] / config["r"]
        with safe_open(adapter / "adapter_model.safetensors", "pt", device="cuda") as file:
            keys = list(file.keys())
            for a_key in (key for key in keys if key.endswith("lora_A.weight")):
                b_key = a_key.replace("lora_A", "lora_B")
                module = a_key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                self._merge_pair(module, file.get_tensor(a_key).float(), file.get_tensor(b_key).float() * scale)

    def _merge_pair(self, module: str, a: torch.Tensor, b: torch.Tensor) -> None:
        parts = module.split(".")
        if "experts" not in parts:
            _add(self._model.get_submodule(module).weight, b @ a)
            return
        experts = self._model.get_submodule(module[: module.index("experts") + len("experts")])
        num_experts = experts.num_experts
        if parts[-1] in ("experts", "base_layer"):
            weight = experts.down_proj if parts[-1] == "experts" else experts.gate_up_proj
            a_ERI = a.view(num_experts, -1, a.shape[1])
            b_ORE = b.view(b.shape[0], -1, num_experts)
            for expert in range(num_experts):
                _add(weight[expert], b_ORE[:, :, expert] @ a_ERI[expert])
            return
        expert, name = int(parts[-2]), parts[-1]
        if name == "down_proj":
            _add(experts.down_proj[expert], b @ a)
        else:
            gate, up = experts.gate_up_proj[expert].chunk(2)
            _add(gate if name == "gate_proj" else up, b @ a)

    @torch.inference_mode()
    def compare(self, prompt: list[int], continuation: list[int]) -> Agreement:
        """One forward pass over prompt and continuation; each token is judged after the true ones before it."""
        ids = torch.tensor([prompt + continuation[:-1]], device="cuda")
        logits_TV = self._model(ids, use_cache=False).logits[0, len(prompt) - 1 :].float()
        chosen_T = torch.tensor(continuation, device="cuda")
        gap_T = logits_TV.max(dim=-1).values - logits_TV.gather(1, chosen_T[:, None])[:, 0]
        return Agreement(
            num_tokens=len(continuation),
            num_equal=int((logits_TV.argmax(dim=-1) == chosen_T).sum()),
            worst_gap=float(gap_T.max()),
            logit_std=float(logits_TV.std()),
        )


def _add(weight: torch.Tensor, delta: torch.Tensor) -> None:
    weight.copy_(weight.float() + delta)
