"""Placements from loads: even memory, every expert placed, the busiest rank relieved."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epilora.balance import balanced_placement, logical_load, num_copies, rank_loads, spread
from epilora.errors import InvalidArgumentError
from epilora.placement import ExpertPlacement, check_table


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int, int]:
    load = draw(st.lists(st.integers(0, 1000), min_size=1, max_size=24))
    num_ranks = draw(st.integers(1, 6))
    return load, num_ranks, draw(st.integers(0, min(12, len(load) * (num_ranks - 1))))


@settings(max_examples=300, deadline=None)
@given(problems())
def test_every_placement_is_valid_and_memory_is_even(problem: tuple[list[int], int, int]) -> None:
    load, num_ranks, num_redundant = problem
    placement = balanced_placement({3: load}, num_ranks=num_ranks, num_redundant_experts=num_redundant)
    ranks = [placement.local_experts(3, rank) for rank in range(num_ranks)]
    check_table(ranks, len(load), num_ranks, where="balanced")
    sizes = [len(experts) for experts in ranks]
    assert sum(sizes) == len(load) + num_redundant
    assert max(sizes) - min(sizes) <= 1
    assert rank_loads(placement, load, 3).sum() == pytest.approx(sum(load))
    # No rank can do better than the mean, nor than the busiest expert's share of one copy.
    best = max(sum(load) / num_ranks, *(r / c for r, c in zip(load, placement.num_copies(3), strict=True)))
    assert rank_loads(placement, load, 3).max() >= best - 1e-9


def test_copies_of_the_docstring() -> None:
    assert num_copies([90, 30, 30], 5, 3) == [3, 1, 1]
    assert num_copies([90, 30, 30], 4, 2) == [2, 1, 1]
    assert num_copies([0, 0, 0], 5, 3) == [2, 2, 1]


def test_a_skewed_load_is_spread() -> None:
    rng = np.random.default_rng(0)
    load = {layer: np.sort(rng.zipf(1.5, 64).clip(max=5000))[::-1].tolist() for layer in range(4)}
    linear = ExpertPlacement(
        strategy="linear",
        num_ranks=8,
        tables=dict.fromkeys(load, tuple(tuple(range(8 * r, 8 * r + 8)) for r in range(8))),
    )
    plain = balanced_placement(load, num_ranks=8, num_redundant_experts=0)
    with_copies = balanced_placement(load, num_ranks=8, num_redundant_experts=16)
    assert spread(with_copies, load) < spread(plain, load) < spread(linear, load)
    assert spread(with_copies, load) < 1.05
    assert balanced_placement(load, num_ranks=8, num_redundant_experts=16) == with_copies


def test_an_even_load_stays_even() -> None:
    placement = balanced_placement({0: [5] * 8}, num_ranks=4, num_redundant_experts=0)
    assert spread(placement, {0: [5] * 8}) == 1.0
    assert spread(placement, {0: [0] * 8}) == 1.0


def test_counts_of_copies_are_added_up() -> None:
    placement = ExpertPlacement(strategy="explicit", num_ranks=2, tables={0: ((1, 0), (1, 2)), 1: ((0,), (1, 2))})
    rows = [{0: [10, 1], 1: [4]}, {0: [20, 2], 1: [5, 6]}]
    assert logical_load(placement, rows) == {0: [1, 30, 2], 1: [4, 5, 6]}
    assert rank_loads(placement, [1, 30, 2], 0).tolist() == [16.0, 17.0]


@pytest.mark.parametrize(("num_ranks", "num_redundant"), [(2, 4), (2, -1), (0, 0), (1, 1)])
def test_refusals(num_ranks: int, num_redundant: int) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        balanced_placement({0: [1, 2, 3]}, num_ranks=num_ranks, num_redundant_experts=num_redundant)
    assert caught.value.reason == "BAD_PLACEMENT"
