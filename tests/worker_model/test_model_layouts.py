"""One adapter in every layout gives the same output, on 1 to 4 ranks, with every kind of placement.

T: a wrong axis fails by shape. SQUARE (D = 2F, r = E): it does not, so only the numbers show it. GPT_OSS: gate and up
interleaved, weights stored the other way round.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from worker_model_families import family_config
from worker_model_layouts import exact_logits, explicit_placement, layout_logits
from worker_model_ranks import run_ranks
from worker_model_support import FIXTURES, Rank, prompt_tokens, write_model
from worker_model_table import END, START, layout_table

from compute_worker.model_description import load_spec_of_model
from tests.unit.epilora_layouts import LAYOUTS

_TINY = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
MODELS = {
    "T": ("qwen3_moe", {**_TINY, "num_experts": 4, "moe_intermediate_size": 6}, 3),
    "SQUARE": ("qwen3_moe", {**_TINY, "num_experts": 4, "moe_intermediate_size": 4}, 4),
    "GPT_OSS": ("gpt_oss", {**_TINY, "num_local_experts": 4, "intermediate_size": 6}, 3),
}
TOKENS = prompt_tokens(3, 13)


def _write_models(work: Path) -> None:
    for name, (model_type, options, _) in MODELS.items():
        write_model(family_config(model_type, options), work / name)


def _run(ep_rank: int, work: Path) -> dict[str, torch.Tensor]:
    """ "model/placement/layout" -> logits."""
    num_ranks = int(work.name)
    results = {}
    for name, (_, _, lora_rank) in MODELS.items():
        for placement in ("linear", "round_robin", str(work / "explicit.json")):
            rank = Rank(work / name, work=work, num_ranks=num_ranks, placement=placement)
            for layout in LAYOUTS:
                logits = layout_logits(rank, layout, TOKENS, work / name, lora_rank=lora_rank)
                if logits is not None:
                    results[f"{name}/{Path(placement).stem}/{layout}"] = logits
    return results


@pytest.mark.parametrize("num_ranks", [1, *(pytest.param(n, marks=pytest.mark.soak) for n in (2, 3)), 4])
def test_every_layout_gives_the_exact_output(tmp_path: Path, num_ranks: int) -> None:
    work = tmp_path / str(num_ranks)
    work.mkdir()
    (work / "explicit.json").write_text(json.dumps(explicit_placement(num_ranks)))
    _write_models(work)
    results = _run(0, work) if num_ranks == 1 else run_ranks(num_ranks, _run, work)[-1]
    assert len(results) == len(MODELS) * 3 * len(LAYOUTS)
    for name, (_, _, lora_rank) in MODELS.items():
        spec = load_spec_of_model(work / name)
        expected = exact_logits(work / name, spec, TOKENS, lora_rank).float()
        for place, logits in results.items():
            if place.startswith(f"{name}/"):
                torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5, msg=place)


def test_the_table_of_the_docs_is_what_is_served(tmp_path: Path) -> None:
    """Write it with `python tests/worker_model/worker_model_table.py`."""
    text = (FIXTURES.parent.parent / "docs" / "adapters.md").read_text()
    shown = text[text.index(START) + len(START) : text.index(END)].strip()
    assert shown == layout_table(tmp_path).strip()
