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
    tail_m: int = 0
    """Base tiles of at most this many rows run in a body of so many rows (0: all take block_m)."""
    extra_m: int = 0
    """In a step without adapters, rows more that an expert's last base tile may have: they meet the weights that its
    others have brought (16 or 32; 0: they get a tile of their own). Not with swap."""
    lora_extra_m: int = 0
    """The same for a step with adapters; a row's bits do not depend on its tile."""
    expand_down: str = "combine"
    """Where the down delta is added: combine (row by row) | grouped (its own launch, one pair tile a program) |
    epilogue (of the down GEMM; the fused path's only choice)."""
    delta_columns: int = 64
    """Extra K columns of one step of an epilogue that adds deltas (32 or 64)."""
    block_f: int = 128
    """Columns of an activation tile."""
    span: int = 1
    """Column tiles that one program of the activation (and of the grouped expand) walks."""
    act_warps: int = 4
    """Warps of an activation program."""
    block_d: int = 128
    """Columns of a combine tile that also expands rank 16; fewer for tables of wider ranks."""
    combine_warps: int = 4
    """Warps of such a combine program."""
    shrink_block_k: int = 128
    shrink_columns: int = 128
    """Rows of A, of gate and up side by side, that one program multiplies with its rows of x."""
    shrink_stages: int = 4
    """Blocks of K that a shrink has on their way."""
    shrink_splits: int = 1
    """Programs that share the sum over D of a gate and up shrink (fused path; then they take all columns)."""
    down_shrink_splits: int = 1
    """The same for the sum over F of a down shrink."""
    pdl: bool = False
    """Programmatic dependent launch: each kernel launches while the one before it drains. In the fused path only beside
    adapters, where a GEMM's main loop then begins beside the last shrinks."""
    base_pdl: bool = False
    """The same for the fused path without adapters, where the down GEMM then begins on the first tiles (`first_tiles`)
    while the last gate and up tiles run, if both are n_fastest."""

    def __post_init__(self) -> None:
        for name in ("extra_m", "lora_extra_m"):
            rows = getattr(self, name)
            if rows not in (0, 16, 32) or rows > self.block_m:
                raise ValueError(f"{name} must be 0, 16 or 32 and at most block_m {self.block_m}, got {rows}")
            if rows and (self.gate_up.swap or self.down.swap):
                raise ValueError(f"{name} does not go with a tile that has the weights on the M side (swap)")
        if not 0 <= self.tail_m <= self.block_m:
            raise ValueError(f"tail_m must be at most block_m {self.block_m}, got {self.tail_m}")
        if self.expand_down not in ("combine", "grouped", "epilogue"):
            raise ValueError(f"expand_down must be combine, grouped or epilogue, got {self.expand_down!r}")
        if self.expand_down == "epilogue" and not self.fused:
            raise ValueError("expand_down 'epilogue' needs the fused path, whose shrinks list the columns that it adds")
        if self.delta_columns not in (32, 64):
            raise ValueError(f"delta_columns must be 32 or 64, got {self.delta_columns}")

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


# Programs that run together share rows of x while an expert's gate and up weights are not much larger than L2.
_L2_FRIENDLY_BYTES = 64 << 20
_FEW_EXPERTS = 16


def _tile(
    block_n: int, block_k: int, num_warps: int, num_stages: int, *, rows_first: bool, swap: bool = False
) -> GemmTile:
    return GemmTile(
        block_n=block_n, block_k=block_k, num_warps=num_warps, num_stages=num_stages, swap=swap, tma=True,
        n_fastest=rows_first,
    )  # fmt: skip


def rule(weights: MoEWeights, *, num_tokens: int, top_k: int) -> MoEConfig:
    """A configuration for a shape that nobody tuned, from the rows an expert can expect in the bucket."""
    rows = token_bucket(num_tokens) * top_k / weights.routed_experts
    expert_bytes = weights.gate_up_eND[0].numel() * weights.gate_up_eND.element_size()
    fused = _fused_rule(weights, rows, rows_first=expert_bytes <= _L2_FRIENDLY_BYTES)
    if fused is not None and weights.activation.gated:
        return fused
    if rows > 8:
        tile = _tile(64, 128, 4, 4, swap=True, rows_first=False)
        return MoEConfig(
            block_m=32 if rows <= 24 else 64, pair_block_m=16, fused=False, gate_up=tile, down=tile,
            expand_down="grouped", block_f=64, span=8, shrink_block_k=256,
        )  # fmt: skip
    # Where most rows of a token are remote, a walk over its k is mostly empty: group by pair instead.
    local = weights.routed_experts == weights.num_experts
    many = token_bucket(num_tokens) >= 32
    return MoEConfig(
        block_m=16, pair_block_m=16, fused=False, expand_down="combine" if local else "grouped",
        block_f=64 if many else 128, span=4 if many else 2,
        gate_up=_tile(64, 128, 4, 4, swap=True, rows_first=True), down=_tile(64, 128, 4, 4, swap=True, rows_first=True),
        shrink_block_k=256, shrink_columns=32, pdl=token_bucket(num_tokens) <= 32,
    )  # fmt: skip


def _fused_rule(weights: MoEWeights, rows: float, *, rows_first: bool) -> MoEConfig | None:
    """The fused configuration for so many rows an expert; None where the split path is better."""
    # Few experts have few pair tiles while they have few rows: several programs then share a shrink's sum, so that more
    # bytes are on their way.
    few = weights.num_experts <= _FEW_EXPERTS
    shares = few and rows < 512
    splits = min(4, max(1, weights.hidden_size // 1024)) if shares else 1
    down_splits = min(8, max(1, weights.intermediate_size // 2048)) if shares else 1
    if rows >= 96:
        return MoEConfig(
            block_m=128, tail_m=64, pair_block_m=64, fused=True, expand_down="epilogue", shrink_block_k=64,
            gate_up=_tile(128, 64, 8, 4, rows_first=rows_first), down=_tile(256, 64, 8, 4, rows_first=rows_first),
            shrink_splits=splits, down_shrink_splits=down_splits, extra_m=0 if few else 16, pdl=True, base_pdl=True,
        )  # fmt: skip
    if rows > 24:
        return MoEConfig(
            block_m=64, tail_m=16, pair_block_m=16, fused=True, expand_down="epilogue", shrink_block_k=128,
            shrink_stages=3,
            gate_up=_tile(64, 64, 4, 4, rows_first=rows_first), down=_tile(128, 64, 4, 4, rows_first=rows_first),
            shrink_splits=splits, down_shrink_splits=down_splits, extra_m=32 if few else 0, pdl=not few,
            base_pdl=not few,
        )  # fmt: skip
    if rows > 8 and rows_first:
        return MoEConfig(
            block_m=32, tail_m=16, pair_block_m=16, fused=True, expand_down="epilogue", shrink_block_k=128,
            gate_up=_tile(64, 64, 4, 4, rows_first=True), down=_tile(64, 128, 4, 3, rows_first=True),
            shrink_splits=splits, down_shrink_splits=down_splits, pdl=True, base_pdl=True,
        )  # fmt: skip
    return None


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
