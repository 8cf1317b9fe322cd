"""Llama 4's layers without rotary positions scale a query by a factor that grows with its position.

transformers' code takes a token's number in the batch for its position, which is right for one whole sequence only.
Here its scaling is switched off, and done where the queries reach our attention, with the positions of the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from compute_worker.paged_attention import AttentionForward, LayerInput


class QueryScales:
    """Follows the positions of the step under way."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Switches the model's own scaling off."""
        self._modules = {
            module: (float(module.floor_scale), float(module.attn_scale))
            for module in model.modules()
            if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True)
        }
        self._position_T: torch.Tensor | None = None
        for module in self._modules:
            module.attn_temperature_tuning = False
        if self._modules:
            model.register_forward_pre_hook(self._note_positions, with_kwargs=True)

    def _note_positions(self, _module: nn.Module, _given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._position_T = named["position_ids"][0]

    def scaled(self, module: nn.Module, forward: AttentionForward) -> AttentionForward:
        """The attention of a module, behind its scaling; `forward` itself for modules that do not scale."""
        if module not in self._modules:
            return forward
        floor_scale, attn_scale = self._modules[module]

        def scaled_forward(given: LayerInput, others: Mapping[str, object]) -> torch.Tensor:
            position_T = self._position_T
            assert position_T is not None, "attention before the model was given positions"
            step_T = torch.floor((position_T.float() + 1.0) / floor_scale)
            scale_T1 = (torch.log1p(step_T) * attn_scale + 1.0).unsqueeze(1)
            return forward(dataclasses.replace(given, q=(given.q * scale_T1).to(given.q.dtype)), others)

        return scaled_forward
