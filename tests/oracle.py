"""PEFT itself as the oracle: logits and greedy continuations of a real checkpoint with a real adapter.

PEFT 0.21.2 is right for these files: `target_parameters` written by any 0.19.1 or newer, and
per-expert files in which every expert has all three projections with one lora_rank. It refuses
per-expert files with mixed ranks, and reads those with missing projections as something else without a word
(its conversion to fused parameters assumes both halves of gate and up); for those, use logits recorded by their writer.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch


class Oracle:
    """A checkpoint, alone or with one adapter, in fp32 with transformers' eager experts.

    Args:
        model: directory of the checkpoint.
        adapter: directory of the adapter; None: the base model.
    """

    def __init__(self, model: Path, adapter: Path | None = None) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(model, experts_implementation="eager", dtype=torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._model = (base if adapter is None else PeftModel.from_pretrained(base, adapter)).eval()

    def adapt(self, config: Any, directory: Path) -> None:
        """Gives the base model an adapter whose weights are all drawn at random, and saves it.

        Args:
            config: a peft.LoraConfig.
            directory: where the adapter goes.
        """
        from peft import get_peft_model

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._model = get_peft_model(self._model, config).eval()
            with torch.no_grad():
                for name, parameter in self._model.named_parameters():
                    if "lora_magnitude_vector" in name:
                        parameter.mul_(1 + 0.5 * torch.rand_like(parameter))
                    elif "modules_to_save" in name:
                        parameter.add_(0.3 * torch.randn_like(parameter))
            self._model.save_pretrained(directory, save_embedding_layers=False)

    def submodule(self, path: str) -> torch.nn.Module:
        """A part of the model, by its path."""
        return self._model.get_submodule(path)

    @torch.no_grad()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """fp32 [len(token_ids), vocabulary]."""
        result: torch.Tensor = self._model(torch.tensor([token_ids]), use_cache=False).logits[0]
        return result

    def greedy(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """The most likely continuation, without a cache: nothing but full forward passes."""
        sequence = list(token_ids)
        for _ in range(num_tokens):
            sequence.append(int(self.logits(sequence)[-1].argmax()))
        return sequence[len(token_ids) :]
