"""Expert computation with grouped matrix products: no loop over experts, no wait for the device.

Rows are sorted by local slot; rows of experts that live elsewhere come last and are computed by nobody. All shapes
depend on N and K only, so the library picks the same tiles and the same order of summation whatever the routing is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

RANK_MULTIPLE = 8
"""Lora ranks are padded to a multiple of this for grouped_mm: 16 bytes of bfloat16."""
_GATHER_BYTES = 64 << 20
"""Weights that the row-wise form copies at once, bytes."""

_log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True, slots=True)
class _SortedRows:
    """Rows in order of slot.

    Attributes:
        row_M: int64, which row (n * K + k) stands at each place.
        slot_M: int64, its slot; e for rows of no local slot, which are last.
        end_e: int32, place after the last row of each slot.
    """

    row_M: torch.Tensor
    slot_M: torch.Tensor
    end_e: torch.Tensor


class GroupedBackend:
    """See the module and ExpertBackend."""

    def __init__(self) -> None:
        self._logged: set[tuple[object, ...]] = set()

    def forward(
        self, weights: ExpertWeights, arrived: ArrivedTokens, adapters: Sequence[AdapterTokens]
    ) -> torch.Tensor:
        """See ExpertBackend.forward."""
        num_slots, num_experts = weights.gate_up_eHD.shape[0], arrived.slot_NK.shape[1]
        x_ND, slot_R = arrived.x_ND, arrived.slot_NK.flatten()
        if slot_R.numel() == 0 or num_slots == 0:
            return torch.zeros_like(x_ND)
        self._log_form(weights.gate_up_eHD)
        rows = _sort_rows(slot_R, torch.arange(slot_R.shape[0], device=slot_R.device), num_slots)
        place_R = torch.empty_like(rows.row_M)
        place_R[rows.row_M] = torch.arange(rows.row_M.shape[0], device=slot_R.device)
        adapter_rows = [
            _sort_rows(slot_R, _rows_of_tokens(adapter.token_index, num_experts), num_slots) for adapter in adapters
        ]

        h_MH = grouped_linear(x_ND[rows.row_M // num_experts], weights.gate_up_eHD, rows.slot_M, rows.end_e)
        add_bias(h_MH, weights.gate_up_bias_eH, rows.slot_M)
        for adapter, own in zip(adapters, adapter_rows, strict=True):
            present = [name for name in FIRST_PROJECTIONS if name in adapter.pairs]
            if not present:
                continue
            x_nD = x_ND[own.row_M // num_experts]
            for projection in present:
                columns = projection_columns(projection, weights.layout, h_MH.shape[1])
                bias_eO = columns_of(weights.gate_up_bias_eH, columns)
                _add_delta(h_MH[:, columns], x_nD, adapter.pairs[projection], own, place_R[own.row_M], bias_eO)
        a_MF = weights.gate(h_MH)
        y_MD = grouped_linear(a_MF, weights.down_eDF, rows.slot_M, rows.end_e)
        add_bias(y_MD, weights.down_bias_eD, rows.slot_M)
        for adapter, own in zip(adapters, adapter_rows, strict=True):
            if "down" in adapter.pairs:
                place_n = place_R[own.row_M]
                _add_delta(y_MD, a_MF[place_n], adapter.pairs["down"], own, place_n, weights.down_bias_eD)
        # Rows of no local slot hold whatever the memory held.
        y_RD = torch.where((slot_R >= 0).unsqueeze(1), y_MD[place_R], 0)
        return weighted_sum(y_RD, arrived.weight_NK)

    def _log_form(self, weight_eOI: torch.Tensor) -> None:
        key = (weight_eOI.shape[1:], weight_eOI.dtype, weight_eOI.device)
        if key not in self._logged:
            self._logged.add(key)
            form = "grouped_mm" if can_use_grouped_mm(weight_eOI) else "row-wise bmm"
            _log.info("expert products chosen", shape=list(weight_eOI.shape), dtype=str(weight_eOI.dtype), form=form)


def can_use_grouped_mm(weight_eOI: torch.Tensor) -> bool:
    """The rule: bfloat16, widths that are multiples of 16 bytes; a GPU of compute capability 8.0 or later, or a CPU.

    Other dtypes have no grouped kernel on a GPU (torch loops over experts and waits for the device each time).
    """
    aligned = all(width * weight_eOI.element_size() % 16 == 0 for width in weight_eOI.shape[1:])
    if weight_eOI.dtype != torch.bfloat16 or not aligned:
        return False
    return not weight_eOI.is_cuda or torch.cuda.get_device_capability(weight_eOI.device) >= (8, 0)


def grouped_linear(
    x_MI: torch.Tensor, weight_eOI: torch.Tensor, slot_M: torch.Tensor, end_e: torch.Tensor
) -> torch.Tensor:
    """y[m] = weight[slot[m]] x[m]; rows of slot e (no local slot) come back undefined.

    Example: e 2, slot_M [0, 1, 1, 2], end_e [1, 3]: row 0 by weight 0, rows 1 and 2 by weight 1, row 3 undefined.

    Args:
        x_MI: rows in order of slot, in the dtype of the weights.
        weight_eOI: one matrix a slot.
        slot_M: int64, ascending.
        end_e: int32, place after the last row of each slot.
    """
    if can_use_grouped_mm(weight_eOI):
        y_MO: torch.Tensor = torch.nn.functional.grouped_mm(x_MI.contiguous(), weight_eOI.transpose(1, 2), offs=end_e)
        return y_MO
    y_MO = x_MI.new_empty((x_MI.shape[0], weight_eOI.shape[1]))
    chunk = min(x_MI.shape[0], max(1, _GATHER_BYTES // max(1, weight_eOI[0].nbytes)))
    for start in range(0, x_MI.shape[0], chunk):
        # All products have the same shape, since the library may round another one otherwise; the last overlaps.
        begin = min(start, x_MI.shape[0] - chunk)
        part = slice(begin, begin + chunk)
        weight_COI = weight_eOI[slot_M[part].clamp(max=weight_eOI.shape[0] - 1)]
        y_MO[part] = torch.bmm(weight_COI, x_MI[part].unsqueeze(2)).squeeze(2)
    return y_MO


def _sort_rows(slot_R: torch.Tensor, row_n: torch.Tensor, num_slots: int) -> _SortedRows:
    """The given rows in order of slot, those of no slot last."""
    slot_n = slot_R[row_n]
    slot_n = torch.where(slot_n < 0, num_slots, slot_n)
    sorted_n, order_n = torch.sort(slot_n, stable=True)
    slots = torch.arange(num_slots, device=slot_R.device)
    end_e = torch.searchsorted(sorted_n, slots, right=True, out_int32=True)
    return _SortedRows(row_M=row_n[order_n], slot_M=sorted_n, end_e=end_e)


def _rows_of_tokens(token_index: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Rows of the given tokens. Example: tokens [0, 2], K 2 -> [0, 1, 4, 5]."""
    offsets = torch.arange(num_experts, device=token_index.device)
    return (token_index.unsqueeze(1) * num_experts + offsets).flatten()


