"""What the expert layer is held to, cell by cell: `python -m benchmarks.kernels --check` prints who meets it.

Routing differs between our run and the reference's, so times are compared as us / floor_us, each with its own floor.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.kernel_report import REFERENCE

Cell = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One limit on one cell; met if value <= limit."""

    line: str
    cell: str
    value: float
    limit: float

    @property
    def met(self) -> bool:
        return self.value <= self.limit


def _name(cell: Cell) -> str:
    half = " half" if cell["half"] else ""
    return f"{cell['shape']} {cell['tokens']} n{cell['adapters']} r{cell['lora_rank']}{half}"


class _Reference:
    def __init__(self, cells: Sequence[Cell]) -> None:
        self._cells = cells

    def _us(self, kind: str, cell: Cell, *keys: str) -> float | None:
        wanted = {"kind": kind, **{k: cell[k] for k in ("shape", "tokens", *keys)}}
        return next((c["us"] for c in self._cells if all(c.get(k) == v for k, v in wanted.items())), None)

    def base_over_floor(self, cell: Cell) -> float:
        """Its best base over its own floor."""
        times = [self._us(kind, cell) for kind in ("base", "base_again", "base_functional")]
        floor = next(
            c["floor_us"]
            for c in self._cells
            if (c["kind"], c["shape"], c["tokens"]) == ("base", cell["shape"], cell["tokens"])
        )
        return min(t for t in times if t is not None) / float(floor)

    def base_us(self, cell: Cell) -> float | None:
        return self._us("base", cell)

    def lora(self, cell: Cell) -> tuple[float, float | None, float] | None:
        """(us at its defaults, us at its fastest tiles where swept, floor us); None where it has no such cell."""
        kind = "lora_half" if cell["half"] else "lora"
        wanted = {"kind": kind, **{k: cell[k] for k in ("shape", "tokens", "adapters", "lora_rank")}}
        found = next((c for c in self._cells if all(c.get(k) == v for k, v in wanted.items())), None)
        if found is None:
            return None
        swept = None if cell["half"] else self._us("lora_swept", cell, "adapters", "lora_rank")
        return found["us"], swept, found["floor_us"]


def _bases(cells: Iterable[Cell]) -> Iterator[Cell]:
    """One cell for each shape and token count, with the medians of what each cell measured of the base layer."""
    alike: dict[tuple[str, int], list[Cell]] = {}
    for c in cells:
        alike.setdefault((c["shape"], c["tokens"]), []).append(c)
    for several in alike.values():
        times = {
            key: statistics.median(c[key] for c in several)
            for key in ("base_us", "grouped_mm_us")
            if all(c.get(key) for c in several)
        }
        yield {**several[0], **times}


def _base(bases: Iterable[Cell], ref: _Reference) -> Iterator[Verdict]:
    for c in bases:
        name, ours = f"{c['shape']} {c['tokens']}", c["base_us"] / c["floor_base_us"]
        limit = (1.03 if c["tokens"] <= 1024 else 1.08) * ref.base_over_floor(c)
        yield Verdict(line="1 base over floor, against the reference's best", cell=name, value=ours, limit=limit)
        faster = {("b", 4096): 1.3, ("b", 16384): 1.3, ("a", 4096): 1.3, ("a", 16384): 1.12}.get(
            (c["shape"], c["tokens"])
        )
        if faster:
            limit = ref.base_over_floor(c) if (theirs := ref.base_us(c)) is None else theirs / faster
            yield Verdict(line="1 base, times the reference's in prefill", cell=name, value=c["base_us"], limit=limit)
        if c.get("grouped_mm_us"):
            limit = 1.08 * c["grouped_mm_us"]
            yield Verdict(line="1 base against torch._grouped_mm", cell=name, value=c["base_us"], limit=limit)


def _against_reference(cells: Iterable[Cell], ref: _Reference) -> Iterator[Verdict]:
    speedups = []
    for c in cells:
        if (theirs := ref.lora(c)) is None:
            continue
        default_us, swept_us, floor_us = theirs
        ours = c["lora_us"] / c["floor_lora_us"]
        best = min(default_us, swept_us or default_us) / floor_us
        line = "2 with LoRA over floor, against the reference's best"
        yield Verdict(line=line, cell=_name(c), value=ours, limit=best)
        speedups.append(default_us / floor_us / ours)
    if speedups:
        mean = statistics.geometric_mean(speedups)
        name = f"all {len(speedups)} cells"
        yield Verdict(line="2 geometric mean of the speedups: 1.5 over it", cell=name, value=1.5 / mean, limit=1.0)


def _decode_limit(cell: Cell) -> float | None:
    """Largest with-LoRA time over floor outside prefill; mixed ranks have their own limit."""
    tokens, rank = cell["tokens"], cell["lora_rank"]
    if rank not in (16, 64) or tokens > 1024 or tokens == 1:
        return None
    if tokens == 8:
        return 1.35
    return 1.5 if tokens == 1024 else {16: 1.2, 64: 1.3}[rank]


