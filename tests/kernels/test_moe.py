"""The whole expert layer against its fp32 reference, both paths, every kind of row and adapter."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from compute_worker.kernels import Activation, GemmTile, MoEConfig, moe, moe_reference
from compute_worker.kernels import config as moe_config
from compute_worker.kernels import route as route_module
from tests.kernels.cases import (
    DEVICE,
    DTYPE,
    TOLERANCE,
    Shape,
    make_adapter,
    make_batch,
    make_table,
    make_weights,
    relative_error,
)

_TILE = GemmTile(block_n=32, block_k=32, num_warps=4, num_stages=2)
_WIDE_TILE = GemmTile(block_n=64, block_k=64, num_warps=4, num_stages=2)
SPLIT = MoEConfig(block_m=16, pair_block_m=16, fused=False, gate_up=_TILE, down=_TILE, block_f=32, block_d=32,
                  shrink_block_k=32)  # fmt: skip
CONFIGS = {
    "split": SPLIT,
    "split_swapped": dataclasses.replace(
        SPLIT, gate_up=dataclasses.replace(_TILE, block_n=64, swap=True), down=dataclasses.replace(_TILE, swap=True)
    ),
    "grouped": dataclasses.replace(
        SPLIT, block_m=32, expand_down="grouped", block_f=16, span=2, gate_up=_WIDE_TILE, down=_WIDE_TILE
    ),
    "fused": dataclasses.replace(
        SPLIT, block_m=32, tail_m=16, fused=True, expand_down="epilogue", down=_WIDE_TILE, shrink_block_k=64
    ),
    "fused_32_columns": dataclasses.replace(
        SPLIT,
        block_m=32,
        tail_m=16,
        fused=True,
        expand_down="epilogue",
        delta_columns=32,
        pdl=True,
        base_pdl=True,
        gate_up=dataclasses.replace(_TILE, n_fastest=True),
        down=dataclasses.replace(_WIDE_TILE, n_fastest=True),
    ),
    "split_pdl": dataclasses.replace(SPLIT, pdl=True),
}
FULL = {"gate": [16] * 4, "up": [16] * 4, "down": [16] * 4}
MIXED = {"gate": [1, 3, 8, 16], "up": [64, 0, 1, 3], "down": [3, 64, 16, 8]}
SHARED_A = {"gate_up": [8, 1, 16, 3], "down": [16, 3, 8, 1]}
WHOLE_BLOCKS = {
    0: (FULL, 1),
    1: ({"gate": [8, 24, 64, 16], "up": [64, 0, 8, 16], "down": [16, 64, 0, 8]}, 2),
    2: ({"gate_up": [8, 72, 16, 0], "down": [24, 0, 8, 16]}, 3),
    3: ({"down": [8] * 4}, 4),
}
"""Ranks that are multiples of 8: in a GEMM's epilogue they are columns side by side."""
ADAPTERS = {0: (FULL, 1), 1: (MIXED, 2), 3: (SHARED_A, 3), 4: ({"down": [0, 5, 0, 2]}, 4), 5: ({"up": [7, 0, 0, 9]}, 5)}


def _run(shape, batch, config, adapters=ADAPTERS, num_slots=8, **kwargs):
    weights = make_weights(shape)
    built = {slot: make_adapter(shape, ranks, seed=seed) for slot, (ranks, seed) in adapters.items()}
    table = make_table(shape, built, num_slots, **kwargs)
    return moe(*batch, weights, table, config=config), moe_reference(*batch, weights, built)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("num_tokens", [1, 13])
def test_mixed_adapters_match_reference(name, num_tokens):
    """Ranks 1 to 64, shared A, single projections, absent experts, base rows and unused slots in one batch."""
    shape = Shape()
    batch = make_batch(shape, num_tokens, [1, -1, 0, 3, 4, 5])
    got, expected = _run(shape, batch, CONFIGS[name])
    assert relative_error(got, expected) < TOLERANCE
    base = batch[3] == -1
    assert not base.any() or relative_error(got[base], expected[base]) < TOLERANCE


