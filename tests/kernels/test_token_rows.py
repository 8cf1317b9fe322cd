"""Packing and unpacking rows: the launches do what the plain code does, whatever the sizes."""

from __future__ import annotations

import pytest
import torch

from compute_worker.dispatch import packed_rows
from compute_worker.dispatch.base import ArrivedTokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def packed(
    monkeypatch: pytest.MonkeyPatch, kernels: bool, parts: tuple[torch.Tensor, ...], num_rows: int, num_extras: int
) -> tuple[torch.Tensor, ArrivedTokens]:
    """The rows, padding between the parts left out, and what comes out of them again."""
    monkeypatch.setattr(packed_rows, "uses_kernels", lambda x_TD: kernels)
    x_TD, weight_TK, expert_TK, extra_TX = parts
    extras = {f"extra {index}": extra_TX[:, index] for index in range(num_extras)}
    layout, rows = packed_rows.pack_tokens(x_TD, weight_TK, expert_TK, extras, num_rows=num_rows)
    arrived = packed_rows.unpack_tokens(layout, rows, sorted(extras), first=4, end=9)
    return torch.cat([view.contiguous().view(torch.uint8) for view in layout.views(rows)], dim=1), arrived


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens, num_rows", [(0, 0), (0, 3), (1, 1), (5, 17)])
@pytest.mark.parametrize("width, top_k, num_extras", [(32, 8, 1), (6, 3, 0), (2050, 1, 3), (0, 8, 1)])
def test_launches_equal_plain_code(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    num_tokens: int,
    num_rows: int,
    width: int,
    top_k: int,
    num_extras: int,
) -> None:
    generator = torch.Generator().manual_seed(1)
    parts = (
        torch.randn((num_tokens, width), generator=generator).to(DEVICE, dtype),
        torch.rand((num_tokens, top_k), generator=generator).to(DEVICE),
        torch.randint(-1, 12, (num_tokens, top_k), generator=generator).to(DEVICE),
        torch.randint(-1, 5, (num_tokens, num_extras), generator=generator).to(DEVICE, torch.int32),
    )
    plain_rows, plain = packed(monkeypatch, False, parts, num_rows, num_extras)
    rows, arrived = packed(monkeypatch, True, parts, num_rows, num_extras)
    assert torch.equal(rows, plain_rows)
    for got, expected in (
        (arrived.x_ND, plain.x_ND),
        (arrived.slot_NK, plain.slot_NK),
        (arrived.weight_NK, plain.weight_NK),
        *((arrived.extras[name], plain.extras[name]) for name in plain.extras),
    ):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
    assert torch.equal(plain.x_ND[:num_tokens], parts[0])
    assert (plain.slot_NK[num_tokens:] == -1).all()


def test_unpack_example() -> None:
    """The docstring's example."""
    from compute_worker.kernels.token_rows import RowWords, unpack_rows

    words = RowWords(num_x_words=0, weight_at=0, expert_at=2, extra_at=4, num_words=4, top_k=2, num_extras=0)
    rows = torch.tensor([[0, 0, 4, 9], [0, 0, -1, 5]], dtype=torch.int32, device=DEVICE)
    assert unpack_rows(rows, words, first=4, end=8).slot_NK.tolist() == [[0, -1], [-1, 1]]


def test_sizes_are_checked() -> None:
    from compute_worker.kernels.token_rows import RowWords, pack_rows

    words = RowWords(num_x_words=2, weight_at=4, expert_at=8, extra_at=12, num_words=12, top_k=1, num_extras=0)
    rows = torch.zeros((1, 12), dtype=torch.int32, device=DEVICE)
    two = torch.zeros((2, 2), device=DEVICE)
    one = torch.zeros((2, 1), device=DEVICE)
    with pytest.raises(ValueError, match=r"rows \(1, 12\) and x \(2, 2\)"):
        pack_rows(rows, words, x_TD=two, weight_TK=one, expert_TK=one.int(), extra_TX=one[:, :0].int())
