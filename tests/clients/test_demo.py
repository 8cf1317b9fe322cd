"""`make demo` itself: the first thing that a new user runs."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

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


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The demo's module."""
    monkeypatch.syspath_prepend(str(DEMO))
    return importlib.import_module("demo")


@pytest.mark.parametrize("ranks", ["0", "-1"])
def test_fewer_ranks_than_one_are_refused(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ranks: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo.py", "--ranks", ranks])
    with pytest.raises(SystemExit) as refused:
        demo.main()
    assert refused.value.code == 2
    assert f"argument --ranks: {ranks} is too few, expected at least 1" in capsys.readouterr().err


def test_a_service_that_does_not_come_up_leaves_its_last_error(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What goes before takes seconds, and is not what this is about."""
    monkeypatch.setattr(demo, "train_sailor", lambda *_: 0.0)
    monkeypatch.setattr(demo, "answers_of_peft", lambda *_: {})
    monkeypatch.setattr(demo, "CHECKPOINT", tmp_path)
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--ranks", "1"])
    assert demo.main() == 1
    (log,) = tmp_path.glob(".demo/run-*/service.log")
    assert capsys.readouterr().err == (
        "demo: error: the service ended with exit status 1 before it was ready: INVALID_ARGUMENT (NO_MODEL)"
        f" --model is {tmp_path}, expected a directory with a checkpoint's config.json; see {log}\n"
    )


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
    demo: ModuleType, dtype: str, tokens: list[int], change: float, agrees: bool
) -> None:
    from prompts import Answer

    expected = Answer(prompt_ids=[1], token_ids=[5, 6], logits_TV=torch.ones(2, 8))
    logits_TV = torch.ones(len(tokens), 8) + change
    served = demo.Served(answer=Answer(prompt_ids=[1], token_ids=tokens, logits_TV=logits_TV), text="", ep_rank=0)
    comparison = demo.Comparison(adapter_name="", served=served, expected=expected, dtype=dtype)
    assert comparison.agrees is agrees


def test_the_recipe_of_the_committed_adapter_names_exact_versions() -> None:
    recipe = Path(DEMO / "train_per_expert.py").read_text()
    assert "transformers==4.57.3 peft==0.17.1" in recipe
