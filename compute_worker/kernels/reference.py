"""The expert layer as plain fp32 torch: a loop over experts and adapters. Slow, obvious, the oracle of every test."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from compute_worker.kernels.adapter_table import LayerAdapter, ProjectionSlice
from compute_worker.kernels.layout import Activation, MoEWeights


def expert_pair(piece: ProjectionSlice, expert: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """fp32 (A [r, in], B [out, r], scale) of one local expert; r is 0 where it has no pair."""
    first, rank = int(piece.lora_rank[:expert].sum()), int(piece.lora_rank[expert])
    total = int(piece.lora_rank.sum())
    out_size = piece.b.numel() // max(total, 1)
    a = piece.a[first : first + rank].float()
    b = piece.b[out_size * first : out_size * (first + rank)].view(out_size, rank).float()
    return a, b, float(piece.scale[expert])


def lora_delta(x_MI: torch.Tensor, piece: ProjectionSlice | None, expert: int) -> torch.Tensor | float:
    """scale * (x @ A.T) @ B.T in fp32, or 0.0 where the adapter has no pair there."""
    if piece is None or int(piece.lora_rank[expert]) == 0:
        return 0.0
    a, b, scale = expert_pair(piece, expert)
    return scale * ((x_MI.float() @ a.T) @ b.T)


def activate(
    gate_MF: torch.Tensor, up_MF: torch.Tensor, activation: Activation, *, alpha: float, limit: float
) -> torch.Tensor:
    """The activation in fp32; activations without a gate ignore gate_MF. alpha, limit: see MoEWeights."""
    if activation == Activation.SILU_GATED:
        return F.silu(gate_MF) * up_MF
    if activation == Activation.CLAMPED_SWIGLU:
        gate = gate_MF.clamp(max=limit)
        up = up_MF.clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(alpha * gate)
    return F.silu(up_MF) if activation == Activation.SILU else F.relu(up_MF).square()


def _split(gate_up: torch.Tensor, weights: MoEWeights) -> tuple[torch.Tensor, torch.Tensor]:
    if not weights.activation.gated:
        return gate_up, gate_up
    if weights.interleaved:
        return gate_up[:, 0::2], gate_up[:, 1::2]
    f = weights.intermediate_size
    return gate_up[:, :f], gate_up[:, f:]


def _expert_rows(
    x_MD: torch.Tensor, slot_M: torch.Tensor, expert: int, weights: MoEWeights, adapters: Mapping[int, LayerAdapter]
) -> torch.Tensor:
    """y [M, D] fp32 of rows that all chose one local expert."""
    gate_up = x_MD.float() @ weights.gate_up_eND[expert].float().T
    if weights.gate_up_bias_eN is not None:
        gate_up = gate_up + weights.gate_up_bias_eN[expert].float()
    present = [(int(s), slot_M == s) for s in set(slot_M.tolist()) if int(s) in adapters]
    for slot, mask in present:
        gate_up[mask] += lora_delta(x_MD[mask], adapters[slot].get("gate_up"), expert)
    gate, up = (part.clone() for part in _split(gate_up, weights))
    for slot, mask in present:
        gate[mask] += lora_delta(x_MD[mask], adapters[slot].get("gate"), expert)
        up[mask] += lora_delta(x_MD[mask], adapters[slot].get("up"), expert)
    act = activate(gate, up, weights.activation, alpha=weights.swiglu_alpha, limit=weights.swiglu_limit)
    y = act @ weights.down_eDF[expert].float().T
    if weights.down_bias_eD is not None:
        y = y + weights.down_bias_eD[expert].float()
    for slot, mask in present:
        y[mask] += lora_delta(act[mask], adapters[slot].get("down"), expert)
    return y


def moe_reference(
    x_TD: torch.Tensor,
    topk_expert_TK: torch.Tensor,
    topk_weight_TK: torch.Tensor,
    adapter_slot_T: torch.Tensor,
    weights: MoEWeights,
    adapters: Mapping[int, LayerAdapter],
) -> torch.Tensor:
    """fp32 y [T, D] of the expert layer; arguments as in `moe`, adapters by slot instead of a device table.

    Semantics: y[t] = sum over k of weight[t, k] * expert(topk_expert[t, k], adapter_slot[t])(x[t]), rows of -1 skipped.
    """
    y_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    for expert in range(weights.num_experts):
        token, k = (topk_expert_TK == expert).nonzero(as_tuple=True)
        if token.numel():
            y = _expert_rows(x_TD[token], adapter_slot_T[token], expert, weights, adapters)
            y_TD.index_add_(0, token, y * topk_weight_TK[token, k].float()[:, None])
    return y_TD
