"""A small autotuner: coordinate descent over tile shapes, one token bucket at a time.

The objective is base time plus with-LoRA time (8 adapters, rank 16), because one configuration serves both: a bucket's
base rows must not change with the adapters beside them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.kernel_layer import Layer, Shape, layer_us
from compute_worker.kernels import GemmTile, MoEConfig
from compute_worker.kernels.config import rule

DECODE_TILES = [
    GemmTile(block_n=n, block_k=k, num_warps=4, num_stages=s, swap=swap, tma=tma)
    for n, k, s, swap, tma in (
        (64, 128, 4, False, False), (32, 256, 4, False, False), (128, 64, 4, False, False), (64, 256, 3, False, False),
        (64, 128, 4, True, False), (64, 256, 3, True, False), (128, 64, 5, True, False), (128, 128, 3, True, False),
        (64, 128, 4, True, True), (64, 256, 3, True, True), (128, 128, 3, True, True), (64, 128, 4, False, True),
        (64, 64, 6, True, True), (32, 128, 4, False, True),
    )
]  # fmt: skip
MIDDLE_TILES = [
    GemmTile(block_n=n, block_k=k, num_warps=w, num_stages=s, tma=tma)
    for n, k, w, s, tma in (
        (64, 64, 4, 4, False), (128, 64, 4, 3, False), (128, 64, 4, 4, True), (64, 128, 4, 3, False),
        (128, 128, 8, 3, False), (64, 128, 4, 3, True), (128, 128, 4, 3, True), (256, 64, 8, 3, True),
    )
]  # fmt: skip
FUSED_GATE_UP_TILES = [
    GemmTile(block_n=n, block_k=64, num_warps=w, num_stages=s, tma=tma)
    for n, w, s, tma in (
        (64, 4, 4, False), (64, 8, 4, True), (64, 4, 4, True), (128, 8, 3, False), (128, 8, 3, True), (128, 8, 4, True)
    )
]  # fmt: skip
PREFILL_DOWN_TILES = [
    GemmTile(block_n=n, block_k=64, num_warps=w, num_stages=s, tma=tma)
    for n, w, s, tma in (
        (128, 4, 4, False), (128, 8, 4, False), (128, 4, 4, True), (128, 8, 4, True), (256, 8, 3, True), (256, 8, 4, True)
    )
]  # fmt: skip


def structures(shape: Shape, num_tokens: int) -> list[MoEConfig]:
    """Paths and row blocks worth trying for the rows an expert gets."""
    rows = num_tokens * shape.top_k / shape.routed_experts
    base = rule(num_tokens=num_tokens, num_experts=shape.routed_experts, top_k=shape.top_k, gated=True)
    decode = GemmTile(block_n=64, block_k=128, num_warps=4, num_stages=4)
    middle = GemmTile(block_n=128, block_k=64, num_warps=4, num_stages=3)
    split = dataclasses.replace(base, fused=False, block_m=16, pair_block_m=16, gate_up=decode, down=decode,
                                expand_down="combine", block_d=32)  # fmt: skip
    fused = dataclasses.replace(
        base, fused=True, expand_down="epilogue", block_m=128, pair_block_m=32, block_d=256,
        gate_up=GemmTile(block_n=64, block_k=64, num_warps=8, num_stages=4),
        down=GemmTile(block_n=128, block_k=64, num_warps=8, num_stages=4),
    )  # fmt: skip
    if rows <= 4:
        return [split]
    if rows <= 24:
        return [split, dataclasses.replace(split, expand_down="grouped"), dataclasses.replace(split, block_m=32)]
    wide = dataclasses.replace(split, block_m=64, gate_up=middle, down=middle, block_d=128, expand_down="grouped")
    if rows <= 96:
        small = dataclasses.replace(fused, block_m=64, pair_block_m=16,
                                    gate_up=dataclasses.replace(fused.gate_up, num_warps=4),
                                    down=dataclasses.replace(fused.down, num_warps=4))  # fmt: skip
        return [wide, dataclasses.replace(wide, expand_down="combine"), dataclasses.replace(wide, block_m=32), small]
    return [fused, dataclasses.replace(fused, pair_block_m=64), dataclasses.replace(wide, block_m=128)]


def neighbours(best: MoEConfig, field: str) -> Iterator[MoEConfig]:
    """Variants of one field of the best configuration so far."""
    if field in ("gate_up", "down"):
        tiles = DECODE_TILES if best.block_m <= 32 else MIDDLE_TILES
        if best.block_m >= 64 and best.fused:
            tiles = FUSED_GATE_UP_TILES if field == "gate_up" else PREFILL_DOWN_TILES
        if best.block_m >= 64 and not best.fused:
            tiles = MIDDLE_TILES
        values: list[Any] = list(tiles)
    else:
        values = {"block_d": [16, 32, 64, 128, 256], "block_f": [32, 64, 128], "shrink_block_k": [64, 128, 256],
                  "pair_block_m": [16, 32, 64]}[field]  # fmt: skip
    for value in values:
        if getattr(best, field) != value:
            yield dataclasses.replace(best, **{field: value})


def fields_of(config: MoEConfig) -> list[str]:
    """Fields worth varying, the costliest first."""
    fields = ["gate_up", "down", "block_d", "shrink_block_k"]
    return [*fields, "pair_block_m"] if config.fused else [*fields, "block_f"]


def all_candidates(shape: Shape, num_tokens: int) -> list[MoEConfig]:
    """Every configuration one round could try from each structure; for compiling ahead."""
    out = []
    for start in structures(shape, num_tokens):
        out.append(start)
        for field in ("gate_up", "down"):
            out.extend(neighbours(start, field))
    return out


def tune(layer: Layer, num_tokens: int, *, replays: int, deadline: float) -> tuple[MoEConfig, list[dict[str, Any]]]:
    """Best configuration of the bucket and the log of everything tried (losers included); stops at the deadline."""
    batches = layer.batches(num_tokens=num_tokens, num_adapters=8, half=False, seed=num_tokens)
    tables = layer.tables([16] * 8)
    log: list[dict[str, Any]] = []

    def measure(config: MoEConfig) -> float:
        entry: dict[str, Any] = {"tokens": num_tokens, "config": config.to_dict()}
        try:
            entry["base_us"] = layer_us(layer, batches, None, config, replays)
            entry["lora_us"] = layer_us(layer, batches, tables, config, replays)
        except Exception as error:  # a tile that does not fit shared memory is an answer, not a failure
            torch.cuda.synchronize()
            entry["error"] = f"{type(error).__name__}: {error}"[:200]
        log.append(entry)
        return entry.get("base_us", float("inf")) + entry.get("lora_us", float("inf"))

    best, best_us = None, float("inf")
    for config in structures(layer.shape, num_tokens):
        us = measure(config)
        if us < best_us:
            best, best_us = config, us
    assert best is not None, f"no structure ran for {num_tokens} tokens: {log}"
    for field in fields_of(best):
        for config in neighbours(best, field):
            if time.monotonic() > deadline:
                return best, log
            us = measure(config)
            if us < best_us:
                best, best_us = config, us
    return best, log
