"""What callers of ExpertService send, checked before any other rank is asked to join.

Legend: T tokens, K experts a token, D model width.
"""

from __future__ import annotations

import torch

from epilora.errors import InvalidArgumentError
from epilora.model_spec import MoELayerSpec

TopK = tuple[torch.Tensor, torch.Tensor]
"""(experts int [T, K], weights float [T, K]) chosen by a caller; logical ids."""


def check_experts_tensors(
    x_TD: torch.Tensor, topk: TopK | None, moe: MoELayerSpec, *, num_experts_per_token: int
) -> None:
    """Checks shapes and ids.

    Raises:
        InvalidArgumentError: a wrong shape, or expert ids out of range or repeated.
    """
    shape = tuple(x_TD.shape)
    if len(shape) != 2 or shape[1] != moe.hidden_size:
        raise bad_call("hidden_states", f"has shape {list(shape)}, expected [T, {moe.hidden_size}]")
    if topk is None:
        return
    expert_TK, weight_TK = topk
    expected = (shape[0], num_experts_per_token)
    if tuple(expert_TK.shape) != expected or tuple(weight_TK.shape) != expected:
        raise bad_call(
            "top_k",
            f"has expert_ids {list(expert_TK.shape)} and weights {list(weight_TK.shape)}, expected both"
            f" {list(expected)}",
        )
    if expert_TK.numel() and (int(expert_TK.min()) < 0 or int(expert_TK.max()) >= moe.num_experts):
        raise bad_call(
            "top_k.expert_ids",
            f"holds {int(expert_TK.min())} to {int(expert_TK.max())}, expected 0 to {moe.num_experts - 1}",
        )
    ordered = expert_TK.sort(dim=1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise bad_call("top_k.expert_ids", "names an expert twice for one token, expected distinct ids")


def bad_call(field: str, message: str) -> InvalidArgumentError:
    """What is wrong with a call's field."""
    return InvalidArgumentError(f"{field} {message}", reason="BAD_EXPERTS_CALL", field=field)