@pytest.mark.parametrize("name", ["split", "grouped"])
@pytest.mark.parametrize("num_tokens", [1, 13])
def test_narrow_adapters_beside_wide_ones(name, num_tokens):
    """Ranks 4, 8 and 16 in a table of rank 64, columns that no whole number of wide blocks covers, base rows."""
    shape = Shape(hidden_size=176)
    narrow = {"gate": [8, 16, 8, 16], "up": [16, 8, 8, 8], "down": [8, 16, 8, 16]}
    odd = {"gate": [4] * 4, "up": [4] * 4, "down": [4] * 4}
    wide = {"gate": [64] * 4, "up": [64] * 4, "down": [64] * 4}
    for slots in ([0], [-1], [1, 0, -1, 2]):
        batch = make_batch(shape, num_tokens, slots)
        got, expected = _run(shape, batch, CONFIGS[name], {0: (narrow, 1), 1: (wide, 2), 2: (odd, 3)})
        assert relative_error(got, expected) < TOLERANCE
        base = batch[3] == -1
        alone = moe(*batch[:3], torch.full_like(batch[3], -1), make_weights(shape), config=CONFIGS[name])
        assert torch.equal(got[base], alone[base])


@pytest.mark.parametrize("name, interleaved", [("split", False), ("fused", True), ("fused_32_columns", True)])
def test_ranks_of_whole_blocks_match_reference(name, interleaved):
    """More adapters in a tile than one step of the epilogue takes, and one of more ranks than a step."""
    shape = Shape(interleaved=interleaved)
    batch = make_batch(shape, 13, [1, -1, 0, 2, 3, 2, 1])
    got, expected = _run(shape, batch, CONFIGS[name], WHOLE_BLOCKS, max_lora_rank=128)
    assert relative_error(got, expected) < TOLERANCE


def _check_with_and_without(shape, batch, config):
    """With adapters, and base rows without a table too, as the reference; base rows have the same bits in both."""
    got, expected = _run(shape, batch, config, WHOLE_BLOCKS, max_lora_rank=128)
    assert relative_error(got, expected) < TOLERANCE
    base_rows = batch[3] == -1
    base = moe(*batch[:3], torch.full_like(batch[3], -1), make_weights(shape), None, config=config)
    assert relative_error(base[base_rows], expected[base_rows]) < TOLERANCE
    # The interpreter multiplies by numpy, whose sums depend on how many rows a product has.
    assert DEVICE.type == "cpu" or torch.equal(base[base_rows], got[base_rows])


@pytest.mark.parametrize("name", ["fused", "fused_32_columns"])
def test_a_last_tile_of_few_rows(name):
    """69 rows of an expert take bodies of 64 and 16, weights by descriptors; two programs share a shrink's sum."""
    tile = dataclasses.replace(_TILE, tma=True)
    config = dataclasses.replace(
        CONFIGS[name], block_m=64, gate_up=tile, down=dataclasses.replace(tile, block_n=16), shrink_splits=2,
        shrink_block_k=32,
    )  # fmt: skip
    shape = Shape(top_k=1)
    batch = make_batch(shape, 70, [0, 1, 3, -1])
    batch[1][:] = 1
    batch[1][-1] = 3
    _check_with_and_without(shape, batch, config)


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("num_rows", [64, 65, 80, 81, 96, 97])
def test_a_last_tile_of_more_rows(num_rows, tma):
    """Up to 16 or 32 rows more than the 64 of a tile, or of its second, with deltas and, in one product, without."""
    tile, extra = dataclasses.replace(_TILE, tma=tma), 16 if num_rows < 90 else 32
    config = dataclasses.replace(
        CONFIGS["fused"], block_m=64, extra_m=extra, lora_extra_m=extra, gate_up=tile,
        down=dataclasses.replace(tile, block_n=16),
    )  # fmt: skip
    shape = Shape(top_k=1, biased=True)
    batch = make_batch(shape, num_rows + 64, [0, 1, 3, -1])
    batch[1][:num_rows] = 1
    batch[1][num_rows:] = 2
    _check_with_and_without(shape, batch, config)


