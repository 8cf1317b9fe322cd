"""Llama 4's MoE block, which calls no experts function: the same sums, with the routed part done by an ExpertLayer.

T tokens, E experts, K experts a token, D model width.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from compute_worker.expert_layer import ExpertsOfLayer
from compute_worker.experts_modules import experts_modules


def replace_blocks(model: nn.Module) -> None:
    """Makes the blocks of experts that scale their input call `epilora_layer` of their experts module."""
    for path, _, traits in list(experts_modules(model)):
        if traits.scales_input:
            block = model.get_submodule(path.rpartition(".")[0])
            block.forward = partial(_forward, block)


def _forward(block: nn.Module, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The block's output and the router's logits. Only the chosen experts have a weight above zero."""
    x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
    score_TE, logits_TE = block.router(x_TD)  # type: ignore[operator]
    weight_TK, expert_TK = score_TE.topk(int(block.top_k), dim=1)  # type: ignore[arg-type]
    layer: ExpertsOfLayer = block.experts.epilora_layer  # type: ignore[union-attr, assignment]
    routed_TD = layer.forward(x_TD, expert_TK, weight_TK)
    return block.shared_expert(x_TD) + routed_TD, logits_TE  # type: ignore[operator]
