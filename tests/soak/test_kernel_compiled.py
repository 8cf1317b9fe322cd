"""Kernels compiled for a GPU that need not be there: what the compiler made of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need triton")
ROOT = Path(__file__).resolve().parents[2]


def compiled(module: str, cache: Path, timeout: float, *arguments: str) -> str:
    """What a module prints that compiles kernels."""
    # The interpreter, which other tests run kernels in, compiles nothing.
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**env, "TRITON_CACHE_DIR": str(cache)},
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_every_launch_fits_an_h200(tmp_path: Path) -> None:
    """Three real shapes, 1 to 16,384 tokens, without adapters and with lora ranks up to the largest."""
    assert len(compiled("benchmarks.kernel_compile", tmp_path, 880).splitlines()) == 54


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "tokens, settings",
    [
        ("256,4096", ["pdl=true"]),
        ("4096", ["delta_columns=32"]),
    ],
    ids=["overlapped", "narrow_lists"],
)
def test_settings_that_are_not_shipped_fit_too(tmp_path: Path, tokens: str, settings: list[str]) -> None:
    """And spill next to nothing: what the interpreter runs need not compile."""
    arguments = [part for setting in settings for part in ("--set", setting)]
    lines = compiled("benchmarks.kernel_compile", tmp_path, 580, "--shapes", "a", "--tokens", tokens, *arguments)
    assert len(lines.splitlines()) == 3 * len(tokens.split(","))
    assert max((int(stack) for stack in re.findall(r"r\+(\d+)", lines)), default=0) <= 64, lines


@pytest.mark.soak
def test_an_adapter_slot_is_not_waited_for(tmp_path: Path) -> None:
    """What is loaded after a store waits for it: a trip to memory more for each part of a row."""
    without, with_slot = json.loads(compiled("tests.soak.compiled_rows", tmp_path, 200)).values()
    for kernel in ("_pack_kernel", "_unpack_kernel"):
        order = with_slot[kernel]
        assert order == sorted(order), (kernel, order)
        assert len(order) == len(without[kernel]) + 2
    before, after = (order["dispatch_kernel"] for order in (without, with_slot))
    assert after.index("store") == before.index("store") + 1, (before, after)
    assert after.count("load") == before.count("load") + 1
    # One for each rank.
    assert after.count("store") == before.count("store") + 2
