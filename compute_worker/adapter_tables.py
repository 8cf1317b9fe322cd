"""Keeps the kernels' tables at the adapters that are active: experts layer by layer, and dense modules.

What launches the adapters need is their key: modules with a pair, and limits of lora ranks. It only grows while there
are adapters, so that loading and unloading in turn does not capture graphs again and again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from compute_worker.adapter_buffers import AdapterTensors
from compute_worker.dense_lora import DensePair, DenseTokens
from compute_worker.expert_layer import ExpertLayer
from compute_worker.model_probe import ModelProbe
from compute_worker.step_context import group_by_slot

if TYPE_CHECKING:
    from compute_worker.experts_triton import TritonLayerExperts


def tokens_apart(
    adapter_slots: Sequence[int], active: Mapping[int, AdapterTensors], device: torch.device
) -> list[DenseTokens]:
    """Tokens of a fixed step whose dense modules the table does not compute: of adapters that are not plain.

    Args:
        adapter_slots: of the step's tokens, -1 for the base model.
        active: adapters by slot.
        device: where index tensors go.
    """
    return [
        DenseTokens(token_index=torch.tensor(index, dtype=torch.int64, device=device), pairs=active[slot].dense)
        for slot, index in group_by_slot(adapter_slots).items()
        if not active[slot].is_plain
    ]


class ExpertAdapters:
    """Hands each layer its pairs of an adapter. A listener of AdapterPool.

    Args:
        layers: by number.
    """

    def __init__(self, layers: Mapping[int, ExpertLayer]) -> None:
        self._layers = layers

    def set_adapter(self, adapter_slot: int, adapter: AdapterTensors) -> None:
        """See AdapterListener."""
        for number, layer in self._layers.items():
            if number in adapter.layers:
                layer.experts.set_adapter(adapter_slot, adapter.layers[number])

    def clear_adapter(self, adapter_slot: int) -> None:
        """See AdapterListener."""
        for layer in self._layers.values():
            layer.experts.clear_adapter(adapter_slot)


class RowwiseAdapters:
    """Deltas of dense modules by each row's slot, from a table. A RowwiseDeltas, and a listener of AdapterPool.

    Adapters with more than pairs are not in the table; steps with tokens of theirs use `tokens_apart`.

    Args:
        probe: modules whose pairs take effect.
        num_slots: slots that adapters may have.
        dtype: of the adapters in memory.
        device: where they are.

    Attributes:
        adapter_slots: int32 [M] of the step under way.
        touched: modules with a pair since there was no adapter.
    """

    def __init__(self, probe: ModelProbe, *, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        from compute_worker.kernels.dense_lora import DenseTable

        sizes = {module.module: (module.in_features, module.out_features) for module in probe.dense_modules}
        self._table = DenseTable(sizes, num_slots=num_slots, dtype=dtype, device=device)
        self.adapter_slots: torch.Tensor | None = None
        self.touched: frozenset[str] = frozenset()

    def set_adapter(self, adapter_slot: int, adapter: AdapterTensors) -> None:
        """See AdapterListener."""
        if adapter.is_plain:
            pairs = {module: pair for module, pair in adapter.dense.items() if isinstance(pair, DensePair)}
            self._table.set_slot(adapter_slot, pairs)
            self.touched |= frozenset(pairs)

    def clear_adapter(self, adapter_slot: int) -> None:
        """See AdapterListener."""
        self._table.clear_slot(adapter_slot)

    def touch_all(self) -> None:
        """As if some adapter had a pair for every module."""
        self.touched = frozenset(self._table.modules)

    def forget(self) -> None:
        """Once no slot has an adapter."""
        self.touched = frozenset()

    def add(self, module: str, x_TI: torch.Tensor, y_TO: torch.Tensor) -> None:
        """See RowwiseDeltas."""
        from compute_worker.kernels.dense_lora import add_delta

        if module in self.touched:
            assert self.adapter_slots is not None
            add_delta(self._table, module, x_TI, y_TO, self.adapter_slots)

    def add_embedding(self, module: str, ids_T: torch.Tensor, y_TD: torch.Tensor) -> None:
        """See RowwiseDeltas."""
        from compute_worker.kernels.dense_lora import add_embedding_delta

        if module in self.touched:
            assert self.adapter_slots is not None
            add_embedding_delta(self._table, module, ids_T, y_TD, self.adapter_slots)


class LaunchKey:
    """The key of the module docstring. A listener of AdapterPool that comes after the others.

    Args:
        layers: by number, with experts of the Triton backend.
        rowwise: of the dense modules.
    """

    def __init__(self, layers: Mapping[int, ExpertLayer], rowwise: RowwiseAdapters) -> None:
        self.rowwise = rowwise
        self._layers = layers
        self._slots: set[int] = set()
        self._key: Hashable = None

    def __call__(self) -> Hashable:
        """None without adapters."""
        return self._key

    @contextmanager
    def everything_touched(self) -> Iterator[None]:
        """While it lasts, steps have the launches of adapters with pairs everywhere. There must be no adapter."""
        assert not self._slots
        for experts in self._experts():
            experts.has_adapters = True
        self.rowwise.touch_all()
        try:
            yield
        finally:
            self._forget()

    def set_adapter(self, adapter_slot: int, adapter: AdapterTensors) -> None:
        """See AdapterListener."""
        self._slots.add(adapter_slot)
        ranks = tuple(experts.max_lora_rank if experts.has_adapters else 0 for experts in self._experts())
        self._key = (ranks, self.rowwise.touched)

    def clear_adapter(self, adapter_slot: int) -> None:
        """See AdapterListener."""
        self._slots.discard(adapter_slot)
        if not self._slots:
            self._forget()

    def _experts(self) -> list[TritonLayerExperts]:
        """They change when experts move."""
        from compute_worker.experts_triton import TritonLayerExperts

        return [layer.experts for layer in self._layers.values() if isinstance(layer.experts, TritonLayerExperts)]

    def _forget(self) -> None:
        for experts in self._experts():
            experts.forget_adapters()
        self.rowwise.forget()
        self._key = None
