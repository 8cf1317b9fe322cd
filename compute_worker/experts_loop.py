"""The plain reference of expert computation: one expert after another.

Products of base weights run in blocks of a fixed number of rows, so that a row's bits depend neither on how many rows
its expert has nor on where among them it stands. Whether a block of that size keeps this promise on this machine is
tried when the layer is built; where the library's small-matrix code does not, rows go one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog
import torch

from compute_worker.dispatch.base import ArrivedTokens
from compute_worker.experts_base import (
    FIRST_PROJECTIONS,
    AdapterTokens,
    ExpertWeights,
    LoraPair,
    add_bias,
    columns_of,
    projection_columns,
    weighted_sum,
    with_delta,
)

BLOCK_ROWS = 16
"""Rows of a block; a multiple of 16 keeps every block 64-byte aligned."""

_log = structlog.get_logger()


class LoopBackend:
    """See the module and ExpertBackend."""

    def __init__(self) -> None:
        self._block_rows: dict[tuple[object, ...], int] = {}

    def forward(
        self, weights: ExpertWeights, arrived: ArrivedTokens, adapters: Sequence[AdapterTokens]
    ) -> torch.Tensor:
        """See ExpertBackend.forward."""
        num_tokens, num_experts = arrived.slot_NK.shape
        x_ND, slot_R = arrived.x_ND, arrived.slot_NK.flatten()
        token_R = torch.arange(num_tokens, device=x_ND.device).repeat_interleave(num_experts)
        rows_by_slot = _rows_by_slot(slot_R, weights.gate_up_eHD.shape[0])
        x_RD = x_ND[token_R]

        h_RH = self._linear(x_RD, weights.gate_up_eHD, rows_by_slot)
        add_bias(h_RH, weights.gate_up_bias_eH, slot_R)
        for adapter in adapters:
            rows_of_adapter = _rows_of(adapter, token_R, num_tokens, rows_by_slot)
            for projection in FIRST_PROJECTIONS:
                if projection in adapter.pairs:
                    columns = projection_columns(projection, weights.layout, h_RH.shape[1])
                    bias_eO = columns_of(weights.gate_up_bias_eH, columns)
                    _add_deltas(h_RH[:, columns], x_RD, adapter.pairs[projection], rows_of_adapter, bias_eO)
        # The activation runs on all R rows at once, each at its own place: vectorised code may round the
        # last elements of an array in another way than the rest.
        a_RF = weights.gate(h_RH)
        y_RD = self._linear(a_RF, weights.down_eDF, rows_by_slot)
        if weights.down_bias_eD is not None:
            add_bias(y_RD, weights.down_bias_eD, slot_R)
            y_RD = torch.where((slot_R >= 0).unsqueeze(1), y_RD, 0)
        for adapter in adapters:
            if "down" in adapter.pairs:
                own = _rows_of(adapter, token_R, num_tokens, rows_by_slot)
                _add_deltas(y_RD, a_RF, adapter.pairs["down"], own, weights.down_bias_eD)
        return weighted_sum(y_RD, arrived.weight_NK)

    def _linear(
        self, x_RI: torch.Tensor, weight_eOI: torch.Tensor, rows_by_slot: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        """y[row] = weight[slot of row] x[row]; zeros for rows without a slot."""
        y_RO = x_RI.new_zeros((x_RI.shape[0], weight_eOI.shape[1]))
        if not rows_by_slot:
            return y_RO
        block_rows = self._block_rows_for(weight_eOI)
        for slot, rows in rows_by_slot.items():
            for block in torch.split(rows, block_rows):
                x_BI = x_RI.new_zeros((block_rows, x_RI.shape[1]))
                x_BI[: block.shape[0]] = x_RI[block]
                y_RO[block] = (x_BI @ weight_eOI[slot].t())[: block.shape[0]]
        return y_RO

    def _block_rows_for(self, weight_eOI: torch.Tensor) -> int:
        """Rows of a block for weights of this shape; tried once for each shape."""
        key = (
            weight_eOI.shape[1:],
            weight_eOI.stride()[1:],
            weight_eOI.dtype,
            weight_eOI.device,
            torch.get_num_threads(),
        )
        if key not in self._block_rows:
            held = all(rows_are_independent(weight_eOI[slot], BLOCK_ROWS) for slot in {0, weight_eOI.shape[0] - 1})
            self._block_rows[key] = BLOCK_ROWS if held else 1
            _log.info("expert block chosen", shape=list(weight_eOI.shape[1:]), block_rows=self._block_rows[key])
        return self._block_rows[key]


def rows_are_independent(weight_OI: torch.Tensor, block_rows: int) -> bool:
    """True if x @ weight^T for x of block_rows rows gives each row the same bits at every place in the block."""
    generator = torch.Generator(device=weight_OI.device).manual_seed(block_rows)

    def draw() -> torch.Tensor:
        shape = (block_rows, weight_OI.shape[1])
        return torch.randn(shape, generator=generator, device=weight_OI.device).to(weight_OI.dtype)

    x_BI = draw()
    y_BO = x_BI @ weight_OI.t()
    for shift in range(1, block_rows):
        if not torch.equal(x_BI.roll(shift, 0) @ weight_OI.t(), y_BO.roll(shift, 0)):
            return False
    others_BI = draw()
    others_BI[::2] = x_BI[::2]
    return torch.equal((others_BI @ weight_OI.t())[::2], y_BO[::2])


def _rows_by_slot(slot_R: torch.Tensor, num_slots: int) -> dict[int, torch.Tensor]:
    """Rows of each slot that has any, in ascending order."""
    order_R = torch.argsort(slot_R, stable=True)
    counts = torch.bincount(slot_R + 1, minlength=num_slots + 1).tolist()
    groups = torch.split(order_R, counts)[1:]
    return {slot: rows for slot, rows in enumerate(groups) if rows.numel()}


def _rows_of(
    adapter: AdapterTokens, token_R: torch.Tensor, num_tokens: int, rows_by_slot: dict[int, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Like rows_by_slot, with the rows of one adapter's tokens only."""
    mask_N = torch.zeros(num_tokens, dtype=torch.bool, device=token_R.device)
    mask_N[adapter.token_index] = True
    return {slot: rows[mask_N[token_R[rows]]] for slot, rows in rows_by_slot.items()}


def _add_deltas(
    y_RO: torch.Tensor,
    x_RI: torch.Tensor,
    pair: LoraPair,
    rows_by_slot: dict[int, torch.Tensor],
    bias_eO: torch.Tensor | None,
) -> None:
    """y[row] += scale * B A x[row] in float32, for the given rows of slots that have a pair; in place (with_delta)."""
    for slot, rows in rows_by_slot.items():
        if rows.numel() == 0 or pair.lora_rank[slot] == 0:
            continue
        a, b = pair.slot(slot)
        delta = (x_RI[rows].float() @ a.float().t()) @ b.float().t() * pair.scale_e[slot]
        gain_O = None if pair.gain_eO is None else pair.gain_eO[slot]
        y_RO[rows] = with_delta(y_RO[rows], delta, gain_O, None if bias_eO is None else bias_eO[slot])
