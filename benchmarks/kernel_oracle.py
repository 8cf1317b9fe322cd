"""The layer in fp32 torch, for cells of many adapters: all adapters of an expert in one product.

`moe_reference` walks expert by expert and adapter by adapter, thousands of small operations in a cell of 64 adapters.
Here the A of an expert's adapters stand below each other and each row keeps its own adapter's part of x A^T, so that an
expert takes a dozen operations. tests/kernels holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.kernel_layer import Batch
from compute_worker.kernels import LayerAdapter, MoEWeights
from compute_worker.kernels.reference import activate


class Adapters:
    """fp32-ready views of adapters whose ranks are the same for all experts.

    Args:
        adapters: by slot, each with gate, up and down.
        num_experts: local experts.
    """

    def __init__(self, adapters: Sequence[LayerAdapter], num_experts: int) -> None:
        self._pieces = {
            name: [self._views(adapter, name, num_experts) for adapter in adapters] for name in ("gate", "up", "down")
        }

    @staticmethod
    def _views(adapter: LayerAdapter, name: str, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        piece = adapter[name]
        rank = int(piece.lora_rank[0])
        assert bool((piece.lora_rank == rank).all()), "one rank for all experts"
        scale = piece.scale.to(piece.a.device)
        return piece.a.view(num_experts, rank, -1), piece.b.view(num_experts, -1, rank), scale

    def delta(self, name: str, expert: int, x_MI: torch.Tensor, slot_M: torch.Tensor) -> torch.Tensor:
        """fp32 scale * (x A^T) B^T of each row's own adapter; zero for rows of slot -1."""
        pieces = self._pieces[name]
        a_RI = torch.cat([a[expert] for a, _, _ in pieces]).float()
        b_OR = torch.cat([b[expert] for _, b, _ in pieces], 1).float()
        ranks = torch.tensor([a.shape[1] for a, _, _ in pieces], device=a_RI.device)
        owner_R = torch.repeat_interleave(
            torch.arange(len(pieces), device=a_RI.device), ranks, output_size=a_RI.shape[0]
        )
        scale_R = torch.stack([scale[expert] for _, _, scale in pieces])[owner_R]
        s_MR = (x_MI @ a_RI.T) * scale_R
        return torch.where(owner_R[None, :] == slot_M[:, None], s_MR, 0.0) @ b_OR.T


def layer_fp32(batch: Batch, weights: MoEWeights, adapters: Adapters | None) -> torch.Tensor:
    """fp32 y [T, D] of a gated layer without biases, as `moe_reference`."""
    x_TD, expert_TK, weight_TK, slot_T = batch.x_TD, batch.expert_TK, batch.weight_TK, batch.slot_T
    assert weights.activation.gated
    assert not weights.interleaved
    assert weights.gate_up_bias_eN is None
    y_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    f = weights.intermediate_size
    for expert in range(weights.num_experts):
        token, k = (expert_TK == expert).nonzero(as_tuple=True)
        if not token.numel():
            continue
        x, slot = x_TD[token].float(), slot_T[token]
        gate_up = x @ weights.gate_up_eND[expert].float().T
        gate, up = gate_up[:, :f], gate_up[:, f:]
        if adapters is not None:
            gate = gate + adapters.delta("gate", expert, x, slot)
            up = up + adapters.delta("up", expert, x, slot)
        act = activate(gate, up, weights.activation, alpha=weights.swiglu_alpha, limit=weights.swiglu_limit)
        y = act @ weights.down_eDF[expert].float().T
        if adapters is not None:
            y = y + adapters.delta("down", expert, act, slot)
        y_TD.index_add_(0, token, y * weight_TK[token, k].float()[:, None])
    return y_TD
