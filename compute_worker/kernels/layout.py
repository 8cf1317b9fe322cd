"""What the expert layer is given: base weights and the activation between its two GEMMs.

Legend: T tokens, K experts per token, n = T * K rows, e local experts, D model dim, F expert dim, R lora rank.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch


class Activation(enum.IntEnum):
    """What happens between the gate/up GEMM and the down GEMM; the integer value is a kernel constant."""

    SILU_GATED = 0
    """silu(gate) * up: Qwen, DeepSeek, Mixtral and most others."""
    CLAMPED_SWIGLU = 1
    """(up + 1) * gate * sigmoid(alpha * gate) with both sides clamped: gpt-oss."""
    SILU = 2
    """silu(x), no gate."""
    RELU2 = 3
    """relu(x) squared, no gate."""

    @property
    def gated(self) -> bool:
        return self in (Activation.SILU_GATED, Activation.CLAMPED_SWIGLU)


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEWeights:
    """Base weights of one expert layer on this device; slot s of the first dim is local expert s."""

    gate_up_eND: torch.Tensor
    """[e, 2F, D] (gated) or [e, F, D]; contiguous, float16, bfloat16 or float32."""
    down_eDF: torch.Tensor
    """[e, D, F], contiguous, same dtype and device."""
    interleaved: bool = False
    """True: gate and up rows alternate (gpt-oss). False: F gate rows, then F up rows."""
    activation: Activation = Activation.SILU_GATED
    num_routed_experts: int | None = None
    """Experts that the router chooses among, more than e under expert parallelism (None: e). Tile shapes are chosen by
    the rows that an expert can expect."""
    gate_up_bias_eN: torch.Tensor | None = None
    """[e, 2F] (gated, in the order of the weights' rows) or [e, F], added before the activation; same dtype, device."""
    down_bias_eD: torch.Tensor | None = None
    """[e, D], added to each expert's output before the weighted sum; same dtype and device."""
    swiglu_alpha: float = 1.702
    """Only CLAMPED_SWIGLU: the factor inside the sigmoid."""
    swiglu_limit: float = 7.0
    """Only CLAMPED_SWIGLU: gate <= limit, -limit <= up <= limit."""

    def __post_init__(self) -> None:
        e, n, d = self.gate_up_eND.shape
        f = n // 2 if self.activation.gated else n
        if tuple(self.down_eDF.shape) != (e, d, f) or (self.activation.gated and n % 2):
            raise ValueError(
                f"down weights: expected shape {(e, d, f)} beside gate_up {(e, n, d)}, got {tuple(self.down_eDF.shape)}"
            )
        if d % 16 or f % 16:
            raise ValueError(f"model dim and expert dim must be multiples of 16 (16-byte loads), got D={d}, F={f}")
        if self.down_eDF.dtype != self.gate_up_eND.dtype or self.down_eDF.device != self.gate_up_eND.device:
            raise ValueError(
                f"gate_up is {self.gate_up_eND.dtype} on {self.gate_up_eND.device}, "
                f"down is {self.down_eDF.dtype} on {self.down_eDF.device}: expected the same"
            )
        if not (self.gate_up_eND.is_contiguous() and self.down_eDF.is_contiguous()):
            raise ValueError("expert weights must be contiguous")
        self._check_bias("gate_up", self.gate_up_bias_eN, (e, n))
        self._check_bias("down", self.down_bias_eD, (e, d))

    def _check_bias(self, name: str, bias: torch.Tensor | None, shape: tuple[int, int]) -> None:
        if bias is None:
            return
        like = self.gate_up_eND
        if tuple(bias.shape) != shape or bias.dtype != like.dtype or bias.device != like.device:
            raise ValueError(
                f"{name} bias: expected {shape} of {like.dtype} on {like.device}, "
                f"got {tuple(bias.shape)} of {bias.dtype} on {bias.device}"
            )
        if not bias.is_contiguous():
            raise ValueError(f"{name} bias must be contiguous")

    @property
    def num_experts(self) -> int:
        return self.gate_up_eND.shape[0]

    @property
    def routed_experts(self) -> int:
        return self.num_routed_experts or self.num_experts

    @property
    def hidden_size(self) -> int:
        return self.gate_up_eND.shape[2]

    @property
    def intermediate_size(self) -> int:
        return self.down_eDF.shape[2]
