"""The sort and its tiles against a plain stable sort, for both the one-launch and the counting path."""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from compute_worker.kernels import route as route_module
from compute_worker.kernels.route import build_route
from tests.kernels.cases import DEVICE


def _check(expert_TK, slot_T, num_experts, num_slots, block_m, pair_block_m, extra_m):
    route = build_route(expert_TK, slot_T, num_experts=num_experts, num_slots=num_slots, block_m=block_m,
                        pair_block_m=pair_block_m, extra_m=extra_m)  # fmt: skip
    top_k = expert_TK.shape[1]
    rows = [(e * (num_slots + 1) + int(slot_T[i // top_k]) + 1, i) for i, e in enumerate(expert_TK.flatten().tolist())]
    order = sorted(r for r, e in zip(rows, expert_TK.flatten().tolist(), strict=True) if e >= 0)
    bins = [b for b, _ in order]
    bin_of = {row: b for b, row in order}
    got_rows = route.sorted_row[: len(order)].tolist()
    assert [bin_of[r] for r in got_rows] == bins
    assert sorted(got_rows) == sorted(i for _, i in order)
    assert route.row_bin[: len(order)].tolist() == bins
    pos = route.row_pos.tolist()
    assert all(pos[r] == p for p, r in enumerate(got_rows))
    assert all(pos[i] == -1 for i in set(range(len(rows))) - set(got_rows))

    def cut(keys, size, extra=0):
        tiles, p = [], 0
        for key, run in itertools.groupby(keys):
            left = len(list(run))
            while left > 0:
                count = left if left <= size + extra else size
                tiles.append((key, p, count))
                p, left = p + count, left - count
        return tiles

    num_tiles, num_pairs = route.header.tolist()
    assert route.tile_done[:num_tiles].count_nonzero() == 0
    base = zip(route.tile_expert.tolist(), route.tile_start.tolist(), route.tile_count.tolist(), strict=True)
    assert list(base)[:num_tiles] == cut([b // (num_slots + 1) for b in bins], block_m, extra_m)
    for tile, (_, start, count) in enumerate(cut([b // (num_slots + 1) for b in bins], block_m, extra_m)):
        first = tile * (block_m + extra_m)
        assert route.tile_row[first : first + count].tolist() == got_rows[start : start + count]
    pairs = zip(route.pair_bin.tolist(), route.pair_start.tolist(), route.pair_count.tolist(), strict=True)
    assert [t for t in list(pairs)[:num_pairs] if t[2] > 0] == cut(bins, pair_block_m)


@pytest.mark.parametrize("small_rows", [2048, 0], ids=["one_launch", "counting"])
@pytest.mark.parametrize("extra_m", [0, 4])
@pytest.mark.parametrize("tokens, experts, slots", [(1, 3, 0), (5, 2, 1), (30, 5, 3), (40, 2, 2)])
def test_route_matches_a_stable_sort(monkeypatch, small_rows, tokens, experts, slots, extra_m):
    """16 rows a base tile, an expert's last with up to extra_m more."""
    monkeypatch.setattr(route_module, "SMALL_ROWS", small_rows)
    g = torch.Generator().manual_seed(tokens)
    expert = torch.randint(-1, experts, (tokens, 2), generator=g).to(torch.int32).to(DEVICE)
    slot = torch.randint(-1, slots, (tokens,), generator=g).to(torch.int32).to(DEVICE)
    _check(expert, slot, experts, slots, block_m=16, pair_block_m=16, extra_m=extra_m)


def test_more_bins_than_the_scan_holds_at_once(monkeypatch):
    """5 experts and 3 slots, 20 bins, two at a time, whose rows 4 counters count."""
    monkeypatch.setattr(route_module, "SMALL_ROWS", 0)
    monkeypatch.setattr(route_module, "_ALL_COUNTERS", 8)
    g = torch.Generator().manual_seed(7)
    expert = torch.randint(-1, 5, (400, 3), generator=g).to(torch.int32).to(DEVICE)
    slot = torch.randint(-1, 3, (400,), generator=g).to(torch.int32).to(DEVICE)
    _check(expert, slot, 5, 3, block_m=16, pair_block_m=16, extra_m=0)


@pytest.mark.parametrize("small_rows", [2048, 0], ids=["one_launch", "counting"])
def test_example_of_the_module(monkeypatch, small_rows):
    monkeypatch.setattr(route_module, "SMALL_ROWS", small_rows)
    expert = torch.tensor([[1], [0], [1], [1]], dtype=torch.int32, device=DEVICE)
    slot = torch.tensor([0, -1, -1, 0], dtype=torch.int32, device=DEVICE)
    route = build_route(expert, slot, num_experts=2, num_slots=2, block_m=2, pair_block_m=2)
    assert route.row_bin.tolist() == [0, 3, 4, 4]
    assert route.row_pos[:3].tolist() in ([2, 0, 1], [3, 0, 1])
    assert route.tile_start[:3].tolist() == [0, 1, 3]
    assert route.tile_count[:3].tolist() == [1, 2, 1]
