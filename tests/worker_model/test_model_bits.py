"""A base request's bits do not depend on the adapters in its batch, though these change how many rows experts get."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from worker_model_support import (
    FIXTURES,
    Prompt,
    Rank,
    prompt_tokens,
    random_adapter,
    small_config,
    write_model,
)

from compute_worker.dispatch.base import ArrivedTokens
from compute_worker.experts_base import AdapterTokens, ExpertBackend, ExpertWeights
from compute_worker.experts_grouped import GroupedBackend
from compute_worker.experts_loop import BLOCK_ROWS, LoopBackend, rows_are_independent
from compute_worker.experts_torch import TorchLayerExperts
from epilora.model_spec import GateUpLayout


class RecordingBackend:
    """Passes through, and keeps how many rows each local slot got."""

    def __init__(self, inner: ExpertBackend) -> None:
        self.inner = inner
        self.rows_per_slot: list[list[int]] = []

    def forward(
        self, weights: ExpertWeights, arrived: ArrivedTokens, adapters: Sequence[AdapterTokens]
    ) -> torch.Tensor:
        num_slots = weights.gate_up_eHD.shape[0]
        self.rows_per_slot.append(torch.bincount(arrived.slot_NK.flatten(), minlength=num_slots).tolist())
        return self.inner.forward(weights, arrived, adapters)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["loop", "grouped"])
@pytest.mark.parametrize("size", ["fixture", "small", "wide"])
def test_base_rows_keep_their_bits(size: str, backend: str, dtype: str, tmp_path: Path) -> None:
    if size == "fixture":
        model = FIXTURES / "models" / "qwen3moe-T"
    else:
        wide = {"hidden_size": 256, "moe_intermediate_size": 192, "num_experts": 16} if size == "wide" else {}
        model = write_model(small_config("qwen3_moe", **wide), tmp_path / "model")
    rank = Rank(model, work=tmp_path, expert_backend=backend, dtype=dtype)
    for slot in range(2):
        adapter = random_adapter(rank.spec, slot + 1, rank_of={"gate_up": 3, "down": 3})
        rank.add_adapter(adapter, slot=slot, work=tmp_path)
    experts = rank.runner._layers[1].experts
    assert isinstance(experts, TorchLayerExperts)
    experts.backend = recorder = RecordingBackend(experts.backend)
    slots = [-1, 0, 1, -1, 0]
    prompts = [Prompt(tokens=prompt_tokens(seed, 6 + seed), slot=slot) for seed, slot in enumerate(slots)]
    plain = [Prompt(tokens=prompt.tokens) for prompt in prompts]
    mixed_logits, plain_logits = rank.prefill(prompts), rank.prefill(plain)
    for prompt, mixed, base in zip(prompts, mixed_logits, plain_logits, strict=True):
        assert torch.equal(mixed, base) == (prompt.slot == -1)
    mixed_rows, plain_rows = recorder.rows_per_slot
    assert mixed_rows != plain_rows, "the adapters must change the routing, or this shows nothing"


@pytest.mark.parametrize("shape", [(8, 6), (12, 8), (5, 7), (24, 32), (130, 100), (1536, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", [LoopBackend, GroupedBackend])
def test_a_row_does_not_feel_other_rows(
    backend: type[LoopBackend | GroupedBackend], dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    first_width, hidden = shape[0] * 2, shape[1]
    generator = torch.Generator().manual_seed(1)
    weights = ExpertWeights(
        gate_up_eHD=torch.randn((3, first_width, hidden), generator=generator).to(dtype),
        down_eDF=torch.randn((3, hidden, shape[0]), generator=generator).to(dtype),
        gate=lambda h: torch.nn.functional.silu(h[:, : shape[0]]) * h[:, shape[0] :],
        layout=GateUpLayout.CONCATENATED,
    )
    num_tokens = 3 * BLOCK_ROWS
    x_ND = torch.randn((num_tokens, hidden), generator=generator).to(dtype)
    watched = torch.randperm(num_tokens, generator=generator)[:7]
    slot_of_watched = torch.randint(3, (7, 2), generator=generator)
    results = []
    for _ in range(6):
        others_ND = torch.randn((num_tokens, hidden), generator=generator).to(dtype)
        others_ND[watched] = x_ND[watched]
        slot_NK = torch.randint(-1, 3, (num_tokens, 2), generator=generator)
        slot_NK[watched] = slot_of_watched
        arrived = ArrivedTokens(x_ND=others_ND, slot_NK=slot_NK, weight_NK=torch.full((num_tokens, 2), 0.5), extras={})
        results.append(backend().forward(weights, arrived, [])[watched])
    for result in results[1:]:
        assert torch.equal(result, results[0])


def test_a_shape_that_cannot_keep_bits_is_found() -> None:
    class Drifting(torch.Tensor):
        """Weights whose product depends on the place of a row."""

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
            if func in (torch.Tensor.__matmul__, torch.Tensor.matmul, torch.matmul):
                result = result + torch.arange(result.shape[0]).unsqueeze(1) * 1e-3
            return result

    weight = torch.randn(4, 5)
    assert rows_are_independent(weight, 1)
    assert not rows_are_independent(weight.as_subclass(Drifting), BLOCK_ROWS)