def _shipped_tiles():
    """Every configuration that ships for an H200, by shape and bucket."""
    path = Path(moe_config.__file__).parent / "configs" / "NVIDIA_H200.json"
    return {
        f"{shape.split('_')[0]} {bucket}": MoEConfig.from_dict(values)
        for shape, buckets in json.loads(path.read_text()).items()
        for bucket, values in buckets.items()
    }


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="numpy's sums depend on how many rows a product has")
@pytest.mark.parametrize("name", _shipped_tiles())
def test_bits_of_a_row_do_not_depend_on_its_place(name):
    """A row of a real configuration is the same in a full tile, a last one of few rows and one of more."""
    config = _shipped_tiles()[name]
    shape = Shape(top_k=1, hidden_size=512, intermediate_size=512)
    weights = make_weights(shape)
    rows = config.block_m + max(config.extra_m, config.tail_m, 8) + 3
    x, expert, weight, slot = make_batch(shape, rows, [-1])
    expert[:] = 1
    whole = moe(x, expert, weight, slot, weights, None, config=config)
    for first, count in ((0, 2), (0, config.tail_m or 3), (3, config.block_m), (2, config.block_m + config.extra_m),
                         (rows - 5, 5)):  # fmt: skip
        part = slice(first, first + count)
        alone = moe(x[part], expert[part], weight[part], slot[part], weights, None, config=config)
        assert torch.equal(alone, whole[part]), (first, count)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs programs that run side by side")
@pytest.mark.parametrize("top_k", [1, 8])
@pytest.mark.parametrize("bucket", ["256", "1024", "4096"])
def test_down_tiles_that_begin_early_find_their_rows_complete(bucket, top_k):
    """A down GEMM of several rounds of programs, replayed with new rows each time, as one that begins after gate/up."""
    config = _shipped_tiles()[f"e128of128 {bucket}"]
    assert config.base_pdl
    shape = Shape(num_experts=16, top_k=top_k, hidden_size=2048, intermediate_size=768)
    weights = make_weights(shape)
    x, expert, weight, slot = make_batch(shape, 4096, [-1])

    def run(config):
        return moe(x, expert, weight, slot, weights, None, config=config)

    run(config)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [run(config) for _ in range(3)]
    g = torch.Generator(DEVICE).manual_seed(1)
    for _ in range(20):
        x.normal_(generator=g)
        expert.copy_(torch.rand(len(x), 16, device=DEVICE, generator=g).topk(top_k, dim=1).indices)
        after = run(dataclasses.replace(config, base_pdl=False))
        graph.replay()
        assert all(torch.equal(out, after) for out in outs)


@pytest.mark.parametrize("name", ["split", "split_pdl", "fused", "fused_32_columns"])
@pytest.mark.parametrize(
    "slot, remote", [(0, None), (1, 0), (9, None)], ids=["adapter", "remote_expert", "no_such_slot"]
)
def test_one_token_needs_no_sort(name, slot, remote):
    shape = Shape(top_k=3)
    batch = make_batch(shape, 1, [slot])
    if remote is not None:
        batch[1][0, remote] = -1
    got, expected = _run(shape, batch, CONFIGS[name], WHOLE_BLOCKS, max_lora_rank=128)
    if slot == 9:
        assert torch.isnan(got).all()
    else:
        assert relative_error(got, expected) < TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
