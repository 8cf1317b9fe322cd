"""What the backends of expert computation share: weights, LoRA pairs, and the interface.

Legend: N arrived tokens, K experts a token, R = N * K rows (row n * K + k), e local slots, D model width,
H width of the first projection (2F, or F without a gate), F expert width, r lora rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from compute_worker.dispatch.base import ArrivedTokens
from epilora.model_spec import GateUpLayout

FIRST_PROJECTIONS = ("gate_up", "gate", "up")
"""Projections whose delta is added before the activation; the other one is "down"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertWeights:
    """Base weights of one layer's local slots.

    Attributes:
        gate_up_eHD: first projection of each slot, in the layout of `layout`; maybe a transposed view.
        down_eDF: second projection; maybe a transposed view.
        gate_up_bias_eH: added to the first projection's output; None without.
        down_bias_eD: added to the second projection's output; None without.
        gate: maps [n, H] to [n, F]: the activation, with the gate where the model has one.
        layout: how gate and up share H.
        num_routed_experts: experts that the router chooses among; 0: as many as there are local slots.
        clamp: (alpha, limit) of the modules that have them, for activations with a clamp.
    """

    gate_up_eHD: torch.Tensor
    down_eDF: torch.Tensor
    gate: Callable[[torch.Tensor], torch.Tensor]
    layout: GateUpLayout
    gate_up_bias_eH: torch.Tensor | None = None
    down_bias_eD: torch.Tensor | None = None
    num_routed_experts: int = 0
    clamp: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraPair:
    """One adapter's pair of matrices for one projection of one layer, on this rank's local slots.

    Attributes:
        a: [sum of lora_rank, in]; the rows of slot s start at the sum of the ranks before it.
        b: flat; block of slot s is [out, lora_rank[s]] row-major and starts at out * (sum of the ranks before it).
        lora_rank: per slot; 0 where the slot's expert has no pair.
        scale_e: float32 [e], on the device.
        out_features: rows of each block of b.
        gain_eO: float32 [e, out], DoRA's factor of base output and delta together, 1 without a pair; None without DoRA.
    """

    a: torch.Tensor
    b: torch.Tensor
    lora_rank: tuple[int, ...]
    scale_e: torch.Tensor
    out_features: int
    gain_eO: torch.Tensor | None = None

    def slot(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(A [r, in], B [out, r]) of one slot; r may be 0."""
        rank, first = self.lora_rank[slot], sum(self.lora_rank[:slot])
        b = self.b[self.out_features * first : self.out_features * (first + rank)]
        return self.a[first : first + rank], b.view(self.out_features, rank)

    def stacked(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(A [e, r, in], B [e, out, r]) where all slots have the same r, as views.

        Example: two slots of rank 1, in 3, out 2: a [2, 3] is A [2, 1, 3], b [4] is B [2, 2, 1].
        """
        num_slots, rank = len(self.lora_rank), self.lora_rank[0]
        assert all(other == rank for other in self.lora_rank), self.lora_rank
        return self.a.view(num_slots, rank, -1), self.b.view(num_slots, self.out_features, rank)


LayerPairs = Mapping[str, LoraPair]
"""One adapter's pairs of one layer, by projection."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterTokens:
    """The arrived tokens of one adapter: int64 [n] indices into N, and the adapter's pairs of the layer."""

    token_index: torch.Tensor
    pairs: LayerPairs


TokensByAdapter = Callable[[], Mapping[int, torch.Tensor]]
"""Arrived tokens of each adapter: slot -> int64 [n] indices into N. Calling it may wait for the device."""


class LayerExperts(Protocol):
    """The local experts of one layer, and the pairs of the adapters that are active there.

    Attributes:
        num_calls: of forward, since the start.
    """

    num_calls: int

    def set_adapter(self, adapter_slot: int, pairs: LayerPairs) -> None:
        """Makes the pairs those of the slot. Step thread only, between steps."""
        ...

    def clear_adapter(self, adapter_slot: int) -> None:
        """Takes the slot's pairs away, if it has any. Step thread only, between steps."""
        ...

    def forward(
        self, arrived: ArrivedTokens, adapter_slot_N: torch.Tensor, tokens_by_adapter: TokensByAdapter
    ) -> torch.Tensor:
        """See ExpertBackend.forward.

        Args:
            arrived: tokens and their local slots.
            adapter_slot_N: int32, on the device; -1 for the base model.
            tokens_by_adapter: the same, for those that need it on the host.
        """
        ...


class ExpertBackend(Protocol):
    """Computes the local experts' outputs, with LoRA."""

    def forward(
        self, weights: ExpertWeights, arrived: ArrivedTokens, adapters: Sequence[AdapterTokens]
    ) -> torch.Tensor:
        """The weighted sum of the local experts' outputs of each arrived token.

        Semantics: y[n] = sum_k weight[n, k] * (down_s + delta)(gate((gate_up_s + delta)(x[n]))), s = slot[n, k] >= 0,
        each projection with its bias; with DoRA gain_s * (W_s + delta), the bias unchanged.

        A token without an adapter gets the same bits whatever adapters, and however many rows of other tokens, share
        the call, as long as N and K are the same.

        Returns:
            y_ND in the dtype of x; zeros for tokens without a local expert. Sums are done in float32.
        """
        ...


def projection_columns(projection: str, layout: GateUpLayout, first_width: int) -> slice:
    """Columns of the first projection's output [n, H] that one LoRA projection changes.

    Example: concatenated, H 6: "gate" -> 0:3, "up" -> 3:6. Interleaved: "gate" -> 0:6:2, "up" -> 1:6:2.
    """
    if projection == "gate_up" or layout == GateUpLayout.NOT_GATED:
        return slice(0, first_width)
    second = projection == "up"
    if layout == GateUpLayout.INTERLEAVED:
        return slice(int(second), first_width, 2)
    half = first_width // 2
    return slice(half, first_width) if second else slice(0, half)


def add_bias(y_RO: torch.Tensor, bias_eO: torch.Tensor | None, slot_R: torch.Tensor) -> None:
    """y[r] += bias[slot[r]], in place; rows of no local slot (-1, or e) get some bias, which nobody reads."""
    if bias_eO is not None and bias_eO.shape[0]:
        y_RO += bias_eO[slot_R.clamp(0, bias_eO.shape[0] - 1)]


def with_delta(
    y_nO: torch.Tensor, delta_nO: torch.Tensor, gain_nO: torch.Tensor | None, bias_nO: torch.Tensor | None
) -> torch.Tensor:
    """y + delta, or with DoRA gain * (y - bias + delta) + bias; in float32, rounded once to y's dtype.

    Args:
        y_nO: output of the base weights, with its bias.
        delta_nO: float32.
        gain_nO: float32, of each row's slot; None without DoRA.
        bias_nO: of each row's slot; None without.
    """
    if gain_nO is None:
        return (y_nO.float() + delta_nO).to(y_nO.dtype)
    bias = 0 if bias_nO is None else bias_nO.float()
    return (gain_nO * (y_nO.float() - bias + delta_nO) + bias).to(y_nO.dtype)


def columns_of(bias_eO: torch.Tensor | None, columns: slice) -> torch.Tensor | None:
    """The part of a bias that belongs to one LoRA projection."""
    return None if bias_eO is None else bias_eO[:, columns]


def rank_offsets(lora_rank: Sequence[int]) -> list[int]:
    """e + 1 numbers: sum of the ranks before each slot, then of all."""
    return [0, *accumulate(lora_rank)]


def weighted_sum(y_RD: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """Adds each token's K weighted rows in order of k, in float32, and rounds once.

    Example: K 2, rows [[1], [2], [3], [4]], weights [[1, 10], [0, 1]] -> [[21], [4]].
    """
    num_tokens, num_experts = weight_NK.shape
    y_NKD = y_RD.view(num_tokens, num_experts, y_RD.shape[1])
    total_ND = y_NKD[:, 0].float() * weight_NK[:, 0, None]
    for k in range(1, num_experts):
        total_ND = total_ND + y_NKD[:, k].float() * weight_NK[:, k, None]
    return total_ND.to(y_RD.dtype)
