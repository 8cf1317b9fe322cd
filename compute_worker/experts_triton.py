"""The local experts of one layer, computed by the Triton kernels: what the torch backends do, without a wait.

Legend: N arrived tokens, K experts a token, e local slots, D model width, F expert width, r lora rank.
"""

from __future__ import annotations

import torch

from compute_worker.dispatch.base import ArrivedTokens
from compute_worker.experts_base import ExpertWeights, LayerPairs, LoraPair, TokensByAdapter
from compute_worker.kernels import Activation, AdapterTable, LayerAdapter, MoEWeights, ProjectionSlice, moe
from compute_worker.kernels.adapter_table import TableRows, place_rows
from compute_worker.kernels.reference import activate
from epilora.model_spec import GateUpLayout

MIN_TABLE_RANK = 16
"""Rank limit that tables begin with; launch shapes do not change below it."""
_WIDTH_MULTIPLE = 16


class TritonLayerExperts:
    """See LayerExperts.

    Args:
        weights: of the layer; contiguous.
        activation: what `activation_of` found.
        num_adapter_slots: slots that adapters may have.

    Attributes:
        has_adapters: some slot has had a pair since all were empty; only then do the LoRA parts run.
        max_lora_rank: limit that launch shapes are made for; grows with the adapters.
    """

    num_calls = 0

    def __init__(self, weights: ExpertWeights, activation: Activation, num_adapter_slots: int) -> None:
        clamp = {} if weights.clamp is None else dict(zip(("swiglu_alpha", "swiglu_limit"), weights.clamp, strict=True))
        self._weights = MoEWeights(
            gate_up_eND=weights.gate_up_eHD,
            down_eDF=weights.down_eDF,
            interleaved=weights.layout == GateUpLayout.INTERLEAVED,
            activation=activation,
            num_routed_experts=weights.num_routed_experts or None,
            gate_up_bias_eN=weights.gate_up_bias_eH,
            down_bias_eD=weights.down_bias_eD,
            **clamp,
        )
        self._table = AdapterTable(
            num_slots=num_adapter_slots,
            num_experts=self._weights.num_experts,
            hidden_size=self._weights.hidden_size,
            intermediate_size=self._weights.intermediate_size,
            max_lora_rank=MIN_TABLE_RANK,
            gated=activation.gated,
            interleaved=self._weights.interleaved,
            dtype=weights.gate_up_eHD.dtype,
            device=weights.gate_up_eHD.device,
        )
        self.has_adapters = False

    @property
    def num_experts(self) -> int:
        """Local slots."""
        return self._weights.num_experts

    @property
    def max_lora_rank(self) -> int:
        """See the class."""
        return self._table.max_lora_rank

    def rows_of(self, pairs: LayerPairs) -> TableRows | None:
        """What the table will hold of an adapter, on the host; None if it has no pair for these experts. Any thread.

        Raises:
            ValueError: the pairs are not of this layer's local experts.
        """
        rows = self._table.rows_of(self._slices(pairs))
        return rows if rows.largest_rank else None

    def set_adapter(self, adapter_slot: int, pairs: LayerPairs) -> None:
        """See LayerExperts.set_adapter."""
        rows = self.rows_of(pairs)
        if rows is not None:
            self.set_rows(adapter_slot, place_rows([rows], self._weights.down_eDF.device)[0])

    def set_rows(self, adapter_slot: int, rows: TableRows) -> None:
        """The same with what `rows_of` made of the pairs, on the device. Never waits for it."""
        # Whole powers of two, so that few limits are ever seen.
        self._table.raise_max_lora_rank(max(MIN_TABLE_RANK, 1 << (rows.largest_rank - 1).bit_length()))
        self._table.set_rows(adapter_slot, rows)
        self.has_adapters = True

    def clear_adapter(self, adapter_slot: int) -> None:
        """See LayerExperts.clear_adapter."""
        self._table.clear_slot(adapter_slot)

    def forget_adapters(self) -> None:
        """Once no slot has an adapter: the LoRA parts need not run."""
        assert not self._table.adapters()
        self.has_adapters = False

    def forward(
        self, arrived: ArrivedTokens, adapter_slot_N: torch.Tensor, _tokens_by_adapter: TokensByAdapter
    ) -> torch.Tensor:
        """See LayerExperts.forward. Never waits for the device; its launches depend on N and K alone."""
        self.num_calls += 1
        if self._weights.num_experts == 0:
            return torch.zeros_like(arrived.x_ND)
        if not self.has_adapters:
            # Without a table the kernels take a slot for a mistake; here it is an adapter of other modules.
            adapter_slot_N = torch.full_like(adapter_slot_N, -1)
        return moe(
            arrived.x_ND.contiguous(),
            arrived.slot_NK.contiguous(),
            arrived.weight_NK.contiguous(),
            adapter_slot_N.contiguous(),
            self._weights,
            self._table if self.has_adapters else None,
        )

    def _slices(self, pairs: LayerPairs) -> LayerAdapter:
        # Without a gate the one first projection goes by "up", whatever a file calls it.
        names = {} if self._weights.activation.gated else {"gate_up": "up"}
        return {names.get(name, name): _slice(pair) for name, pair in pairs.items()}


def _slice(pair: LoraPair) -> ProjectionSlice:
    return ProjectionSlice(
        a=pair.a, b=pair.b, lora_rank=torch.tensor(pair.lora_rank, dtype=torch.int32), scale=pair.scale_e
    )


def activation_of(weights: ExpertWeights) -> Activation | None:
    """The kernels' activation that computes what `weights.gate` does, found by trying; None if none does."""
    width, device = weights.down_eDF.shape[2], weights.down_eDF.device
    first = weights.gate_up_eHD.shape[1]
    generator = torch.Generator().manual_seed(0)
    # Far enough out that clamps show.
    h_nH = (torch.randn((64, first), generator=generator) * 6).to(device)
    wanted = weights.gate(h_nH)
    if weights.layout == GateUpLayout.NOT_GATED:
        gate_nF = up_nF = h_nH
        candidates = [Activation.SILU, Activation.RELU2]
    else:
        interleaved = weights.layout == GateUpLayout.INTERLEAVED
        gate_nF = h_nH[:, 0::2] if interleaved else h_nH[:, :width]
        up_nF = h_nH[:, 1::2] if interleaved else h_nH[:, width:]
        candidates = [Activation.SILU_GATED, *([Activation.CLAMPED_SWIGLU] if weights.clamp else [])]
    alpha, limit = weights.clamp or (0.0, 0.0)
    for candidate in candidates:
        got = activate(gate_nF, up_nF, candidate, alpha=alpha, limit=limit)
        if got.shape == wanted.shape and torch.allclose(got, wanted, rtol=1e-4, atol=1e-5):
            return candidate
    return None


def why_not(weights: ExpertWeights, activation: Activation | None) -> str:
    """Why the kernels cannot compute these experts; empty if they can."""
    if activation is None:
        return "its activation is none that the kernels have"
    widths = (weights.gate_up_eHD.shape[2], weights.down_eDF.shape[2])
    if any(width % _WIDTH_MULTIPLE for width in widths):
        return f"its widths {widths} are not multiples of {_WIDTH_MULTIPLE}"
    return ""
