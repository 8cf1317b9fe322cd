"""Row by row LoRA of dense modules against its reference, every kind of row, rank, dtype and alignment."""

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from compute_worker.kernels.dense_lora import DenseTable, add_delta, add_delta_reference, add_embedding_delta
from tests.kernels.cases import DEVICE, relative_error

# The interpreter does not round to bfloat16 as hardware does; it reads it well.
_MODEL = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
# Sums are fp32 here and there; only their order and the rounding to y's dtype differ.
_TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
_MODULES = {"q": (48, 40), "o": (300, 24), "gate": (48, 1), "embed": (50, 48)}


@dataclass
class _Pair:
    a: torch.Tensor
    b: torch.Tensor
    scale: float


def _pair(in_size, out_size, rank, *, seed=0, dtype=_MODEL, offset=0):
    """offset: elements past an aligned address where A and B start."""
    g = torch.Generator().manual_seed(seed)

    def at_offset(*shape):
        size = shape[0] * shape[1]
        flat = torch.randn(size + offset, generator=g).to(DEVICE, dtype)
        return flat[offset:].view(shape)

    return _Pair(a=at_offset(rank, in_size), b=at_offset(out_size, rank), scale=0.3 + 0.1 * seed)


def _table(adapters, *, dtype=_MODEL, modules=_MODULES, num_slots=8):
    """adapters: slot -> (module -> rank)."""
    table = DenseTable(modules, num_slots, dtype, DEVICE)
    for slot, ranks in adapters.items():
        table.set_slot(slot, {m: _pair(*modules[m], r, seed=slot + 1, dtype=dtype) for m, r in ranks.items()})
    return table


def _rows(module, slots, *, x_dtype=_MODEL, y_dtype=_MODEL, modules=_MODULES):
    g = torch.Generator().manual_seed(7)
    in_size, out_size = modules[module]
    x = torch.randn(len(slots), in_size, generator=g).to(DEVICE, x_dtype)
    y = torch.randn(len(slots), out_size, generator=g).to(DEVICE, y_dtype)
    return x, y, torch.tensor(slots, dtype=torch.int32, device=DEVICE)


def _compare(table, module, x, y, slot_T):
    before, expected = y.clone(), add_delta_reference(table, module, x, y, slot_T)
    add_delta(table, module, x, y, slot_T)
    assert relative_error(y, expected) < _TOLERANCE[y.dtype]
    for t, slot in enumerate(slot_T.tolist()):
        has_pair = module in table.adapters().get(slot, {})
        assert torch.equal(y[t], before[t]) != has_pair, (t, slot)


@pytest.mark.parametrize("module", ["q", "o", "gate"])
def test_mixed_slots_and_ranks(module):
    """Rows without adapter, an empty slot, an adapter without the module, ranks in and over a rank block."""
    table = _table({0: {module: 16}, 2: {module: 1}, 3: {"embed": 8}, 4: {module: 7}, 5: {module: 41}})
    x, y, slot_T = _rows(module, [0, -1, 2, 3, 4, 5, 1])
    alone = y[5:6].clone()
    _compare(table, module, x, y, slot_T)
    add_delta(table, module, x[5:6], alone, slot_T[5:6])
    assert torch.equal(alone, y[5:6]), "a row alone gets the same bits"


def test_many_parts_of_the_input():
    """9,000 inputs are 18 parts of 512, the last one not full."""
    modules = {"down": (9000, 16)}
    _compare(_table({1: {"down": 3}}, modules=modules), "down", *_rows("down", [1, -1], modules=modules))


def test_rank_512():
    _compare(_table({0: {"gate": 512}}), "gate", *_rows("gate", [0]))


@pytest.mark.parametrize("pair", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("y_dtype", [_MODEL, torch.float32], ids=str)
def test_dtypes_of_pairs_and_results(pair, y_dtype):
    """A router that computes in fp32 has fp32 results of bf16 inputs; pairs may be of another dtype than the model."""
    _compare(_table({0: {"q": 8}}, dtype=pair), "q", *_rows("q", [0, -1], y_dtype=y_dtype))


@pytest.mark.parametrize("offset", [1, 4, 8])
def test_pairs_at_any_address(offset):
    """Adapters lie one pair after another, so a pair may start at any element."""
    table = _table({})
    table.set_slot(0, {"q": _pair(48, 40, 8, offset=offset)})
    _compare(table, "q", *_rows("q", [0, -1, 0]))


def test_rows_may_have_strides():
    table = _table({0: {"q": 8}})
    x, y, slot_T = _rows("q", [0, -1, 0])
    wide_x, wide_y = (torch.full((3, 64), 9.0, dtype=_MODEL, device=DEVICE) for _ in range(2))
    wide_x[:, 5:53], wide_y[:, 3:43] = x, y
    add_delta(table, "q", wide_x[:, 5:53], wide_y[:, 3:43], slot_T.long())
    add_delta(table, "q", x, y, slot_T)
    assert torch.equal(wide_y[:, 3:43], y)
    assert (wide_y[:, :3] == 9).all()
    assert (wide_y[:, 43:] == 9).all()


@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32], ids=str)
def test_embedding_takes_a_column_of_a(ids_dtype):
    table = _table({0: {"embed": 16}, 1: {"embed": 3}, 2: {"q": 8}})
    _, y, slot_T = _rows("embed", [0, 1, -1, 2, 0])
    ids = torch.tensor([49, 0, 7, 3, 12], dtype=ids_dtype, device=DEVICE)
    before = y.clone()
    # A one-hot input takes the same column.
    one_hot = torch.nn.functional.one_hot(ids.long(), 50).float()
    expected = add_delta_reference(table, "embed", one_hot, y, slot_T)
    add_embedding_delta(table, "embed", ids, y, slot_T)
    assert relative_error(y, expected) < _TOLERANCE[_MODEL]
    assert torch.equal(y[2:4], before[2:4])
    assert not torch.equal(y[4], before[4])


