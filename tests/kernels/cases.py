"""Small expert layers with signed random weights and adapters in slice layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compute_worker.kernels import Activation, AdapterTable, LayerAdapter, MoEWeights, ProjectionSlice

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter's dot is exact in fp32; bf16 gives garbage there. The GPU runs what the service runs.
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
TOLERANCE = 1e-2 if DEVICE.type == "cuda" else 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    num_experts: int = 4
    top_k: int = 2
    hidden_size: int = 48
    intermediate_size: int = 32
    activation: Activation = Activation.SILU_GATED
    interleaved: bool = False
    biased: bool = False


def make_weights(shape: Shape, seed: int = 0, dtype: torch.dtype = DTYPE) -> MoEWeights:
    g = torch.Generator().manual_seed(seed)
    e, d, f = shape.num_experts, shape.hidden_size, shape.intermediate_size
    n = 2 * f if shape.activation.gated else f
    return MoEWeights(
        gate_up_eND=(torch.randn(e, n, d, generator=g) / d**0.5).to(DEVICE, dtype),
        down_eDF=(torch.randn(e, d, f, generator=g) / f**0.5).to(DEVICE, dtype),
        interleaved=shape.interleaved,
        activation=shape.activation,
        gate_up_bias_eN=torch.randn(e, n, generator=g).to(DEVICE, dtype) if shape.biased else None,
        down_bias_eD=torch.randn(e, d, generator=g).to(DEVICE, dtype) if shape.biased else None,
    )


def make_piece(ranks: list[int], in_size: int, out_size: int, seed: int, dtype: torch.dtype = DTYPE) -> ProjectionSlice:
    g = torch.Generator().manual_seed(seed)
    total = sum(ranks)
    return ProjectionSlice(
        a=(torch.randn(total, in_size, generator=g) / in_size**0.5).to(DEVICE, dtype),
        b=(torch.randn(out_size * total, generator=g)).to(DEVICE, dtype),
        lora_rank=torch.tensor(ranks, dtype=torch.int32),
        scale=torch.rand(len(ranks), generator=g) + 0.5,
    )


def make_adapter(shape: Shape, ranks: dict[str, list[int]], seed: int = 1, dtype: torch.dtype = DTYPE) -> LayerAdapter:
    """ranks: projection -> lora rank of each local expert (0: no pair)."""
    d, f = shape.hidden_size, shape.intermediate_size
    dims = {"gate_up": (d, 2 * f), "gate": (d, f), "up": (d, f), "down": (f, d)}
    return {
        name: make_piece(r, *dims[name], seed=seed * 10 + i, dtype=dtype) for i, (name, r) in enumerate(ranks.items())
    }


def make_table(
    shape: Shape, adapters: dict[int, LayerAdapter], num_slots: int, max_lora_rank: int = 64, dtype: torch.dtype = DTYPE
) -> AdapterTable:
    table = AdapterTable(
        num_slots=num_slots, num_experts=shape.num_experts, hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size, max_lora_rank=max_lora_rank, gated=shape.activation.gated,
        interleaved=shape.interleaved, dtype=dtype, device=DEVICE,
    )  # fmt: skip
    for slot, adapter in adapters.items():
        table.set_slot(slot, adapter)
    return table


def make_batch(
    shape: Shape, num_tokens: int, slots: list[int], seed: int = 2, dtype: torch.dtype = DTYPE
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, distinct top-k experts, weights, adapter slots cycling through `slots`)."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, shape.hidden_size, generator=g)
    expert = torch.rand(num_tokens, shape.num_experts, generator=g).argsort(1)[:, : shape.top_k].to(torch.int32)
    weight = torch.rand(num_tokens, shape.top_k, generator=g)
    slot = torch.tensor([slots[t % len(slots)] for t in range(num_tokens)], dtype=torch.int32)
    return x.to(DEVICE, dtype), expert.contiguous().to(DEVICE), weight.to(DEVICE), slot.to(DEVICE)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """||out - expected|| / ||expected||; NaN stays NaN and so fails every comparison."""
    return float((out.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30))
