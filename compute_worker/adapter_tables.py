"""Keeps the kernels' tables at the adapters that are active: experts layer by layer, and dense modules.

What launches the adapters need is their key: modules with a pair, and limits of lora ranks. It only grows while there
are adapters, so that loading and unloading in turn does not capture graphs again and again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from compute_worker.adapter_buffers import AdapterRows, AdapterTensors
from compute_worker.dense_lora import DensePair, DenseTokens
from compute_worker.expert_layer import ExpertLayer
from compute_worker.experts_base import LayerPairs
from compute_worker.model_probe import ModelProbe
from compute_worker.step_context import group_by_slot

if TYPE_CHECKING:
    from compute_worker.experts_triton import TritonLayerExperts
    from compute_worker.kernels.adapter_table import TableRows
    from compute_worker.kernels.dense_lora import DensePointers


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


class RowsAhead:
    """Makes the rows of the kernels' tables when an adapter is staged, so that its activation takes a few launches.

    Args:
        layers: by number.
        rowwise: of the dense modules; None without.
        device: of the tables.
    """

    def __init__(
        self, layers: Mapping[int, ExpertLayer], rowwise: RowwiseAdapters | None, device: torch.device
    ) -> None:
        self._layers = layers
        self._rowwise = rowwise
        self._device = device

    @torch.inference_mode()
    def __call__(self, adapter: AdapterTensors) -> AdapterTensors:
        """The adapter with its rows, on the device once the current stream gets there. Any thread."""
        from compute_worker.kernels.adapter_table import place_rows

        rows = {number: self._rows_of(number, pairs) for number, pairs in adapter.layers.items()}
        found = {number: row for number, row in rows.items() if row is not None}
        placed = place_rows(list(found.values()), self._device) if found else []
        dense = self._rowwise.rows_of(adapter) if self._rowwise is not None else None
        return replace(adapter, rows=AdapterRows(experts=dict(zip(found, placed, strict=True)), dense=dense))

    def _rows_of(self, number: int, pairs: LayerPairs) -> TableRows | None:
        from compute_worker.experts_triton import TritonLayerExperts

        experts = self._layers[number].experts
        if not isinstance(experts, TritonLayerExperts):
            return None
        num_experts = {len(pair.lora_rank) for pair in pairs.values()}
        # Experts that move at this moment: the step thread makes the rows, or the stage finds its placement gone.
        return experts.rows_of(pairs) if num_experts == {experts.num_experts} else None


class ExpertAdapters:
    """Hands each layer its pairs of an adapter. A listener of AdapterPool.

    Args:
        layers: by number.
    """

    def __init__(self, layers: Mapping[int, ExpertLayer]) -> None:
        self._layers = layers

    def set_adapter(self, adapter_slot: int, adapter: AdapterTensors) -> None:
        """See AdapterListener."""
        rows = adapter.rows.experts if adapter.rows is not None else {}
        for number, layer in self._layers.items():
            if number in rows:
                # Only the Triton backend makes rows.
                cast("TritonLayerExperts", layer.experts).set_rows(adapter_slot, rows[number])
            elif number in adapter.layers:
                layer.experts.set_adapter(adapter_slot, adapter.layers[number])

    def clear_adapter(self, adapter_slot: int) -> None:
        """See AdapterListener."""
        for layer in self._layers.values():
            layer.experts.clear_adapter(adapter_slot)


def _pairs_of(adapter: AdapterTensors) -> dict[str, DensePair]:
    return {module: pair for module, pair in adapter.dense.items() if isinstance(pair, DensePair)}


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
            pairs = _pairs_of(adapter)
            rows = adapter.rows.dense if adapter.rows is not None else None
            self._table.set_rows(adapter_slot, pairs, self._table.rows_of(pairs) if rows is None else rows)
            self.touched |= frozenset(pairs)

    def rows_of(self, adapter: AdapterTensors) -> DensePointers | None:
        """What the table will hold of an adapter; None for one that it does not take. Any thread."""
        return self._table.rows_of(_pairs_of(adapter)) if adapter.is_plain else None

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
