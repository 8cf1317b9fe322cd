"""The table of docs/adapters.md: every family with every layout, tried. Run as a script, it writes the table."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent.parent)]

import torch
from worker_model_families import CONFIGS, MULTIMODAL, family_config, write_multimodal
from worker_model_layouts import DORA, exact_logits, layout_logits
from worker_model_support import Rank, prompt_tokens, write_model

from epilora.errors import EpiloraError

START, END = "<!-- layout table -->", "<!-- end of layout table -->"
DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "adapters.md"
_LAYOUTS: Mapping[str, str] = {
    "F1": "per_expert",
    "F6": "per_expert, w1 w2 w3",
    "F7": "expert_lists",
    "F2a": "target_parameters",
    "F2b": "target_parameters, swapped",
    "F3": "packed",
    "F4": "shared_outer",
    "F5": "grouped",
    "F1 DoRA": "per_expert, DoRA",
    "F2a DoRA": "target_parameters, DoRA",
}
_WHY: Mapping[str, str] = {"F2a DoRA": "PEFT has no DoRA for parameters"}
"""Of the cells that are refused."""
_OTHERS: Mapping[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 5, "moe_intermediate_size": 20, "head_dim": 8},
    "qwen2_moe": {"num_experts": 5, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 16},
    "mixtral": {"num_local_experts": 5},
    "olmoe": {"num_experts": 5},
}


def layout_table(work: Path) -> str:
    """Markdown: a row a family, a column a layout; "served" where the output is that of merged deltas in float64."""
    rows = [
        "| family | " + " | ".join(_LAYOUTS.values()) + " |",
        "| --- |" + " --- |" * len(_LAYOUTS),
    ]
    for name, options in {**_OTHERS, **CONFIGS}.items():
        write_model(family_config(name, options), work / name / "model")
        rows.append(f"| `{name}` | " + " | ".join(_cells(name, work / name)) + " |")
    for name in MULTIMODAL:
        write_multimodal(name, work / name / "model")
        rows.append(f"| `{name}` (text part) | " + " | ".join(_cells(name, work / name)) + " |")
    return "\n".join(rows) + "\n"


def _cells(name: str, work: Path) -> list[str]:
    rank = Rank(work / "model", work=work)
    tokens = prompt_tokens(3, 13)
    exact = {dora: exact_logits(work / "model", rank.spec, tokens, dora=dora).float() for dora in (False, True)}
    cells = []
    for layout in _LAYOUTS:
        try:
            logits = layout_logits(rank, layout, tokens, work)
        except EpiloraError as error:
            cells.append(f"refused: {error.reason}, {_WHY[layout]}")
            continue
        assert logits is not None
        # Not far from the exact output of a model whose own error is about 1e-5.
        torch.testing.assert_close(logits, exact[layout.endswith(DORA)], atol=1e-4, rtol=1e-4, msg=f"{name} {layout}")
        cells.append("served")
    return cells


def main() -> None:
    """Writes the table between its marks."""
    with tempfile.TemporaryDirectory() as directory:
        table = layout_table(Path(directory))
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(f"{before}{START}\n{table}{END}{after}")


if __name__ == "__main__":
    main()
