"""Rows are counted while a service runs, whatever carries them, and a placement made from them can be served."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from epilora.cli.app import app
from epilora.v1 import cluster_service_pb2
from tests.service.harness import Service

PROMPT = [5, 9, 2, 7, 11, 3]
COUNTED_SECONDS = 20.0


@pytest.mark.soak
def test_counted_rows_become_a_placement(start_service: Callable[..., Service], models: Path, tmp_path: Path) -> None:
    model = models / "qwen3moe-T"
    service = start_service(model, ranks=2, args=["--dispatch", "all_to_all"])
    tokens = service.tokens(PROMPT, "")
    info = service.cluster().GetTopology(cluster_service_pb2.GetTopologyRequest(), timeout=10).groups[0].model
    # The last token that is generated is never computed.
    expected = (len(PROMPT) + len(tokens) - 1) * info.num_experts_per_token
    deadline = time.monotonic() + COUNTED_SECONDS
    while True:
        load = service.cluster().GetExpertLoad(cluster_service_pb2.GetExpertLoadRequest(), timeout=10)
        if all(sum(layer.expert_rows) == expected for layer in load.layers):
            break
        assert time.monotonic() < deadline, load
        time.sleep(0.1)
    assert [layer.layer for layer in load.layers] == list(info.moe_layers)
    assert all(sum(layer.rank_rows) == expected for layer in load.layers)

    placement = tmp_path / "placement.json"
    arguments = ["plan", "--model", str(model), "--ranks", "2", "--load-from", service.address, "--redundant", "2"]
    planned = CliRunner().invoke(app, [*arguments, "--save", str(placement), "--json"])
    assert planned.exit_code == 0, planned.output
    report = json.loads(planned.stdout)
    assert report["spread_planned"] <= report["spread_now"]
    assert sum(rank["num_experts"] for rank in report["ranks"]) == len(info.moe_layers) * (info.num_experts + 2)
    service.stop()

    moved = start_service(model, ranks=2, args=["--placement", str(placement)])
    assert moved.tokens(PROMPT, "") == tokens
    memory = moved.memory()
    assert [rank.base_expert_bytes for rank in memory] == [rank["base_expert_bytes"] for rank in report["ranks"]]
