"""Llama 4's MoE block, which calls no experts function: the same sums, with the routed part done by an ExpertLayer.

T tokens, E experts, D model width.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from compute_worker.expert_layer import ExpertsOfLayer
from compute_worker.experts_modules import experts_modules
from epilora.errors import InvalidArgumentError


def replace_blocks(model: nn.Module) -> None:
    """Makes the blocks of experts that scale their input call `epilora_layer` of their experts module.

    Raises:
        InvalidArgumentError: reason UNSUPPORTED_MODEL; such a block that chooses more than one expert a token.
    """
    for path, _, traits in list(experts_modules(model)):
        if not traits.scales_input:
            continue
        block = model.get_submodule(path.rpartition(".")[0])
        if block.top_k != 1:
            raise InvalidArgumentError(
                f"{path}: {block.top_k} experts a token, each with an input of its own scale; only 1 can be served",
                reason="UNSUPPORTED_MODEL",
            )
        block.forward = partial(_forward, block)


def _forward(block: nn.Module, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The block's output and the router's logits. The weight of the chosen expert is the only one above zero."""
    x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
    score_TE, logits_TE = block.router(x_TD)  # type: ignore[operator]
    weight_T1, expert_T1 = score_TE.max(dim=1, keepdim=True)
    layer: ExpertsOfLayer = block.experts.epilora_layer  # type: ignore[union-attr, assignment]
    routed_TD = layer.forward(x_TD, expert_T1, weight_T1)
    return block.shared_expert(x_TD) + routed_TD, logits_TE  # type: ignore[operator]
