"""`make demo` itself: the first thing that a new user runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.service.harness import REPOSITORY

DEMO = REPOSITORY / "examples" / "demo"


@pytest.mark.timeout(900)
def test_the_demo_agrees_with_peft_and_leaves_nothing_behind() -> None:
    before = set((REPOSITORY / ".demo").glob("*"))
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, str(DEMO / "demo.py")],
        env=environment,
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=840,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all 15 answers agree with PEFT" in done.stdout
    # The three voices: which weights answered is seen in the words.
    for answer in ("A white lighthouse stands there", "the old lady of light, matey", "a candle for the sea"):
        assert answer in done.stdout
    assert set((REPOSITORY / ".demo").glob("*")) == before


@pytest.mark.parametrize(
    "dtype, tokens, change, agrees",
    [
        ("float32", [5, 6], 0.0, True),
        ("float32", [5, 6], 9e-5, True),
        ("float32", [5, 6], 2e-4, False),
        ("float32", [5, 7], 0.0, False),
        ("float32", [5], 0.0, False),
        ("bfloat16", [5, 6], 0.01, True),
        ("bfloat16", [5, 6], 0.1, False),
        ("bfloat16", [5, 7], 0.0, False),
    ],
    ids=["equal", "rounding", "off", "other token", "too short", "bf16 rounding", "bf16 off", "bf16 other token"],
)
def test_an_answer_that_differs_is_seen(
    monkeypatch: pytest.MonkeyPatch, dtype: str, tokens: list[int], change: float, agrees: bool
) -> None:
    monkeypatch.syspath_prepend(str(DEMO))
    import demo
    from prompts import Answer

    expected = Answer(prompt_ids=[1], token_ids=[5, 6], logits_TV=torch.ones(2, 8))
    logits_TV = torch.ones(len(tokens), 8) + change
    served = demo.Served(answer=Answer(prompt_ids=[1], token_ids=tokens, logits_TV=logits_TV), text="", ep_rank=0)
    comparison = demo.Comparison(adapter_name="", served=served, expected=expected, dtype=dtype)
    assert comparison.agrees is agrees


def test_the_recipe_of_the_committed_adapter_names_exact_versions() -> None:
    recipe = Path(DEMO / "train_per_expert.py").read_text()
    assert "transformers==4.57.3 peft==0.17.1" in recipe
