"""ExpertService against transformers' own MoE blocks, alone and under PEFT, over two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from epilora.rpc import error_from
from epilora.v1 import expert_service_pb2 as pb
from epilora.v1 import types_pb2
from tests.oracle import Oracle
from tests.service.harness import Service

ADAPTER = "peft-0.21.2/qwen2moe-T-both"
LAYER, HIDDEN, NUM_TOKENS = 1, 8, 7


@pytest.fixture(scope="module")
def qwen2(models: Path, adapters: Path) -> Iterator[Service]:
    """A model with shared experts, and one adapter of routed experts and attention."""
    with Service(models / "qwen2moe-T", ranks=2, adapter_roots=[adapters]) as service:
        service.load("a", adapters / ADAPTER)
        yield service


@pytest.fixture(scope="module")
def blocks(models: Path, adapters: Path) -> dict[str, Any]:
    """transformers' MLP block of the layer, without and with the adapter."""
    model = models / "qwen2moe-T"
    return {
        "": Oracle(model).submodule(f"model.layers.{LAYER}.mlp"),
        "a": Oracle(model, adapters / ADAPTER).submodule(f"base_model.model.model.layers.{LAYER}.mlp"),
    }


def _tensor(value: torch.Tensor) -> types_pb2.Tensor:
    dtype = types_pb2.DATA_TYPE_INT32 if value.dtype is torch.int32 else types_pb2.DATA_TYPE_FLOAT32
    return types_pb2.Tensor(dtype=dtype, shape=value.shape, data=value.contiguous().numpy().tobytes())


def _hidden(seed: int, num_tokens: int = NUM_TOKENS) -> torch.Tensor:
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


def _forward(service: Service, *requests: pb.ForwardRequest) -> list[torch.Tensor]:
    responses = list(service.experts().Forward(iter(requests), timeout=60))
    assert [r.request_id for r in responses] == [r.request_id for r in requests]
    return [
        torch.from_numpy(np.frombuffer(r.hidden_states.data, "<f4").reshape(tuple(r.hidden_states.shape)).copy())
        for r in responses
    ]


@torch.no_grad()
def test_the_layers_own_router_chooses(qwen2: Service, blocks: dict[str, Any]) -> None:
    x_TD = _hidden(0)
    mixed = [0, -1, 0, 0, -1, -1, 0]
    base, own, both, empty = _forward(
        qwen2,
        pb.ForwardRequest(request_id=1, layer=LAYER, hidden_states=_tensor(x_TD)),
        pb.ForwardRequest(request_id=2, layer=LAYER, hidden_states=_tensor(x_TD), adapter_names=["a"]),
        pb.ForwardRequest(
            request_id=3, layer=LAYER, hidden_states=_tensor(x_TD), adapter_names=["a"], adapter_index=mixed
        ),
        pb.ForwardRequest(request_id=4, layer=LAYER, hidden_states=_tensor(_hidden(0, 0))),
    )
    plain, adapted = blocks[""](x_TD[None])[0], blocks["a"](x_TD[None])[0]
    assert (plain - adapted).abs().max() > 1e-2
    torch.testing.assert_close(base, plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(own, adapted, atol=1e-5, rtol=1e-5)
    wanted = torch.stack([adapted[t] if slot == 0 else plain[t] for t, slot in enumerate(mixed)])
    torch.testing.assert_close(both, wanted, atol=1e-5, rtol=1e-5)
    assert empty.shape == (0, HIDDEN)


@torch.no_grad()
def test_the_caller_chooses_and_may_leave_out_shared_experts(qwen2: Service, blocks: dict[str, Any]) -> None:
    x_TD = _hidden(1)
    ids = torch.tensor([[3, 0], [1, 2], [0, 1], [2, 3], [3, 1], [0, 2], [1, 0]], dtype=torch.int32)
    weights = torch.rand(NUM_TOKENS, 2, generator=torch.Generator().manual_seed(2))
    top_k = pb.TopK(expert_ids=_tensor(ids), weights=_tensor(weights))
    fields: dict[str, Any] = {"layer": LAYER, "hidden_states": _tensor(x_TD), "top_k": top_k}
    routed, whole = _forward(
        qwen2,
        pb.ForwardRequest(request_id=1, routed_only=True, **fields),
        pb.ForwardRequest(request_id=2, **fields),
    )
    block = blocks[""]
    expected = block.experts(x_TD, ids.long(), weights)
    shared = torch.sigmoid(block.shared_expert_gate(x_TD)) * block.shared_expert(x_TD)
    torch.testing.assert_close(routed, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(whole, expected + shared, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        pytest.param({"layer": 9}, "INVALID_ARGUMENT", None, id="no such layer"),
        pytest.param({"hidden_states": _tensor(torch.zeros(2, 5))}, "INVALID_ARGUMENT", None, id="wrong width"),
        pytest.param({"adapter_names": ["nobody"]}, "NOT_FOUND", "ADAPTER_NOT_FOUND", id="no such adapter"),
        pytest.param(
            {
                "top_k": pb.TopK(
                    expert_ids=_tensor(torch.tensor([[0, 4], [1, 2]], dtype=torch.int32)),
                    weights=_tensor(torch.ones(2, 2)),
                )
            },
            "INVALID_ARGUMENT",
            None,
            id="expert id out of range",
        ),
        pytest.param(
            {"hidden_states": types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_FLOAT32, shape=[2, 8], data=b"short")},
            "INVALID_ARGUMENT",
            "BAD_TENSOR",
            id="too few bytes",
        ),
    ],
)
def test_bad_calls_end_the_stream_and_hurt_nobody(
    qwen2: Service, fields: dict[str, Any], code: str, reason: str | None
) -> None:
    good: dict[str, Any] = {"layer": LAYER, "hidden_states": _tensor(_hidden(3, 2))}
    with pytest.raises(grpc.RpcError) as caught:
        _forward(qwen2, pb.ForwardRequest(request_id=1, **{**good, **fields}))
    error = error_from(caught.value)  # type: ignore[arg-type]
    assert error.code.name == code, error.message
    assert reason is None or error.reason == reason
    assert _forward(qwen2, pb.ForwardRequest(request_id=1, **good))[0].shape == (2, HIDDEN)