def test_base_rows_are_bit_equal_whatever_adapters_share_the_batch(name):
    shape = Shape()
    x, expert, weight, slot = make_batch(shape, 9, [-1, 0, 1])
    weights = make_weights(shape)
    adapter = make_adapter(shape, FULL)
    poisoned = make_adapter(shape, MIXED, seed=2)
    # Deltas in a GEMM's epilogue multiply every row of the tile; adapters are finite there by contract.
    poison = float("nan") if not CONFIGS[name].fused else 1e30
    for piece in poisoned.values():
        piece.b.fill_(poison)
    table = make_table(shape, {0: adapter, 1: poisoned}, 2)
    mixed = moe(x, expert, weight, slot, weights, table, config=CONFIGS[name])
    alone = moe(x, expert, weight, torch.full_like(slot, -1), weights, None, config=CONFIGS[name])
    base = slot == -1
    assert torch.equal(mixed[base], alone[base])
    assert torch.isfinite(mixed[slot == 0]).all()
    assert not (mixed[slot == 1].abs() < 1e20).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_all_rows_on_one_expert_and_experts_without_rows(name):
    shape = Shape(top_k=1)
    x, expert, weight, slot = make_batch(shape, 19, [0, 0, 1, -1])
    got, expected = _run(shape, (x, torch.full_like(expert, 2), weight, slot), CONFIGS[name])
    assert relative_error(got, expected) < TOLERANCE


@pytest.mark.parametrize("name", ["split", "split_pdl", "fused", "fused_32_columns"])
def test_remote_rows_add_nothing(name):
    """-1 anywhere: in some k of a token, and in all of them (that token's answer is zero)."""
    shape = Shape()
    x, expert, weight, slot = make_batch(shape, 7, [0, 1, -1])
    expert[0, 0] = expert[3, 1] = -1
    expert[4] = -1
    got, expected = _run(shape, (x, expert, weight, slot), CONFIGS[name])
    assert relative_error(got, expected) < TOLERANCE
    assert torch.equal(got[4], torch.zeros_like(got[4]))


def test_counting_route_in_both_paths(monkeypatch):
    """The sort of large steps leaves undefined tile entries past its counts; nothing may read them."""
    monkeypatch.setattr(route_module, "SMALL_ROWS", 0)
    shape = Shape()
    x, expert, weight, slot = make_batch(shape, 6, [0, 1, -1])
    expert[2] = -1
    for name in ("grouped", "fused", "fused_32_columns"):
        got, expected = _run(shape, (x, expert, weight, slot), CONFIGS[name])
        assert relative_error(got, expected) < TOLERANCE


def test_only_remote_rows_and_zero_tokens():
    shape = Shape()
    x, expert, weight, slot = make_batch(shape, 3, [0, -1])
    got, _ = _run(shape, (x, torch.full_like(expert, -1), weight, slot), SPLIT)
    assert torch.equal(got, torch.zeros_like(x))
    none = (x[:0], expert[:0], weight[:0], slot[:0])
    assert moe(*none, make_weights(shape)).shape == (0, shape.hidden_size)


@pytest.mark.parametrize("name", ["split", "fused"])
@pytest.mark.parametrize("activation", list(Activation))
def test_activations_interleaved_rows_and_biases(name, activation):
    unusual = activation in (Activation.CLAMPED_SWIGLU, Activation.RELU2)
    shape = Shape(activation=activation, interleaved=activation == Activation.CLAMPED_SWIGLU, biased=unusual)
    batch = make_batch(shape, 5, [0, 1, -1])
    ranks = SHARED_A if activation.gated else {"up": [8, 1, 16, 3], "down": [16, 3, 8, 1]}
    separate = {"gate": [4] * 4, "up": [8] * 4} if activation.gated else {"up": [3] * 4}
    if name == "fused" and not activation.gated:
        with pytest.raises(ValueError, match="gated activation"):
            _run(shape, batch, CONFIGS[name], {0: (ranks, 1)})
        return
    got, expected = _run(shape, batch, CONFIGS[name], {0: (ranks, 1), 1: (separate, 2)})
    assert relative_error(got, expected) < TOLERANCE


