"""MoE layers that are called alone, as callers of ExpertService do, or joined without tokens.

Legend: T tokens of this rank's step, K experts a token, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from compute_worker.expert_layer import ExpertLayer
from compute_worker.step_context import StepContext
from epilora.errors import InvalidArgumentError
from epilora.model_spec import ModelSpec, MoELayerSpec

TopK = tuple[torch.Tensor, torch.Tensor]
"""(experts int [T, K], weights float [T, K]) chosen by a caller; logical ids."""


class LayerCalls:
    """Single MoE layers of a model. `forward` and `join_empty` belong to the step thread.

    Args:
        model: with its experts in `layers`.
        spec: of the model.
        layers: by decoder layer.
        dtype: of the weights.
        device: of the weights.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: ModelSpec,
        layers: Mapping[int, ExpertLayer],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._model = model
        self._spec = spec
        self._layers = layers
        self._dtype = dtype
        self._device = device

    def check(self, layer: int, x_TD: torch.Tensor, topk: TopK | None) -> None:
        """Checks what a caller sent, before any other rank is asked to join.

        Raises:
            InvalidArgumentError: no such MoE layer, a wrong shape, or expert ids out of range or repeated.
        """
        moe = self._moe(layer)
        if hasattr(self._block_of(layer), "self_attn"):
            raise _bad_call("layer", "has no MLP block of its own in this family; its experts cannot be called alone")
        _check_tensors(x_TD, topk, moe, num_experts_per_token=self._spec.num_experts_per_token)

    def forward(
        self, context: StepContext, layer: int, x_TD: torch.Tensor | None, topk: TopK | None, routed_only: bool
    ) -> torch.Tensor | None:
        """One layer's MLP block, in a step of its own; see `ModelRunner.forward_experts` for arguments and result.

        Args:
            context: the step under way, of the T tokens.
        """
        if x_TD is None or x_TD.shape[0] == 0:
            self.join_empty(layer)
            return None if x_TD is None else self._empty(self._spec.hidden_size)
        x_TD = x_TD.to(self._device, self._dtype)
        if topk is not None:
            context.given_topk = (topk[0].to(self._device), topk[1].to(self._device))
        if topk is not None and routed_only:
            return self._layers[layer].forward(x_TD, *topk)
        output = self._block_of(layer)(x_TD.unsqueeze(0))
        y_TD: torch.Tensor = (output[0] if isinstance(output, tuple) else output).view(x_TD.shape)
        if routed_only:
            assert context.routed_output is not None
            return context.routed_output
        return y_TD

    def join_empty(self, layer: int) -> None:
        """Joins one layer's collectives without tokens."""
        num_experts = self._spec.num_experts_per_token
        expert_TK = torch.empty((0, num_experts), dtype=torch.int64, device=self._device)
        weight_TK = torch.empty((0, num_experts), dtype=torch.float32, device=self._device)
        self._layers[layer].forward(self._empty(self._moe(layer).hidden_size), expert_TK, weight_TK)

    def _empty(self, width: int) -> torch.Tensor:
        return torch.empty((0, width), dtype=self._dtype, device=self._device)

    def _block_of(self, layer: int) -> nn.Module:
        block: nn.Module = self._model.get_submodule(self._moe(layer).module.rpartition(".")[0])
        return block

    def _moe(self, layer: int) -> MoELayerSpec:
        for moe in self._spec.moe_layers:
            if moe.layer == layer:
                return moe
        known = [moe.layer for moe in self._spec.moe_layers]
        raise _bad_call("layer", f"is {layer}, expected one of the MoE layers {known}")


def _check_tensors(x_TD: torch.Tensor, topk: TopK | None, moe: MoELayerSpec, *, num_experts_per_token: int) -> None:
    """Checks shapes and ids.

    Raises:
        InvalidArgumentError: a wrong shape, or expert ids out of range or repeated.
    """
    shape = tuple(x_TD.shape)
    if len(shape) != 2 or shape[1] != moe.hidden_size:
        raise _bad_call("hidden_states", f"has shape {list(shape)}, expected [T, {moe.hidden_size}]")
    if topk is None:
        return
    expert_TK, weight_TK = topk
    expected = (shape[0], num_experts_per_token)
    if tuple(expert_TK.shape) != expected or tuple(weight_TK.shape) != expected:
        raise _bad_call(
            "top_k",
            f"has expert_ids {list(expert_TK.shape)} and weights {list(weight_TK.shape)}, expected both"
            f" {list(expected)}",
        )
    if expert_TK.numel() and (int(expert_TK.min()) < 0 or int(expert_TK.max()) >= moe.num_experts):
        raise _bad_call(
            "top_k.expert_ids",
            f"holds {int(expert_TK.min())} to {int(expert_TK.max())}, expected 0 to {moe.num_experts - 1}",
        )
    ordered = expert_TK.sort(dim=1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise _bad_call("top_k.expert_ids", "names an expert twice for one token, expected distinct ids")


def _bad_call(field: str, message: str) -> InvalidArgumentError:
    """What is wrong with a call's field."""
    return InvalidArgumentError(f"{field} {message}", reason="BAD_EXPERTS_CALL", field=field)
