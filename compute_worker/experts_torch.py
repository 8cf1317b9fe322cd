"""The local experts of one layer, computed by one of the backends made of torch operations."""

from __future__ import annotations

import torch

from compute_worker.dispatch.base import ArrivedTokens
from compute_worker.experts_base import AdapterTokens, ExpertBackend, ExpertWeights, LayerPairs, TokensByAdapter


class TorchLayerExperts:
    """See LayerExperts."""

    num_calls = 0

    def __init__(self, weights: ExpertWeights, backend: ExpertBackend) -> None:
        self.weights = weights
        self.backend = backend
        self._pairs: dict[int, LayerPairs] = {}

    def set_adapter(self, adapter_slot: int, pairs: LayerPairs) -> None:
        """See LayerExperts.set_adapter."""
        self._pairs[adapter_slot] = pairs

    def clear_adapter(self, adapter_slot: int) -> None:
        """See LayerExperts.clear_adapter."""
        self._pairs.pop(adapter_slot, None)

    def forward(
        self, arrived: ArrivedTokens, adapter_slot_N: torch.Tensor, tokens_by_adapter: TokensByAdapter
    ) -> torch.Tensor:
        """See LayerExperts.forward."""
        self.num_calls += 1
        adapters = []
        # Without a pair in this layer nothing needs to know whose tokens these are.
        if self._pairs:
            adapters = [
                AdapterTokens(token_index=index, pairs=self._pairs[slot])
                for slot, index in tokens_by_adapter().items()
                if slot in self._pairs
            ]
        return self.backend.forward(self.weights, arrived, adapters)
