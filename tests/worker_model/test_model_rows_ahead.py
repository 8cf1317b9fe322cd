"""Rows of the kernels' tables made while an adapter is staged: those that the step thread would make itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from worker_model_support import Rank, random_adapter, small_config, write_model

from compute_worker.experts_triton import TritonLayerExperts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_rows_made_ahead_are_those_made_in_place(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "moe_intermediate_size": 16, "num_experts": 4}
    write_model(small_config("qwen3_moe", **sizes), tmp_path / "model")
    rank = Rank(tmp_path / "model", work=tmp_path, expert_backend="triton", device=DEVICE)
    rank.add_adapter(random_adapter(rank.spec, 1, rank_of={"gate": 2, "up": 17, "down": 1}), slot=0, work=tmp_path)
    adapter = rank.runner.pool.active()[0]
    assert adapter.rows is not None
    assert adapter.rows.experts.keys() == adapter.layers.keys()
    assert adapter.rows.dense is not None
    launch_key = rank.runner._launch_key
    assert launch_key is not None
    launch_key.rowwise.set_adapter(1, replace(adapter, rows=None))
    for number, pairs in adapter.layers.items():
        experts = rank.runner._layers[number].experts
        assert isinstance(experts, TritonLayerExperts)
        assert experts.max_lora_rank == 32
        experts.set_adapter(1, pairs)
        for field in ("lora_rank", "a_address", "b_address", "scale"):
            table = getattr(experts._table.pointers, field)
            assert torch.equal(table[0], table[1]), (number, field)
            assert table[0].any(), (number, field)
    for values in launch_key.rowwise._table.pointers:
        assert torch.equal(values[0], values[1])
        assert values[0].any()
