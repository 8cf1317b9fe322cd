"""Tile shapes: which path and which blocks a step of T tokens uses on a layer shape.

A configuration depends on the layer shape and the token bucket (the next power of two) alone, never on adapters: that
is what keeps a base row's bits the same whatever shares its batch. `configs/<gpu>.json` holds what the autotuner
(`benchmarks/kernels.py --tune`) measured; `rule` covers shapes and GPUs without a file.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from compute_worker.kernels.layout import MoEWeights

_CONFIG_DIR = Path(__file__).parent / "configs"


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmTile:
    """Blocks of one expert GEMM."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swap: bool = False
    """Weights on the M side of the matrix product (for block_m = 16)."""
    tma: bool = False
    """Weights through a tensor descriptor; needs block_n to divide N."""
    n_fastest: bool = False
    """Programs that run together take the same rows of x rather than the same weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """Everything that fixes the launches of one step."""

    block_m: int
    """Rows of a base tile."""
    pair_block_m: int
    """Rows of a pair tile (shrink, activation, grouped expand); at least 16."""
    fused: bool
    """True: shrinks first, deltas and activation in the GEMM epilogues. False: shrinks share the GEMM's launch,
    deltas are added by the activation and by combine."""
    gate_up: GemmTile
    """In the fused path block_n counts gate columns; as many up columns sit beside them."""
    down: GemmTile
    expand_down: str = "combine"
    """Where the down delta is added: combine (row by row) | grouped (its own launch, one pair tile a program) |
    epilogue (of the down GEMM; the fused path's only choice)."""
    block_f: int = 128
    """Columns of an activation tile."""
    span: int = 1
    """Column tiles that one program of the activation (and of the grouped expand) walks."""
    act_warps: int = 4
    """Warps of an activation program."""
    block_d: int = 128
    """Columns of a combine tile that also expands."""
    combine_warps: int = 4
    """Warps of such a combine program."""
    shrink_block_k: int = 128
    pdl: bool = False
    """Programmatic dependent launch: each kernel launches while the one before it drains."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> MoEConfig:
        return cls(**{**values, "gate_up": GemmTile(**values["gate_up"]), "down": GemmTile(**values["down"])})


def token_bucket(num_tokens: int) -> int:
    """The next power of two: all steps of a bucket run the same configuration."""
    return 1 << max(num_tokens - 1, 0).bit_length()


def shape_key(weights: MoEWeights, top_k: int) -> str:
    """Name of a layer shape in the config files."""
    experts = f"e{weights.num_experts}of{weights.routed_experts}"
    return f"{experts}_k{top_k}_d{weights.hidden_size}_f{weights.intermediate_size}"


# An expert's weight matrix up to this size stays in L2 while all programs of one of its tiles run.
_L2_FRIENDLY_BYTES = 16 << 20


def rule(weights: MoEWeights, *, num_tokens: int, top_k: int) -> MoEConfig:
    """A configuration for a shape that nobody tuned, from the rows an expert can expect in the bucket."""
    rows = token_bucket(num_tokens) * top_k / weights.routed_experts
    expert_bytes = weights.gate_up_eND[0].numel() * weights.gate_up_eND.element_size()
    # Programs of one tile side by side share x; but where an expert has more tiles, its weights must not be read twice.
    rows_first = expert_bytes <= _L2_FRIENDLY_BYTES
    if rows >= 96 and weights.activation.gated:
        return MoEConfig(
            block_m=128, pair_block_m=32, fused=True, expand_down="epilogue", shrink_block_k=64,
            gate_up=GemmTile(block_n=128, block_k=64, num_warps=8, num_stages=4, tma=True, n_fastest=rows_first),
            down=GemmTile(block_n=256, block_k=64, num_warps=8, num_stages=4, tma=True, n_fastest=rows_first),
        )  # fmt: skip
    if rows > 24:
        tile = GemmTile(block_n=128, block_k=64, num_warps=4, num_stages=3, n_fastest=rows_first)
        return MoEConfig(
            block_m=64, pair_block_m=16, fused=False, gate_up=tile, down=tile, expand_down="grouped", span=3,
            shrink_block_k=256,
        )  # fmt: skip
    if rows > 8:
        tile = GemmTile(block_n=64, block_k=128, num_warps=4, num_stages=4, tma=True, n_fastest=rows_first)
        return MoEConfig(
            block_m=32, pair_block_m=16, fused=False, gate_up=tile, down=tile, expand_down="grouped", span=3,
            shrink_block_k=256,
        )  # fmt: skip
    # Where most rows of a token are remote, a walk over its k is mostly empty: group by pair instead.
    local = weights.routed_experts == weights.num_experts
    return MoEConfig(
        block_m=16, pair_block_m=16, fused=False, expand_down="combine" if local else "grouped", span=2,
        gate_up=GemmTile(block_n=64, block_k=128, num_warps=4, num_stages=4, swap=True, tma=True, n_fastest=True),
        down=GemmTile(block_n=128, block_k=128, num_warps=4, num_stages=3, swap=True, tma=True, n_fastest=True),
        pdl=token_bucket(num_tokens) <= 32,
    )  # fmt: skip


@cache
def _tuned(device_name: str) -> dict[str, dict[str, MoEConfig]]:
    path = _CONFIG_DIR / f"{device_name.replace(' ', '_')}.json"
    if not path.exists():
        return {}
    return {
        shape: {bucket: MoEConfig.from_dict(values) for bucket, values in buckets.items()}
        for shape, buckets in json.loads(path.read_text()).items()
    }


def choose_config(weights: MoEWeights, *, num_tokens: int, top_k: int, device_name: str) -> MoEConfig:
    """The tuned configuration of (shape, token bucket) on this GPU, or else, for a shape nobody tuned, the rule's."""
    config = _sixteen_bit_config(weights, num_tokens=num_tokens, top_k=top_k, device_name=device_name)
    if weights.gate_up_eND.element_size() <= 2:
        return config
    # Tuned for elements of 2 bytes; the same bytes in flight, so that they fit where those did.
    return dataclasses.replace(
        config,
        shrink_block_k=config.shrink_block_k // 2,
        gate_up=dataclasses.replace(config.gate_up, block_k=config.gate_up.block_k // 2),
        down=dataclasses.replace(config.down, block_k=config.down.block_k // 2),
    )


def _sixteen_bit_config(weights: MoEWeights, *, num_tokens: int, top_k: int, device_name: str) -> MoEConfig:
    buckets = _tuned(device_name).get(shape_key(weights, top_k), {})
    if buckets:
        # Buckets between tuned ones take the nearest, the larger of two equally near.
        wanted = token_bucket(num_tokens).bit_length()
        return buckets[min(buckets, key=lambda b: (abs(int(b).bit_length() - wanted), -int(b)))]
    return rule(weights, num_tokens=num_tokens, top_k=top_k)
