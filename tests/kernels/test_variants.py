"""The settings that a GPU is to compare."""

from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels need triton")

from benchmarks.kernel_compile import H200
from benchmarks.kernel_layer import SHAPES
from benchmarks.kernel_variants import TOKENS, score, variants


def test_settings_are_all_different_and_the_shipped_one_is_first() -> None:
    for name, shape in SHAPES.items():
        for tokens in TOKENS[name]:
            settings = variants(shape, tokens, H200)
            assert next(iter(settings)) == "shipped"
            assert len(set(settings.values())) == len(settings) > 1, (name, tokens)
            assert all(setting.fused == settings["shipped"].fused for setting in settings.values())


def test_a_score_is_the_mean_of_ratios_and_none_after_a_failure() -> None:
    def cell(floor_us: float, **result: Any) -> dict[str, Any]:
        return {"floor_us": floor_us, "settings": {"it": result}}

    fine = [cell(100.0, base_us=50.0, lora_us=200.0), cell(10.0, base_us=50.0, lora_us=40.0)]
    assert score(fine, "it", 50.0) == pytest.approx(2.0)  # of 1, 2 and 4
    assert score([*fine, cell(10.0, failed="base rows differ")], "it", 50.0) is None
