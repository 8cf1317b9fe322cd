"""One MoE layer's routed experts over all ranks: dispatch, compute with LoRA, combine.

Legend: T tokens of this rank, N tokens that arrived, K experts a token, D model width, E logical experts, C copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import nn

from compute_worker.dispatch.base import Dispatcher
from compute_worker.dispatch.packed_rows import HAS_TRITON
from compute_worker.expert_load import RowCounter
from compute_worker.experts_base import LayerExperts
from compute_worker.step_context import CurrentStep, StepContext
from epilora.placement import ExpertPlacement

ADAPTER_SLOT = "adapter_slot"
"""Name of the extra that travels with the tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhysicalExperts:
    """Where the copies of each logical expert of a layer are.

    Attributes:
        copies_EC: int64, physical ids; a row with fewer copies repeats them.
        num_copies_E: int64.
        rank_offsets: first physical id of each rank, then their number.
        shift: copy that this rank's first token takes; ranks with a token each then use different copies.
        uses_kernels: choose is one launch of a Triton kernel.
    """

    copies_EC: torch.Tensor
    num_copies_E: torch.Tensor
    rank_offsets: tuple[int, ...]
    shift: int = 0
    uses_kernels: bool = False

    @classmethod
    def make(cls, placement: ExpertPlacement, layer: int, device: torch.device, *, ep_rank: int) -> PhysicalExperts:
        """The tables of one layer for the tokens of a rank, on the device."""

        def on_device(table: np.ndarray) -> torch.Tensor:  # type: ignore[type-arg]
            return torch.from_numpy(table.astype(np.int64)).to(device)

        return cls(
            copies_EC=on_device(placement.copies(layer)),
            num_copies_E=on_device(placement.num_copies(layer)),
            rank_offsets=tuple(int(offset) for offset in placement.rank_offsets(layer)),
            shift=ep_rank,
            uses_kernels=device.type == "cuda" and HAS_TRITON,
        )

    def choose(self, expert_TK: torch.Tensor, num_rows: torch.Tensor | None) -> torch.Tensor:
        """Physical expert for each logical one: token t takes copy shift + t modulo the number of copies. -1 stays.

        Example: shift 0, expert 3 has copies 3 and 8: tokens 0, 1, 2 that all chose it get 3, 8, 3.

        Args:
            expert_TK: int; logical experts, -1 for none.
            num_rows: int64 [1]; tokens from there on are padding, and choose none. None: no token is.
        """
        if self.uses_kernels:
            from compute_worker.kernels.expert_ids import choose_copies

            return choose_copies(
                expert_TK.contiguous(), self.copies_EC, self.num_copies_E, shift=self.shift, num_rows=num_rows
            )
        if num_rows is not None:
            is_token_T = torch.arange(expert_TK.shape[0], device=expert_TK.device) < num_rows
            expert_TK = torch.where(is_token_T.unsqueeze(1), expert_TK, -1)
        expert_TK = expert_TK.long()
        logical_TK = expert_TK.clamp(min=0)
        token_T1 = torch.arange(self.shift, self.shift + expert_TK.shape[0], device=expert_TK.device).unsqueeze(1)
        physical_TK = self.copies_EC[logical_TK, token_T1 % self.num_copies_E[logical_TK]]
        return torch.where(expert_TK < 0, -1, physical_TK)


class ExpertLayer:
    """See the module."""

    def __init__(
        self,
        *,
        layer: int,
        experts: LayerExperts,
        physical: PhysicalExperts,
        dispatcher: Dispatcher,
        current: CurrentStep,
        counter: RowCounter,
        scales_input: bool = False,
    ) -> None:
        """Args:
        counter: of the rows of this layer.
        scales_input: the router's weight multiplies what the expert gets, instead of its output.
        """
        self._scales_input = scales_input
        self.layer = layer
        self.experts = experts
        self._current = current
        self._physical = physical
        self._dispatcher = dispatcher
        self._counter = counter

    def place(self, *, experts: LayerExperts, physical: PhysicalExperts, counter: RowCounter) -> None:
        """Takes another placement's experts, which have no adapters yet, between two steps; see the constructor."""
        experts.num_calls += self.experts.num_calls
        self.experts, self._physical, self._counter = experts, physical, counter

    def forward(self, x_TD: torch.Tensor, expert_TK: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
        """The weighted sum of the chosen experts' outputs, in the dtype of x. All ranks call it together.

        Args:
            x_TD: T is this rank's entry of the context's num_tokens_per_rank, maybe 0.
            expert_TK: int; logical experts, -1 for none.
            weight_TK: any float dtype.
        """
        context = self._current.context
        assert context is not None, f"layer {self.layer} outside a step"
        if context.given_topk is not None:
            expert_TK, weight_TK = context.given_topk
        if self._scales_input:
            y_TD = self._forward_scaled(context, x_TD, expert_TK, weight_TK)
        else:
            y_TD = self._forward(context, x_TD, expert_TK, weight_TK)
        context.routed_output = y_TD
        return y_TD

    def _forward_scaled(
        self, context: StepContext, x_TD: torch.Tensor, expert_TK: torch.Tensor, weight_TK: torch.Tensor
    ) -> torch.Tensor:
        """One pass for each of a token's experts, since each gets another input."""
        y_TD = torch.zeros_like(x_TD)
        for expert_T1, weight_T1 in zip(
            torch.split(expert_TK, 1, dim=1), torch.split(weight_TK, 1, dim=1), strict=True
        ):
            scaled_TD = x_TD * weight_T1.to(x_TD.dtype)
            y_TD = y_TD + self._forward(context, scaled_TD, expert_T1, torch.ones_like(weight_T1))
        return y_TD

    def _forward(
        self, context: StepContext, x_TD: torch.Tensor, expert_TK: torch.Tensor, weight_TK: torch.Tensor
    ) -> torch.Tensor:
        arrived, handle = self._dispatcher.dispatch(
            x_TD,
            self._physical.choose(expert_TK, context.num_rows),
            weight_TK,
            {ADAPTER_SLOT: context.adapter_slot_T},
            rank_offsets=self._physical.rank_offsets,
            num_tokens_per_rank=context.num_tokens_per_rank,
            pad_to=context.pad_to,
        )
        adapter_slot_N = arrived.extras[ADAPTER_SLOT]
        same_every_layer = self._dispatcher.same_arrivals_every_layer
        self._counter.add(arrived.slot_NK, adapter_slot_N)
        y_ND = self.experts.forward(
            arrived,
            adapter_slot_N,
            lambda: context.arrived_tokens(adapter_slot_N, same_every_layer=same_every_layer),
        )
        return self._dispatcher.combine(y_ND, handle)


class ExpertsOfLayer(Protocol):
    """What an experts module of the model calls: its ExpertLayer, or a probe."""

    def forward(self, x_TD: torch.Tensor, expert_TK: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
        """See ExpertLayer.forward."""
        ...


def experts_function(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' experts interface; `module.epilora_layer` is an ExpertsOfLayer."""
    layer: ExpertsOfLayer = module.epilora_layer  # type: ignore[assignment]
    return layer.forward(hidden_states, top_k_index, top_k_weights)
