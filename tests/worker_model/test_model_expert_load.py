"""Rows are counted by layer, slot and adapter; those of an adapter that is gone stay in the sum alone."""

from __future__ import annotations

import torch

from compute_worker.expert_load import ExpertLoad, LoadOfAdapters


def count(load: ExpertLoad, layer: int, adapter_slots: list[int], slots: list[list[int]]) -> None:
    load.counter(layer).add(torch.tensor(slots), torch.tensor(adapter_slots, dtype=torch.int32))
    load._read_at = 0.0
    load.refresh(worked=True)


def test_rows_by_layer_slot_and_adapter() -> None:
    load = ExpertLoad({1: 2, 4: 0, 5: 3}, 2, torch.device("cpu"))
    assert load.rows == {1: (0, 0), 4: (), 5: (0, 0, 0)}
    count(load, 1, [-1, 0, 1], [[0, 1], [1, -1], [1, 0]])
    count(load, 5, [1, 1], [[2, -1], [2, 0]])
    count(load, 4, [0], [[-1, -1]])
    assert load.rows == {1: (2, 3), 4: (), 5: (1, 0, 2)}
    assert load.rows_of(-1) == {1: (1, 1), 4: (), 5: (0, 0, 0)}
    assert load.rows_of(0) == {1: (0, 1), 4: (), 5: (0, 0, 0)}
    assert load.rows_of(1) == {1: (1, 1), 4: (), 5: (1, 0, 2)}


def test_a_slot_begins_anew_with_its_next_adapter() -> None:
    load = ExpertLoad({0: 2}, 3, torch.device("cpu"))
    listener = LoadOfAdapters(lambda: load)
    count(load, 0, [2, 2, 0], [[0], [1], [1]])
    listener.clear_adapter(2)
    # At once, and after the next look at the device.
    for _ in range(2):
        assert (load.rows_of(2), load.rows_of(0)) == ({0: (0, 0)}, {0: (0, 1)})
        assert load.rows == {0: (1, 2)}
        load._read_at = 0.0
        load.refresh(worked=True)
    count(load, 0, [2], [[1]])
    assert (load.rows_of(2), load.rows) == ({0: (0, 1)}, {0: (1, 3)})


def test_no_tokens() -> None:
    load = ExpertLoad({0: 1}, 1, torch.device("cpu"))
    load.counter(0).add(torch.empty((0, 2), dtype=torch.int64), torch.empty(0, dtype=torch.int32))
    assert load.rows == {0: (0,)}
