"""DoRA: how much each row of a weight is stretched once an adapter's delta is added.

Legend: e local slots, r lora rank.
"""

from __future__ import annotations

from typing import Protocol

import torch

_CHUNK_BYTES = 64 << 20
"""Of the sum W + delta that is in memory at once."""


class WeightSource(Protocol):
    """The base weights that adapters are measured against."""

    def dense(self, module: str) -> torch.Tensor:
        """[out, in] of a dense module."""
        ...

    def has_bias(self, module: str) -> bool:
        """True if a dense module adds a bias."""
        ...

    def expert(self, layer: int, projection: str, expert: int) -> torch.Tensor:
        """[out, in] of a logical expert: the rows that one LoRA projection changes."""
        ...


def row_gain(
    weight_OI: torch.Tensor, a_rI: torch.Tensor, b_Or: torch.Tensor, scale: float, magnitude_O: torch.Tensor
) -> torch.Tensor:
    """What DoRA multiplies a module's output with, beside LoRA.

    Semantics: gain[o] = magnitude[o] / |W[o] + scale * B[o] A|, so that y = gain * (W x + scale * B A x) + bias.

    Args:
        weight_OI: base weight, any float dtype, maybe a transposed view.
        a_rI: as trained, any float dtype.
        b_Or: as trained.
        scale: of the pair.
        magnitude_O: trained.

    Returns:
        float32 [out] on the device of the weight.

    Example: W [[3, 4]], no delta, magnitude [10] -> [2].
    """
    device = weight_OI.device
    a_rI, b_Or = a_rI.to(device, torch.float32), b_Or.to(device, torch.float32)
    square_O = torch.zeros(weight_OI.shape[0], dtype=torch.float32, device=device)
    columns = max(1, _CHUNK_BYTES // (4 * weight_OI.shape[0]))
    for start in range(0, weight_OI.shape[1], columns):
        part = slice(start, start + columns)
        sum_OC = torch.addmm(weight_OI[:, part].float(), b_Or, a_rI[:, part], alpha=scale)
        square_O += sum_OC.square().sum(dim=1)
    return magnitude_O.to(device, torch.float32) / square_O.sqrt()
