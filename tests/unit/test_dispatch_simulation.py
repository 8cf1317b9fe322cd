"""The simulation of dispatch on more ranks counts what the dispatchers send, and docs/scaling.md is what it says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.dispatch_costs import MODELS, Links, Model, OneSided, destinations, simulate
from benchmarks.dispatch_simulation import LINKS, RESULTS, document, errors_at_two
from compute_worker.dispatch.packed_rows import pack_tokens

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
FIGURES = json.loads(LINKS.read_text())


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("with_slot", [True, False])
def test_row_bytes_are_those_of_packed_rows(model: Model, with_slot: bool) -> None:
    x_TD = torch.zeros((1, model.hidden), dtype=torch.bfloat16)
    ids_TK = torch.zeros((1, model.top_k), dtype=torch.int64)
    extras = {"slot": torch.zeros(1, dtype=torch.int32)} if with_slot else {}
    _, rows = pack_tokens(x_TD, ids_TK.float(), ids_TK, extras, num_rows=1)
    assert model.row_bytes(with_slot=with_slot) == rows.shape[1]


@pytest.mark.parametrize("num_ranks", [2, 8, 64])
def test_ranks_reached_are_those_of_the_formula(num_ranks: int) -> None:
    """A rank is needed unless all K experts are among the others'."""
    model = MODELS[0]
    per_rank = model.num_experts // num_ranks
    missed = math.comb(model.num_experts - per_rank, model.top_k) / math.comb(model.num_experts, model.top_k)
    drawn = destinations(model, num_ranks, 256, gpus_per_host=8)
    assert drawn.same_host + drawn.other_hosts == pytest.approx((num_ranks - 1) * (1 - missed), rel=0.02)
    assert (drawn.other_hosts > 0) == (num_ranks > 8)


def test_measured_points_come_back() -> None:
    links, measured = Links(FIGURES), FIGURES["measured"]
    for model in MODELS:
        times = measured["allgather_us"][str(model.hidden)]
        for num_tokens, us in zip(measured["tokens_per_rank"], times, strict=True):
            assert links.two_gpus_us(num_tokens * model.result_bytes) == pytest.approx(us)
            # The whole of two ranks' dispatch and combine, against what was measured of both.
            cost = simulate(links, model, "allgather_reducescatter", 2, num_tokens)
            index = measured["tokens_per_rank"].index(num_tokens)
            both = [measured[kind][str(model.hidden)][index] for kind in ("packed_row_us", "reduce_scatter_us")]
            assert cost.total_us == pytest.approx(sum(both), rel=0.15)


def test_more_ranks_and_tokens_cost_more() -> None:
    links = Links(FIGURES)
    for model in MODELS:
        for backend in ("allgather_reducescatter", "all_to_all"):
            by_ranks = [simulate(links, model, backend, ranks, 64).links_us for ranks in (2, 8, 16, 64, 256)]
            assert by_ranks == sorted(by_ranks)
            by_tokens = [simulate(links, model, backend, 64, tokens).links_us for tokens in (1, 8, 64, 256)]
            assert by_tokens == sorted(by_tokens)


def one_sided_cell(hidden: int, num_tokens: int, us: float) -> dict[str, object]:
    """Dispatch and combine take as long."""
    return {
        "backend": "one_sided",
        "hidden": hidden,
        "tokens_per_rank": num_tokens,
        "with_slots": True,
        "dispatch_us": us,
        "combine_us": us,
    }


def test_one_sided_takes_what_as_many_bytes_took() -> None:
    links, model = Links(FIGURES), MODELS[0]
    cells = [one_sided_cell(model.hidden, num_tokens, us) for num_tokens, us in ((64, 6.0), (256, 10.0))]
    one_sided = OneSided(links, cells)
    assert one_sided.layer_us(model, 2, 256) == pytest.approx(20, rel=0.01)
    assert one_sided.layer_us(model, 2, 4 * 256) == pytest.approx(80, rel=0.03)
    assert 12 < one_sided.layer_us(model, 2, 128) < 20
    assert one_sided.layer_us(model, 8, 64) > one_sided.layer_us(model, 2, 64)
    assert one_sided.layer_us(model, 16, 64) is None
    assert OneSided(links, []).layer_us(model, 2, 64) is None
    # Without the cell that it is compared with: 256 tokens in proportion to 64.
    errors = errors_at_two(links, {"cells": cells})
    assert [row["ratio"] for row in errors] == [pytest.approx(10 / 6, rel=0.01), pytest.approx(2.4, rel=0.03)]
    # A layer that was timed as one graph is what counts.
    errors = errors_at_two(links, {"cells": [{**cell, "layer_us": 10.0} for cell in cells]})
    assert [row["measured_us"] for row in errors] == [10.0, 10.0]


def test_the_page_says_what_was_measured() -> None:
    results = json.loads(RESULTS.read_text())
    as_one = {**results, "cells": [{**cell, "layer_us": 1.0} for cell in results["cells"]]}
    assert "Measured is a layer as one graph" in document(Links(FIGURES), FIGURES, as_one).replace("\n", " ")


def test_the_page_is_what_the_simulation_says() -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else None
    expected = document(Links(FIGURES), FIGURES, results)
    assert PAGE.read_text() == expected, "run python -m benchmarks.dispatch_simulation --docs docs/scaling.md"
