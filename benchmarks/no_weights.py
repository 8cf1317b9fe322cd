"""What an adapter pool measures adapters against where there is no model."""

from __future__ import annotations

import torch


class NoWeights:
    """A dora.WeightSource for adapters without DoRA and without biases, which ask for nothing."""

    def dense(self, module: str) -> torch.Tensor:
        """Not there."""
        raise AssertionError(module)

    def has_bias(self, module: str) -> bool:
        """Not there."""
        raise AssertionError(module)

    def expert(self, layer: int, projection: str, expert: int) -> torch.Tensor:
        """Not there."""
        raise AssertionError((layer, projection, expert))
