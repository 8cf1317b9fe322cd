"""Parts of the model side on their own: dense LoRA, the cache's padding, calls of single layers, dispatch columns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from worker_model_support import (
    BASE,
    Chunk,
    Prompt,
    Rank,
    merge_adapter,
    prompt_tokens,
    random_adapter,
    reference_model,
    small_config,
    write_model,
)

from compute_worker.dense_lora import DenseLora, DensePair, DenseTokens
from compute_worker.expert_layer import PhysicalExperts
from compute_worker.experts_base import LoraPair, projection_columns, weighted_sum
from compute_worker.step_context import group_by_slot
from epilora.errors import InvalidArgumentError
from epilora.model_spec import GateUpLayout


class Router(nn.Module):
    """Casts its weight, as some families' routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.type(torch.float64), self.weight.type(torch.float64)).softmax(-1)


def _pair(out_features: int, in_features: int) -> DensePair:
    return DensePair(a=torch.randn(2, in_features), b=torch.randn(out_features, 2), scale=0.5)


def test_dense_lora_on_linear_and_router() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"linear": nn.Linear(4, 5), "router": Router()}).requires_grad_(False)
    plain = {"linear": model["linear"].weight.clone(), "router": model["router"].weight.clone()}
    lora = DenseLora()
    lora.attach(model, ["linear", "router"])
    x_TD = torch.randn(1, 6, 4)
    base = {name: model[name](x_TD) for name in plain}
    pairs = {"linear": _pair(5, 4), "router": _pair(3, 4)}
    index = torch.tensor([1, 4])
    with torch.inference_mode():
        lora.adapters = [DenseTokens(token_index=index, pairs=pairs)]
        mixed = {name: model[name](x_TD) for name in plain}
        lora.adapters = [DenseTokens(token_index=None, pairs=pairs)]
        whole = {name: model[name](x_TD) for name in plain}
    others = torch.tensor([0, 2, 3, 5])
    for name, weight in plain.items():
        merged = weight + 0.5 * pairs[name].b @ pairs[name].a
        expected = F.linear(x_TD, merged, model["linear"].bias if name == "linear" else None)
        expected = expected.double().softmax(-1) if name == "router" else expected
        assert torch.equal(mixed[name][:, others], base[name][:, others])
        torch.testing.assert_close(mixed[name][:, index], expected[:, index])
        torch.testing.assert_close(whole[name], expected)


def test_stale_values_next_to_a_sequence_do_not_reach_it(tmp_path: Path) -> None:
    rank = Rank(write_model(small_config("qwen3_moe"), tmp_path / "model"), work=tmp_path)
    prompt, blocks = Prompt(tokens=prompt_tokens(1, 6)), rank.blocks(6)
    (expected,) = rank.prefill([prompt])
    cache = rank.runner._attention.cache
    for kept in (*cache.k.values(), *cache.v.values()):
        kept[: cache.padding_slot] = float("nan")
    rank.step([Chunk(prompt=prompt, start=0, stop=5, blocks=blocks)])
    (logits,) = rank.step([Chunk(prompt=prompt, start=5, stop=6, blocks=blocks)])
    torch.testing.assert_close(logits[0], expected[5], atol=1e-5, rtol=1e-5)


def test_expert_call_equals_transformers_block(tmp_path: Path) -> None:
    path = write_model(small_config("qwen2_moe"), tmp_path / "model")
    rank = Rank(path, work=tmp_path)
    adapter = random_adapter(rank.spec, 1, rank_of={"gate_up": 2, "down": 3})
    rank.add_adapter(adapter, slot=2, work=tmp_path)
    x_TD = torch.randn(5, 32)
    merged = reference_model(path)
    merge_adapter(merged, adapter, rank.spec)
    for slot, model in ((BASE, reference_model(path)), (2, merged)):
        block = model.get_submodule("model.layers.1.mlp")
        with torch.no_grad():
            expected = block(x_TD[None])[0]
            shared = torch.sigmoid(block.shared_expert_gate(x_TD)) * block.shared_expert(x_TD)
            _, weight_TK, expert_TK = block.gate(x_TD)
        for topk in (None, (expert_TK.int(), weight_TK)):
            y_TD = rank.runner.forward_experts(1, x_TD, topk, [slot] * 5, False, [5])
            routed_TD = rank.runner.forward_experts(1, x_TD, topk, [slot] * 5, True, [5])
            torch.testing.assert_close(y_TD, expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(routed_TD, expected - shared, atol=1e-5, rtol=1e-5)
    assert rank.runner.forward_experts(1, torch.empty(0, 32), None, [], False, [0]).shape == (0, 32)


@pytest.mark.parametrize(
    "layer, width, topk, field",
    [
        (2, 32, None, "layer"),
        (1, 31, None, "hidden_states"),
        (1, 32, ([[0, 1]], [[1.0, 1.0]]), "top_k"),
        (1, 32, ([[0, 1, 2]], [[1.0, 1.0]]), "top_k"),
        (1, 32, ([[0, 1, 7]], [[1.0, 1.0, 1.0]]), "top_k.expert_ids"),
        (1, 32, ([[-1, 1, 2]], [[1.0, 1.0, 1.0]]), "top_k.expert_ids"),
        (1, 32, ([[2, 1, 2]], [[1.0, 1.0, 1.0]]), "top_k.expert_ids"),
    ],
)
def test_bad_expert_calls(
    tmp_path: Path, layer: int, width: int, topk: tuple[list[list[int]], list[list[float]]] | None, field: str
) -> None:
    rank = Rank(write_model(small_config("qwen2_moe"), tmp_path / "model"), work=tmp_path)
    chosen = None if topk is None else (torch.tensor(topk[0]), torch.tensor(topk[1]))
    with pytest.raises(InvalidArgumentError) as caught:
        rank.runner.layer_calls.check(layer, torch.zeros(1, width), chosen)
    assert caught.value.field == field


def test_copies_are_chosen_by_position() -> None:
    physical = PhysicalExperts(
        copies_EC=torch.tensor([[0, 0], [1, 4], [2, 3]]), num_copies_E=torch.tensor([1, 2, 2]), rank_offsets=(0, 3, 5)
    )
    chosen_TK = physical.choose(torch.tensor([[1, 0], [1, 2], [2, -1]]), None)
    assert chosen_TK.tolist() == [[1, 0], [4, 3], [2, -1]]


def test_small_pieces() -> None:
    assert group_by_slot([2, -1, 0, 2]) == {0: [2], 2: [0, 3]}
    assert weighted_sum(
        torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([[1.0, 10.0], [0.0, 1.0]])
    ).tolist() == [
        [21.0],
        [4.0],
    ]
    assert projection_columns("up", GateUpLayout.CONCATENATED, 6) == slice(3, 6)
    assert projection_columns("up", GateUpLayout.INTERLEAVED, 6) == slice(1, 6, 2)
    assert projection_columns("up", GateUpLayout.NOT_GATED, 6) == slice(0, 6)
    pair = LoraPair(
        a=torch.arange(9.0).view(3, 3), b=torch.arange(6.0), lora_rank=(1, 0, 2), scale_e=torch.ones(3), out_features=2
    )
    assert [tuple(part.shape) for slot in range(3) for part in pair.slot(slot)] == [
        (1, 3),
        (2, 1),
        (0, 3),
        (2, 0),
        (2, 3),
        (2, 2),
    ]
    assert pair.slot(2)[1].tolist() == [[2.0, 3.0], [4.0, 5.0]]