def test_slots_change_in_place():
    table = _table({0: {"q": 8}})
    for adapter in ({"q": _pair(48, 40, 3, seed=5)}, {"q": _pair(48, 40, 16, seed=6)}, {"o": _pair(300, 24, 2)}):
        table.set_slot(0, adapter)
        _compare(table, "q", *_rows("q", [0, -1]))
    table.set_slot(0, {"q": _pair(48, 40, 3)})
    table.clear_slot(0)
    _compare(table, "q", *_rows("q", [0, -1]))


def test_a_refused_adapter_leaves_the_slot_as_it_was():
    table = _table({0: {"q": 8}})
    for pairs, message in (
        ({"o": _pair(300, 24, 4), "v": _pair(48, 40, 4)}, "unknown module 'v'"),
        ({"q": _pair(40, 48, 4)}, r"q: expected A \[r, 48\] and B \[40, r\]"),
        ({"q": _pair(48, 40, 4, dtype=torch.float32)}, f"holds A and B of {_MODEL}, got torch.float32"),
        ({"q": _pair(48, 40, 513)}, r"rank must be 1\.\.512, got 513"),
        ({"q": _Pair(a=torch.zeros(48, 4).to(DEVICE, _MODEL).t(), b=_pair(48, 40, 4).b, scale=1.0)}, "contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            table.set_slot(0, pairs)
    with pytest.raises(ValueError, match=r"adapter_slot must be 0\.\.7, got 8"):
        table.set_slot(8, {})
    _compare(table, "q", *_rows("q", [0, -1]))


def test_unknown_slot_answers_nan_and_no_rows_are_none():
    table = _table({0: {"q": 8}}, num_slots=1)
    x, y, slot_T = _rows("q", [-1, 1, 0])
    add_delta(table, "q", x, y, slot_T)
    assert torch.isnan(y[1]).all()
    assert torch.isfinite(y[[0, 2]]).all()
    add_delta(table, "q", x[:0], y[:0], slot_T[:0])


def test_wrong_arguments_are_named():
    table = _table({})
    x, y, slot_T = _rows("q", [0, -1])
    with pytest.raises(ValueError, match="unknown module 'x'"):
        add_delta(table, "x", x, y, slot_T)
    with pytest.raises(ValueError, match="q: expected x of contiguous rows"):
        add_delta(table, "q", y, y, slot_T)
    with pytest.raises(ValueError, match="q: expected y of contiguous rows"):
        add_delta(table, "q", x, x, slot_T)
    with pytest.raises(ValueError, match="adapter_slot_T: expected contiguous int"):
        add_delta(table, "q", x, y, slot_T[:1])
    with pytest.raises(ValueError, match="ids_T: expected contiguous int"):
        add_embedding_delta(table, "embed", x, x, slot_T)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="real sizes and CUDA graphs need a GPU")
def test_a_captured_graph_sees_new_adapters_and_rows_at_real_sizes():
    modules = {"q": (2048, 4096), "router": (2048, 128), "lm_head": (2048, 151936), "embed": (151936, 2048)}
    table = _table({s: dict.fromkeys(modules, 16) for s in range(8)}, modules=modules)
    slots = [t % 9 - 1 for t in range(64)]
    rows = {m: _rows(m, slots, modules=modules) for m in ("q", "router", "lm_head")}
    ids = torch.arange(64, device=DEVICE) * 2000
    _, embedded, slot_T = _rows("embed", slots, modules=modules)

    def step():
        for module, (x, y, _) in rows.items():
            add_delta(table, module, x, y, slot_T)
        add_embedding_delta(table, "embed", ids, embedded, slot_T)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for rank in (64, 7):
        for slot in (0, 3):
            pairs = {m: _pair(*modules[m], rank, seed=rank + slot) for m in modules}
            table.set_slot(slot, pairs)
        slot_T.copy_(slot_T.roll(1))
        expected = {m: add_delta_reference(table, m, x, y, slot_T) for m, (x, y, _) in rows.items()}
        before = embedded.clone()
        graph.replay()
        for module, (_, y, _) in rows.items():
            assert relative_error(y, expected[module]) < _TOLERANCE[_MODEL], (rank, module)
        for t, slot in enumerate(slot_T.tolist()):
            pair = table.adapters()[slot]["embed"] if slot >= 0 else None
            delta = pair.scale * (pair.b.float() @ pair.a[:, ids[t]].float()) if pair else 0
            assert relative_error(embedded[t], before[t].float() + delta) < _TOLERANCE[_MODEL]
