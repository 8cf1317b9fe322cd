"""The benchmark's oracle, all adapters of an expert at once, against the plain reference."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from benchmarks.kernel_layer import Batch
from benchmarks.kernel_oracle import Adapters, layer_fp32
from compute_worker.kernels import moe_reference
from tests.kernels.cases import Shape, make_adapter, make_batch, make_weights, relative_error


def test_oracle_is_the_reference():
    """Ranks 8, 16 and 3, rows without adapter, remote experts."""
    shape = Shape()
    weights, batch = make_weights(shape, dtype=torch.float32), make_batch(shape, 17, [0, 1, 2, -1], dtype=torch.float32)
    batch[1][3, 1] = -1
    adapters = {
        slot: make_adapter(shape, {name: [rank] * 4 for name in ("gate", "up", "down")}, slot, dtype=torch.float32)
        for slot, rank in enumerate((8, 16, 3))
    }
    columns = Batch(x_TD=batch[0], expert_TK=batch[1], weight_TK=batch[2], slot_T=batch[3])
    got = layer_fp32(columns, weights, Adapters(list(adapters.values()), shape.num_experts))
    assert relative_error(got, moe_reference(*batch, weights, adapters)) < 1e-5
    base = layer_fp32(columns.base_only(), weights, None)
    assert relative_error(base, moe_reference(*batch[:3], columns.base_only().slot_T, weights, {})) < 1e-5
