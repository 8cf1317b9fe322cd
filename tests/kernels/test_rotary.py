"""Rotary embedding, to the last bit what torch computes op by op."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from compute_worker.kernels.rotary import rotary, rotary_reference
from tests.kernels.cases import DEVICE

# The interpreter does not round to bfloat16 as hardware does.
_MODEL = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16


def _inputs(*, batch=1, tokens=5, heads=(9, 2), width=32, rotated=None, dtype=_MODEL, cos_batch=1):
    g = torch.Generator().manual_seed(4)

    def normal(*shape):
        return torch.randn(shape, generator=g).to(DEVICE, dtype)

    q, k = (normal(batch, tokens, number, width).transpose(1, 2) for number in heads)
    cos, sin = (normal(cos_batch, tokens, rotated or width).clamp(-1, 1) for _ in range(2))
    return q, k, cos, sin


def _assert_equal(got, expected):
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "case",
    [
        {"heads": (9, 2)},
        {"heads": (8, 8), "width": 128},
        {"heads": (1, 1), "tokens": 1, "width": 2},
        {"width": 80},
        {"width": 48, "rotated": 20},
        {"batch": 3, "cos_batch": 3},
        {"batch": 3, "cos_batch": 1},
        {"dtype": torch.float32},
    ],
    ids=str,
)
def test_equals_the_reference(case):
    given = _inputs(**case)
    _assert_equal(rotary(*given), rotary_reference(*given))


def test_example_of_the_module():
    x = torch.tensor([1.0, 2, 3, 4, 5], device=DEVICE).view(1, 1, 1, 5)
    cos, sin = torch.zeros(1, 1, 4, device=DEVICE), torch.ones(1, 1, 4, device=DEVICE)
    q, k = rotary(x, 2 * x, cos, sin)
    assert q.flatten().tolist() == [-3, -4, 1, 2, 5]
    assert k.flatten().tolist() == [-6, -8, 2, 4, 10]


def test_memory_order_and_place_of_the_heads():
    q, k, cos, sin = _inputs(batch=2, tokens=2, cos_batch=2)
    got_q, _ = rotary(q, k, cos, sin)
    assert got_q.stride() == q.stride()
    turned = rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    _assert_equal([x.transpose(1, 2) for x in turned], rotary(q, k, cos, sin))
    # Queries and keys that are parts of one fused projection.
    fused = torch.cat([q, k], dim=1).transpose(1, 2).contiguous().transpose(1, 2)
    _assert_equal(rotary(fused[:, :9], fused[:, 9:], cos, sin), rotary(q, k, cos, sin))


def test_no_tokens_and_wrong_arguments():
    q, k, cos, sin = _inputs()
    assert rotary(q[:, :, :0], k[:, :, :0], cos[:, :0], sin[:, :0])[0].shape == (1, 9, 0, 32)
    with pytest.raises(ValueError, match="expected one dtype"):
        rotary(q, k, cos.float(), sin.float())
    with pytest.raises(ValueError, match="expected cos and sin of"):
        rotary(q, k, cos[:, :4], sin[:, :4])
    with pytest.raises(ValueError, match="even width, 32 at most"):
        rotary(q, k, cos[..., :3], sin[..., :3])
    with pytest.raises(ValueError, match="alike but for their number"):
        rotary(q, k[:, :, :4], cos, sin)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="real sizes need a GPU")
@pytest.mark.parametrize("heads, width", [((32, 4), 128), ((64, 8), 64), ((16, 16), 256)], ids=str)
def test_real_sizes(heads, width):
    given = _inputs(tokens=64, heads=heads, width=width)
    _assert_equal(rotary(*given), rotary_reference(*given))