def test_ranks_over_one_rank_block_and_uneven_blocks():
    """Rank 200 takes several rank blocks; D and F that no block divides take masked loads."""
    shape = Shape(hidden_size=80, intermediate_size=48, num_experts=2)
    ranks = {"gate": [200, 96], "up": [96, 200], "down": [200, 100]}
    for name in ("split", "split_pdl", "fused", "fused_32_columns"):
        batch = make_batch(shape, 5, [0, -1])
        got, expected = _run(shape, batch, CONFIGS[name], {0: (ranks, 1)}, 1, max_lora_rank=200)
        assert relative_error(got, expected) < TOLERANCE


def test_unknown_slot_answers_nan():
    shape = Shape()
    x, expert, weight, slot = make_batch(shape, 3, [-1, 2, 0])
    got, _ = _run(shape, (x, expert, weight, slot), SPLIT, {0: (FULL, 1)}, num_slots=2)
    assert torch.isnan(got[1]).all()
    assert torch.isfinite(got[[0, 2]]).all()


def test_slots_change_in_place():
    """The same table object serves another adapter, then none, without new launch arguments."""
    shape = Shape()
    batch = make_batch(shape, 4, [0])
    weights = make_weights(shape)
    first, second = (make_adapter(shape, FULL, seed=s) for s in (1, 2))
    table = make_table(shape, {0: first}, 1)
    for adapters in ({0: first}, {0: second}, {}):
        if adapters:
            table.set_slot(0, adapters[0])
        else:
            table.clear_slot(0)
        got = moe(*batch, weights, table, config=SPLIT)
        assert relative_error(got, moe_reference(*batch, weights, adapters)) < TOLERANCE


def test_half_precision_and_chosen_config():
    shape, dtype = Shape(), torch.float16
    batch = make_batch(shape, 4, [0, -1], dtype=dtype)
    weights = make_weights(shape, dtype=dtype)
    adapter = make_adapter(shape, FULL, dtype=dtype)
    got = moe(*batch, weights, make_table(shape, {0: adapter}, 1, dtype=dtype))
    assert got.dtype == dtype
    assert relative_error(got, moe_reference(*batch, weights, {0: adapter})) < 5e-3


def test_wrong_arguments_are_named():
    shape = Shape()
    x, expert, weight, slot = make_batch(shape, 2, [0])
    weights = make_weights(shape)
    with pytest.raises(ValueError, match="adapter_slot_T: expected"):
        moe(x, expert, weight, slot[:1], weights)
    with pytest.raises(ValueError, match="x: expected"):
        moe(x[:, :16].contiguous(), expert, weight, slot, weights)
    with pytest.raises(ValueError, match="adapter table is for"):
        moe(x, expert, weight, slot, weights, make_table(Shape(num_experts=3), {}, 1))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("name", CONFIGS)
def test_graph_replay_sees_new_adapters_and_routing(name):
    shape = Shape(hidden_size=128, intermediate_size=64)
    batch = make_batch(shape, 16, [0, 1, -1])
    weights = make_weights(shape)
    built = {s: make_adapter(shape, FULL, seed=s + 1) for s in (0, 1)}
    table = make_table(shape, built, 2)
    moe(*batch, weights, table, config=CONFIGS[name])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe(*batch, weights, table, config=CONFIGS[name])
    for seed in (5, 6):
        new = {0: make_adapter(shape, MIXED, seed=seed), 1: make_adapter(shape, FULL, seed=seed + 10)}
        for slot, adapter in new.items():
            table.set_slot(slot, adapter)
        for target, source in zip(batch, make_batch(shape, 16, [1, -1, 0], seed=seed), strict=True):
            target.copy_(source)
        graph.replay()
        first = out.clone()
        assert relative_error(first, moe_reference(*batch, weights, new)) < TOLERANCE
        graph.replay()
        assert torch.equal(out, first)
    assert batch[0].dtype == DTYPE