def _add_delta(  # noqa: PLR0917
    y_MO: torch.Tensor,
    x_nI: torch.Tensor,
    pair: LoraPair,
    own: _SortedRows,
    place_n: torch.Tensor,
    bias_eO: torch.Tensor | None,
) -> None:
    """y[place[i]] += scale * B A x[i] for one adapter's rows, in place; other rows are not touched. See with_delta."""
    a_erI, b_eOr = pair.stacked()
    if a_erI.shape[1] == 0:
        return
    h_nr = grouped_linear(x_nI.to(a_erI.dtype), a_erI, own.slot_M, own.end_e)
    delta_nO = grouped_linear(h_nr, b_eOr, own.slot_M, own.end_e).float()
    num_slots = a_erI.shape[0]
    slot_n = own.slot_M.clamp(max=num_slots - 1)
    scale_n = pair.scale_e[slot_n]
    delta_nO = torch.where((own.slot_M < num_slots).unsqueeze(1), delta_nO * scale_n.unsqueeze(1), 0)
    gain_nO = None if pair.gain_eO is None else pair.gain_eO[slot_n]
    bias_nO = None if bias_eO is None or gain_nO is None else bias_eO[slot_n]
    y_MO[place_n] = with_delta(y_MO[place_n], delta_nO, gain_nO, bias_nO)
