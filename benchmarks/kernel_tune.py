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

from benchmarks.kernel_layer import Layer, layer_us
from compute_worker.kernels import GemmTile, MoEConfig, MoEWeights
from compute_worker.kernels.config import rule


def _tiles(*rows: tuple[int, int, int, int, str]) -> list[GemmTile]:
    """(block_n, block_k, warps, stages, flags): S swapped, T tensor descriptor."""
    return [
        GemmTile(block_n=n, block_k=k, num_warps=w, num_stages=s, swap="S" in flags, tma="T" in flags)
        for n, k, w, s, flags in rows
    ]


DECODE_TILES = _tiles(
    (64, 128, 4, 4, ""), (64, 64, 4, 6, "ST"), (128, 128, 4, 3, "ST"), (64, 128, 4, 4, "T"), (32, 128, 4, 4, "T"),
    (128, 64, 4, 5, "S"), (64, 128, 4, 4, "ST"),
)  # fmt: skip
MIDDLE_TILES = _tiles(
    (128, 64, 4, 3, ""), (64, 64, 4, 4, ""), (128, 64, 4, 4, "T"), (256, 64, 8, 3, "T"), (128, 64, 4, 4, ""),
)  # fmt: skip
FUSED_GATE_UP_TILES = _tiles((128, 64, 8, 4, "T"), (128, 64, 8, 3, ""), (128, 64, 8, 3, "T"), (64, 64, 8, 4, "T"))
FUSED_SMALL_TILES = _tiles((64, 64, 4, 4, ""), (128, 64, 4, 3, "T"), (64, 64, 4, 4, "T"), (128, 64, 8, 4, "T"))
PREFILL_DOWN_TILES = _tiles((128, 64, 8, 4, "T"), (256, 64, 8, 3, "T"), (256, 64, 8, 4, "T"), (256, 64, 8, 3, ""))


def structures(weights: MoEWeights, top_k: int, num_tokens: int) -> list[MoEConfig]:
    """The rule's configuration and other paths or row blocks worth trying for the rows an expert gets."""
    rows = num_tokens * top_k / weights.routed_experts
    first = rule(weights, num_tokens=num_tokens, top_k=top_k)
    if rows <= 4:
        return [first]
    if rows <= 24:
        other = "combine" if first.expand_down == "grouped" else "grouped"
        return [first, dataclasses.replace(first, expand_down=other),
                dataclasses.replace(first, block_m=48 - first.block_m)]  # fmt: skip
    if rows <= 96:
        fused = dataclasses.replace(first, fused=True, expand_down="epilogue", shrink_block_k=64,
                                    gate_up=FUSED_SMALL_TILES[1], down=MIDDLE_TILES[2])  # fmt: skip
        return [first, fused]
    return [first]


def _tile_values(best: MoEConfig, field: str) -> list[GemmTile]:
    if best.block_m <= 32:
        return DECODE_TILES
    if not best.fused:
        return MIDDLE_TILES
    if field == "down":
        return PREFILL_DOWN_TILES if best.block_m == 128 else MIDDLE_TILES
    return FUSED_GATE_UP_TILES if best.block_m == 128 else FUSED_SMALL_TILES


def neighbours(best: MoEConfig, field: str) -> Iterator[MoEConfig]:
    """Variants of one field of the best configuration so far, without those that go with no other field's value."""
    if field in ("gate_up", "down"):
        values: list[Any] = [
            dataclasses.replace(v, n_fastest=getattr(best, field).n_fastest) for v in _tile_values(best, field)
        ]
    elif field == "order":
        for gate_up, down in ((True, False), (False, True), (True, True)):
            yield dataclasses.replace(best, gate_up=dataclasses.replace(best.gate_up, n_fastest=gate_up),
                                      down=dataclasses.replace(best.down, n_fastest=down))  # fmt: skip
        return
    else:
        by_field: dict[str, list[Any]] = {
            "block_d": [32, 64, 128, 256], "combine_warps": [2, 4, 8], "block_f": [32, 64, 128],
            "act_warps": [1, 2, 4], "span": [1, 2, 4, 8], "shrink_block_k": [64, 128, 256], "shrink_stages": [3, 4],
            "pair_block_m": [16, 32, 64], "pdl": [True, False], "base_pdl": [True, False], "delta_columns": [32, 64],
            "extra_m": [0, 16, 32], "lora_extra_m": [0, 16, 32],
        }  # fmt: skip
        values = by_field[field]
    for value in values:
        if getattr(best, field) == value:
            continue
        try:
            config = dataclasses.replace(best, **{field: value})
        except ValueError:  # as extra_m beside a swapped tile, or one of more rows than the tile has
            continue
        yield config


def fields_of(config: MoEConfig) -> list[str]:
    """Fields worth varying, the costliest first. Decode tiles differ by about 1 %: their search is the last."""
    if config.fused:
        rows = ["extra_m", "lora_extra_m", "pair_block_m"]
        return [
            "delta_columns",
            "pdl",
            "base_pdl",
            "gate_up",
            "down",
            "order",
            *rows,
            "shrink_block_k",
            "shrink_stages",
        ]
    if config.block_m >= 64:
        return ["gate_up", "down", "span", "block_f", "order", "shrink_block_k", "pair_block_m"]
    fields = ["span", "block_f", "pdl", "act_warps", "shrink_block_k"]
    combines = ["combine_warps", "block_d"] if config.expand_down == "combine" else []
    return [*fields, *combines, "gate_up", "down"]


def all_candidates(weights: MoEWeights, top_k: int, num_tokens: int) -> list[MoEConfig]:
    """What the first fields could try from each structure; for compiling ahead."""
    return [c for s in structures(weights, top_k, num_tokens)
            for c in (s, *(c for field in fields_of(s)[:3] for c in neighbours(s, field)))]  # fmt: skip


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
        return float(entry.get("base_us", "inf")) + float(entry.get("lora_us", "inf"))

    best, best_us = None, float("inf")
    for config in structures(layer.weights[0], layer.shape.top_k, num_tokens):
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