def own_floor_us(cell: Cell) -> float:
    """Floor of the LoRA work alone: the bytes of the pairs hit, moved once, or its FLOPs."""
    return float(cell.get("floor_pairs_us") or cell["floor_lora_us"] - cell["floor_base_us"])


def _against_floor(cells: Iterable[Cell]) -> Iterator[Verdict]:
    for c in cells:
        if c["half"]:
            if c.get("lora_half_us"):
                limit = 1.03 * (c["base_us"] + c["lora_half_us"] - c["base_half_us"])
                line = "3 half of the tokens without adapter"
                yield Verdict(line=line, cell=_name(c), value=c["lora_us"], limit=limit)
            continue
        limit_or_none = _decode_limit(c)
        if limit_or_none is not None:
            value = c["lora_us"] / c["floor_lora_us"]
            yield Verdict(line="3 with LoRA over floor", cell=_name(c), value=value, limit=limit_or_none)
        elif c["tokens"] == 1 and c["lora_rank"] in (16, 64):
            yield Verdict(line="3 one token, with over without LoRA", cell=_name(c), value=c["lora_us"] / c["base_us"],
                          limit=1.3)  # fmt: skip
        elif c["tokens"] >= 4096 and c["adapters"] == 8 and c["lora_rank"] in (16, 64):
            share = max({16: 0.15, 64: 0.30}[c["lora_rank"]] * c["base_us"], 1.5 * own_floor_us(c))
            yield Verdict(line="3 LoRA microseconds in prefill", cell=_name(c), value=c["lora_us"] - c["base_us"],
                          limit=share)  # fmt: skip


def _mixed(cells: Sequence[Cell]) -> Iterator[Verdict]:
    by_key = {(c["shape"], c["tokens"], c["adapters"], c["lora_rank"], c["half"]): c for c in cells}
    for c in cells:
        if c["lora_rank"] != "8+64":
            continue
        parts = [by_key.get((c["shape"], c["tokens"], c["adapters"], rank, False)) for rank in (8, 64)]
        if None not in parts:
            share = statistics.mean(p["lora_us"] - p["base_us"] for p in parts if p)
            yield Verdict(line="4 mixed ranks, LoRA microseconds against the sum's share", cell=_name(c),
                          value=c["lora_us"] - c["base_us"], limit=1.1 * share)  # fmt: skip
        if c.get("adapter_bytes"):
            yield Verdict(line="4 GPU bytes of adapters over their own", cell=_name(c),
                          value=c["allocated_bytes"] / c["adapter_bytes"], limit=1.02)  # fmt: skip


def verdicts(cells: Sequence[Cell]) -> list[Verdict]:
    """Every limit on every cell that has its times."""
    timed = [c for c in cells if c["base_us"] and c["lora_us"]]
    ref = _Reference(json.loads(REFERENCE.read_text())["cells"])
    return [*_base(_bases(timed), ref), *_against_reference(timed, ref), *_against_floor(timed), *_mixed(timed)]


def _missing(cells: Sequence[Cell], plan: Iterable[tuple[str, int, int, int | str, bool]]) -> list[str]:
    have = {(c["shape"], c["tokens"], c["adapters"], c["lora_rank"], c["half"]) for c in cells if c["lora_us"]}
    keys = ("shape", "tokens", "adapters", "lora_rank", "half")
    return [_name(dict(zip(keys, key, strict=True))) for key in plan if key not in have]


def summary(cells: Sequence[Cell], plan: Iterable[tuple[str, int, int, int | str, bool]]) -> dict[str, Any]:
    """By line of the limits: how many cells meet it, and each miss with its value and limit; and cells not measured."""
    lines: dict[str, Any] = {}
    for verdict in verdicts(cells):
        line = lines.setdefault(verdict.line, {"met": 0, "of": 0, "misses": []})
        line["of"] += 1
        line["met"] += verdict.met
        if not verdict.met:
            value, limit = round(verdict.value, 3), round(verdict.limit, 3)
            line["misses"].append({"cell": verdict.cell, "value": value, "limit": limit})
    return {"lines": dict(sorted(lines.items())), "not_measured": _missing(cells, plan)}


def summary_text(result: dict[str, Any]) -> str:
    """The summary for people, one line a limit, its misses below it."""
    out = []
    for line, counts in result["lines"].items():
        out.append(f"{line}: {counts['met']} of {counts['of']}")
        out += [f"    {m['cell']}: {m['value']} > {m['limit']}" for m in counts["misses"]]
    out.append(f"cells of the plan not measured: {', '.join(result['not_measured']) or 'none'}")
    return "\n".join(out)
