"""Turn the results file into the markdown table of docs/kernels.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REFERENCE = Path(__file__).parent / "reference" / "h200_vllm_0_24.json"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def reference_us(cells: Sequence[dict[str, Any]], cell: dict[str, Any]) -> tuple[float | None, float | None]:
    """(base, with LoRA) of the reference for the same shape, tokens, adapters and rank; None where it has none."""

    def find(**wanted: Any) -> float | None:
        return next((c["us"] for c in cells if all(c.get(k) == v for k, v in wanted.items())), None)

    where = {"shape": cell["shape"], "tokens": cell["tokens"]}
    kind = "lora_half" if cell["half"] else "lora"
    return find(kind="base", **where), find(kind=kind, adapters=cell["adapters"], lora_rank=cell["lora_rank"], **where)


def _ratio(a: float | None, b: float | None) -> str:
    return f"{a / b:.2f}" if a and b else "-"


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def table(results: dict[str, Any]) -> str:
    """One row a cell: ours, the floor and the reference, each with its ratio."""
    reference = json.loads(REFERENCE.read_text())["cells"]
    head = ["shape", "tokens", "adapters", "lora rank", "half", "base us", "/ floor", "ref base / ours", "with LoRA us",
            "/ floor", "ref LoRA / ours", "LoRA / base", "floor's LoRA / base", "rel. error"]  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + " --: |" * len(head)]
    for c in sorted(
        results["cells"], key=lambda c: (c["shape"], c["tokens"], str(c["lora_rank"]), c["adapters"], c["half"])
    ):
        ref_base, ref_lora = reference_us(reference, c)
        row = [c["shape"], c["tokens"], c["adapters"], c["lora_rank"], "yes" if c["half"] else "", _us(c["base_us"]),
               _ratio(c["base_us"], c["floor_base_us"]), _ratio(ref_base, c["base_us"]), _us(c["lora_us"]),
               _ratio(c["lora_us"], c["floor_lora_us"]), _ratio(ref_lora, c["lora_us"]),
               _ratio(c["lora_us"], c["base_us"]), _ratio(c["floor_lora_us"], c["floor_base_us"]),
               f"{c['rel_error']:.1e}"]  # fmt: skip
        lines.append("| " + " | ".join(str(v) for v in row) + " |")
    return "\n".join(lines)


def write_docs(results: dict[str, Any], path: Path) -> None:
    """Replace what stands between the markers of `path` by the table.

    Raises:
        ValueError: it cannot be read or written, or the markers are not there, once each; the file is as it was.
    """
    try:
        text = path.read_text()
        before, begun, rest = text.partition(BEGIN)
        _, ended, after = rest.partition(END)
        if not begun or not ended or (text.count(BEGIN), text.count(END)) != (1, 1):
            raise ValueError(f"{path}: expected {BEGIN} and after it {END}, once each, around the table to replace")
        path.write_text(f"{before}{BEGIN}\n{table(results)}\n{END}{after}")
    except OSError as error:
        raise ValueError(f"{path} cannot be read and written: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text: {error}") from None
