"""RMS norm against its reference: rounding points, shapes, strides."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from compute_worker.kernels.rms_norm import rms_norm, rms_norm_reference
from tests.kernels.cases import DEVICE

# The interpreter does not round to bfloat16 as hardware does.
_MODEL = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16


def _inputs(*shape, dtype=_MODEL, weight_dtype=None, scale=1.0):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(shape, generator=g) * scale
    weight = torch.rand(shape[-1], generator=g) + 0.5
    return x.to(DEVICE, dtype), weight.to(DEVICE, weight_dtype or dtype)


def _assert_alike(got, expected):
    """Equal but for the next number in one of a hundred results: sums are taken in another order."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    # The next number before the product with the weight may be the one after that behind it.
    eps = torch.finfo(got.dtype).eps * (8 if got.dtype == torch.float32 else 2)
    assert ((got.double() - expected.double()).abs() <= eps * expected.double().abs()).all()
    assert got.dtype == torch.float32 or (got != expected).float().mean() <= 0.01


@pytest.mark.parametrize("shape", [(5, 48), (1, 3, 4, 128), (200,), (2, 3000), (1, 1)], ids=str)
@pytest.mark.parametrize("round_first", [True, False], ids=["round_first", "round_last"])
def test_shapes_match_the_reference(shape, round_first):
    x, weight = _inputs(*shape)
    got = rms_norm(x, weight, 1e-6, round_first=round_first)
    _assert_alike(got, rms_norm_reference(x, weight, 1e-6, round_first=round_first))
    assert got.is_contiguous()


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (_MODEL, torch.float32)], ids=str)
@pytest.mark.parametrize("round_first", [True, False], ids=["round_first", "round_last"])
def test_dtypes(dtypes, round_first):
    x, weight = _inputs(7, 96, dtype=dtypes[0], weight_dtype=dtypes[1])
    got = rms_norm(x, weight, 1e-6, round_first=round_first)
    _assert_alike(got, rms_norm_reference(x, weight, 1e-6, round_first=round_first))


def test_the_two_rounding_points_differ():
    """Else choosing between them by results could not work."""
    x, weight = _inputs(8, 256)
    assert (rms_norm(x, weight, 1e-6) != rms_norm(x, weight, 1e-6, round_first=False)).float().mean() > 0.05


def test_eps_counts_where_rows_are_small():
    x, weight = _inputs(4, 64, scale=1e-3)
    _assert_alike(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))
    assert not torch.equal(rms_norm(x, weight, 1e-6), rms_norm(x, weight, 1e-5))
    assert torch.equal(rms_norm(torch.zeros_like(x), weight, 1e-6), torch.zeros_like(x))


def test_rows_may_be_parts_of_a_wider_projection():
    """[T, H, D] heads of a fused projection, a transposed view, and rows at a stride give the bits of a copy."""
    fused, weight = _inputs(3, 7, 32)
    part = fused[:, 2:5]
    assert torch.equal(rms_norm(part, weight, 1e-6), rms_norm(part.clone(), weight, 1e-6))
    turned = fused.transpose(0, 1)
    assert torch.equal(rms_norm(turned, weight, 1e-6), rms_norm(turned.contiguous(), weight, 1e-6))
    assert torch.equal(rms_norm(fused[:, 0], weight, 1e-6), rms_norm(fused[:, 0].clone(), weight, 1e-6))
    narrow, weight_16 = fused[..., 8:24], weight[:16].clone()
    assert torch.equal(rms_norm(narrow, weight_16, 1e-6), rms_norm(narrow.clone(), weight_16, 1e-6))


def test_no_rows_and_wrong_arguments():
    x, weight = _inputs(4, 48)
    assert rms_norm(x[:0], weight, 1e-6).shape == (0, 48)
    with pytest.raises(ValueError, match="expected x of contiguous rows"):
        rms_norm(x.t(), weight[:4], 1e-6)
    with pytest.raises(ValueError, match=r"a contiguous weight \[48\]"):
        rms_norm(x, weight[:47], 1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="real sizes need a GPU")
@pytest.mark.parametrize("shape", [(64, 2048), (64, 32, 128), (8192, 2048), (1, 64, 4, 128), (64, 7168)], ids=str)
def test_real_sizes(shape):
    x, weight = _inputs(*shape)
    for round_first in (True, False):
        got = rms_norm(x, weight, 1e-6, round_first=round_first)
        _assert_alike(got, rms_norm_reference(x, weight, 1e-6, round_first=round_first))
