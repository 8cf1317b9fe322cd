"""Attention of one token per sequence over the paged cache, against its reference and the eager path's maths."""

import math

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="the kernels need triton")

from compute_worker.kernels import decode_attention as module
from compute_worker.kernels.decode_attention import decode_attention, decode_attention_reference, num_splits
from tests.kernels.cases import DEVICE, DTYPE, TOLERANCE, relative_error

_BLOCK = 16


def _case(kv_lens, *, heads=4, kv_heads=2, dk=16, dv=16, blocks=None, seed=0, dtype=DTYPE):
    """Random q, caches and tables of shuffled blocks; positions that no sequence has hold NaN."""
    g = torch.Generator().manual_seed(seed)
    width = blocks or max(1, -(-max(kv_lens) // _BLOCK))
    num_blocks = width * len(kv_lens) + 1
    table = torch.randperm(num_blocks - 1, generator=g)[: width * len(kv_lens)].view(len(kv_lens), width)
    values = torch.Generator(DEVICE).manual_seed(seed)
    k = torch.randn(num_blocks * _BLOCK, kv_heads, dk, generator=values, dtype=dtype, device=DEVICE)
    v = torch.randn(num_blocks * _BLOCK, kv_heads, dv, generator=values, dtype=dtype, device=DEVICE)
    used = torch.zeros(num_blocks * _BLOCK, dtype=torch.bool)
    for row, kv_len in zip(table.tolist(), kv_lens, strict=True):
        used[[row[p // _BLOCK] * _BLOCK + p % _BLOCK for p in range(kv_len)]] = True
        for b in range(-(-kv_len // _BLOCK), width):
            table[table.eq(row[b])] = num_blocks + 2**20  # a block that is not there: reading it would crash or show
    k[~used.to(DEVICE)] = v[~used.to(DEVICE)] = torch.nan
    q = torch.randn(len(kv_lens), heads, dk, generator=values, dtype=dtype, device=DEVICE)
    kv_len_S = torch.tensor(kv_lens, dtype=torch.int32, device=DEVICE)
    return q, k, v, table.to(torch.int32).to(DEVICE), kv_len_S


def _compare(case, tolerance=TOLERANCE, **limits):
    given = {"block_size": _BLOCK, "scaling": case[0].shape[2] ** -0.5, **limits}
    got, expected = decode_attention(*case, **given), decode_attention_reference(*case, **given)
    assert got.dtype == case[0].dtype
    assert torch.isfinite(expected).all()
    assert relative_error(got, expected) < tolerance
    return got


@pytest.mark.parametrize("splits", ["one", "many"])
@pytest.mark.parametrize("kv_lens", [[1], [300, 0, 1, 16, 129]], ids=["one_position", "mixed"])
def test_lengths_match_the_reference(monkeypatch, kv_lens, splits):
    """Parts that end inside a block, sequences with fewer positions than parts, a padding row, NaN past every end."""
    if splits == "one":
        monkeypatch.setattr(module, "TARGET_PROGRAMS", 1)
    got = _compare(_case(kv_lens))
    for s, kv_len in enumerate(kv_lens):
        assert kv_len or not got[s].any()


@pytest.mark.parametrize("splits", ["one", "many"])
@pytest.mark.parametrize(
    "limits", [{"window": 7}, {"window": 140}, {"chunk": 64}, {"chunk": 130}, {"window": 150, "chunk": 160}], ids=str
)
def test_windows_and_chunks(monkeypatch, limits, splits):
    if splits == "one":
        monkeypatch.setattr(module, "TARGET_PROGRAMS", 1)
    _compare(_case([300, 6, 129, 0], heads=2, kv_heads=1), **limits)


@pytest.mark.parametrize("splits", ["one", "many"])
def test_sinks_count_as_a_position_without_value(monkeypatch, splits):
    if splits == "one":
        monkeypatch.setattr(module, "TARGET_PROGRAMS", 1)
    sink = torch.linspace(-2, 3, 4, device=DEVICE)
    got = _compare(_case([300, 0, 1, 129]), sink_H=sink)
    assert not got[1].any()
    _compare(_case([300, 40]), sink_H=sink, window=20)


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 4, "kv_heads": 4, "dk": 24, "dv": 16},
        {"heads": 20, "kv_heads": 1, "dk": 80, "dv": 80},
        {"heads": 6, "kv_heads": 2, "dk": 192, "dv": 128},
    ],
    ids=lambda shape: "{heads}_{kv_heads}_{dk}_{dv}".format(**shape),
)
def test_head_shapes(shape):
    """Widths that are no power of two, one to twenty query heads of a key/value head."""
    _compare(_case([150, 3], **shape))


def test_the_same_as_the_eager_paths_attention():
    """Not our own reference: torch's attention under the mask that the eager path builds."""
    from compute_worker.paged_attention import Visible

    for visible in (Visible(), Visible(window=33), Visible(chunk=48)):
        case = q, k, v, table, kv_len_S = _case([70, 33, 49])
        got = decode_attention(*case, block_size=_BLOCK, scaling=0.3, window=visible.window, chunk=visible.chunk)
        for s, kv_len in enumerate(kv_len_S.tolist()):
            position = torch.arange(kv_len, device=DEVICE)
            slot = table[s].long()[position // _BLOCK] * _BLOCK + position % _BLOCK
            k_HCD, v_HCD = (cache[slot].transpose(0, 1).repeat_interleave(2, 0).float() for cache in (k, v))
            mask = visible.mask(position[-1:, None], position[None])
            expected = F.scaled_dot_product_attention(q[s, :, None].float(), k_HCD, v_HCD, attn_mask=mask, scale=0.3)
            assert relative_error(got[s], expected[:, 0]) < TOLERANCE


def test_a_row_is_the_same_whatever_shares_its_batch():
    """Same S and B: other sequences, other lengths, other blocks change no bit."""
    q, k, v, table, kv_len = _case([290, 40, 7], heads=2, kv_heads=1)
    given = {"block_size": _BLOCK, "scaling": 0.25}
    together = decode_attention(q, k, v, table, kv_len, **given)
    order = torch.tensor([1, 2, 0], device=DEVICE)
    moved = decode_attention(q[order], k, v, table[order], kv_len[order], **given)
    assert torch.equal(moved, together[order])
    alone = torch.where(torch.arange(3, device=DEVICE) == 0, kv_len, 0)
    assert torch.equal(decode_attention(q, k, v, table, alone, **given)[0], together[0])


def test_q_and_tables_may_be_views():
    q, k, v, table, kv_len = _case([150, 20])
    given = {"block_size": _BLOCK, "scaling": 0.25}
    wide = torch.full((2, 4, 40), math.nan, dtype=q.dtype, device=DEVICE).transpose(0, 1).contiguous().transpose(0, 1)
    wide[:, :, 8:24] = q
    table_2 = torch.cat([table, torch.full_like(table, 2**20)], dim=1)[:, : table.shape[1]]
    got = decode_attention(wide[:, :, 8:24], k, v, table_2, kv_len, **given)
    assert torch.equal(got, decode_attention(q, k, v, table, kv_len, **given))


def test_no_sequences_and_half_precision():
    case = _case([5], dtype=torch.float16)
    _compare(case, tolerance=5e-3)
    none = decode_attention(case[0][:0], case[1], case[2], case[3][:0], case[4][:0], block_size=_BLOCK, scaling=1.0)
    assert none.shape == (0, 4, 16)


def test_parts_follow_from_shapes_alone():
    assert num_splits(64, 4, 4096) == 3
    assert num_splits(1, 4, 4096) == 32
    assert num_splits(1, 4, 100) == 1
    assert num_splits(512, 4, 4096) == 1


def test_wrong_arguments_are_named():
    q, k, v, table, kv_len = _case([5, 6])
    given = {"block_size": _BLOCK, "scaling": 1.0}
    with pytest.raises(ValueError, match="block_table_SB: expected int32"):
        decode_attention(q, k, v, table.long(), kv_len, **given)
    with pytest.raises(ValueError, match="kv_len_S: expected int32 with 2"):
        decode_attention(q, k, v, table, kv_len[:1], **given)
    with pytest.raises(ValueError, match="caches: expected"):
        decode_attention(q[:, :3], k, v, table, kv_len, **given)
    with pytest.raises(ValueError, match="one dtype"):
        decode_attention(q.double(), k, v, table, kv_len, **given)
    with pytest.raises(ValueError, match="256 at most"):
        decode_attention(q.repeat(1, 1, 20), k.repeat(1, 1, 20), v, table, kv_len, **given)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="real sizes need a GPU")
@pytest.mark.parametrize("shape", [(32, 4, 128, 128), (16, 16, 192, 128), (64, 8, 64, 64), (16, 8, 256, 256)], ids=str)
@pytest.mark.parametrize("limits", [{}, {"window": 1000}], ids=["all", "window"])
def test_real_sizes(shape, limits):
    heads, kv_heads, dk, dv = shape
    g = torch.Generator().manual_seed(0)
    kv_lens = torch.randint(1, 4097, (64,), generator=g).tolist()
    _compare(_case(kv_lens, heads=heads, kv_heads=kv_heads, dk=dk, dv=dv, blocks=256), **limits)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="CUDA graphs need a GPU")
def test_a_captured_graph_is_right_for_other_lengths_and_tables():
    given = {"block_size": _BLOCK, "scaling": 128**-0.5}
    sizes = {"heads": 32, "kv_heads": 4, "dk": 128, "dv": 128, "blocks": 64}
    case = _case([900, 0, 17, 1], **sizes)
    decode_attention(*case, **given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(*case, **given)
    for seed, kv_lens in enumerate(([1, 1024, 500, 0], [0, 0, 3, 1000])):
        for target, source in zip(case, _case(kv_lens, seed=seed, **sizes), strict=True):
            target.copy_(source)
        graph.replay()
        assert relative_error(out, decode_attention_reference(*case, **given)) < TOLERANCE
        assert torch.equal(out, decode_attention(*case, **given))
