"""Rows whose elements lie past 2^31: an index of 32 bits would wrap, and read or write another row."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from compute_worker.kernels import moe, moe_reference
from tests.kernels.cases import DEVICE, Shape, make_adapter, make_table, make_weights, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SHAPE = Shape(num_experts=16, top_k=8, hidden_size=2048, intermediate_size=768)
NUM_TOKENS = 180_000
LAST = 48


def test_rows_past_two_to_the_31_elements() -> None:
    assert NUM_TOKENS * SHAPE.top_k * SHAPE.hidden_size > 2**31
    generator = torch.Generator("cuda").manual_seed(3)
    x = torch.randn((NUM_TOKENS, SHAPE.hidden_size), generator=generator, device=DEVICE, dtype=torch.bfloat16)
    scores = torch.rand((NUM_TOKENS, SHAPE.num_experts), generator=generator, device=DEVICE)
    weight, expert = scores.topk(SHAPE.top_k, dim=1)
    slot = torch.arange(NUM_TOKENS, device=DEVICE, dtype=torch.int32) % 3 - 1
    weights = make_weights(SHAPE)
    ranks = {"gate": [16] * 16, "up": [8] * 16, "down": [16] * 16}
    adapters = {number: make_adapter(SHAPE, ranks, seed=number + 1) for number in (0, 1)}
    table = make_table(SHAPE, adapters, num_slots=2)
    got = moe(x, expert, weight, slot, weights, table)
    for part in (slice(0, LAST), slice(NUM_TOKENS - LAST, NUM_TOKENS)):
        wanted = moe_reference(x[part], expert[part], weight[part], slot[part], weights, adapters)
        assert relative_error(got[part], wanted) < 1e-2
