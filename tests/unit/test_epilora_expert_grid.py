"""Adapters that are understood all at once give what looking at each tensor gives; those that must not be are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from epilora.adapters.keys import pair_tensors
from epilora.adapters.normal_form import GridPairs, NormalForm, Region
from epilora.adapters.open_adapter import OpenAdapter, open_adapter
from epilora.adapters.report import make_report
from epilora.adapters.tensor_table import TensorTable
from epilora.adapters.text_words import TextWords, all_differ
from epilora.errors import AdapterFormatError
from epilora.model_spec import ModelSpec
from tests.unit.epilora_adapters import write_adapter
from tests.unit.epilora_models import model_spec

LAYERS, E, D, F, R = 2, 4, 8, 6, 3
EXPERT = "base_model.model.model.layers.{}.mlp.experts.{}.{}"
QUERY = "base_model.model.model.layers.{}.self_attn.q_proj"
WIDTHS = {"gate_proj": (D, F), "up_proj": (D, F), "down_proj": (F, D)}
Tensors = dict[str, np.ndarray]


@pytest.fixture
def model(tmp_path: Path) -> ModelSpec:
    return model_spec(tmp_path / "model")


def _pair(module: str, fan_in: int, fan_out: int, rank: int = R) -> Tensors:
    return {
        f"{module}.lora_A.weight": np.full((rank, fan_in), 1, np.float32),
        f"{module}.lora_B.weight": np.full((fan_out, rank), 1, np.float32),
    }


def _tensors(model: ModelSpec) -> Tensors:
    dense = model.dense_modules[0]
    tensors = _pair(f"base_model.model.{dense.module}", dense.in_features, dense.out_features)
    for layer in range(LAYERS):
        for expert in range(E):
            for name, widths in WIDTHS.items():
                tensors |= _pair(EXPERT.format(layer, expert, name), *widths)
    return tensors


def _forms(adapter: OpenAdapter, model: ModelSpec) -> tuple[NormalForm, NormalForm]:
    """As a loader understands it, and by looking at each tensor."""
    assert isinstance(adapter.header.tensors, TensorTable)
    return adapter.resolve(model), adapter.resolve(model, paired=pair_tensors(adapter.header.tensors))


def _is_grid(form: NormalForm) -> bool:
    return all(isinstance(by_expert, GridPairs) for by_expert in form.experts.values())


def _same(one: NormalForm, other: NormalForm) -> None:
    assert {place: dict(by_expert) for place, by_expert in one.experts.items()} == other.experts
    for name in ("expert_layout", "dense", "saved", "ignored", "absent", "rank_differences", "warnings"):
        assert getattr(one, name) == getattr(other, name), name
    assert list(one.experts) == list(other.experts)
    assert one.used_indices() == other.used_indices()
    assert one.num_used() == len(one.used_indices())


@pytest.mark.parametrize("rank", [R, 5])
def test_a_grid_says_what_each_tensor_says(model: ModelSpec, tmp_path: Path, rank: int) -> None:
    """Also if the config has another rank, which is to be reported of each module."""
    with open_adapter(write_adapter(tmp_path / "adapter", _tensors(model), r=rank)) as adapter:
        at_once, one_by_one = _forms(adapter, model)
        assert _is_grid(at_once) == (rank == R)
        assert not _is_grid(one_by_one)
        _same(at_once, one_by_one)
        reports = [make_report(adapter.header, adapter.config(), form) for form in (at_once, one_by_one)]
        assert reports[0] == reports[1]
        pairs = next(iter(at_once.experts.values()))
        if isinstance(pairs, GridPairs):
            a, b = pairs.regions([3, 1])
            assert list(a) == [pairs[3].a, pairs[1].a]
            assert list(b) == [pairs[3].b, pairs[1].b]
            assert a[0] == Region.whole(adapter.header.tensors[int(a.rows[0])])


def test_some_experts_only(model: ModelSpec, tmp_path: Path) -> None:
    tensors = {name: array for name, array in _tensors(model).items() if "layers.1.mlp.experts.2." not in name}
    with open_adapter(write_adapter(tmp_path / "adapter", tensors)) as adapter:
        at_once, one_by_one = _forms(adapter, model)
        assert _is_grid(at_once)
        _same(at_once, one_by_one)
        assert [list(by_expert) for by_expert in at_once.experts.values()] == 3 * [[0, 1, 2, 3]] + 3 * [[0, 1, 3]]


def _another_shape(tensors: Tensors) -> None:
    tensors |= _pair(EXPERT.format(1, 2, "up_proj"), *WIDTHS["up_proj"], rank=2)


def _another_dtype(tensors: Tensors) -> None:
    for side in "AB":
        name = f"{EXPERT.format(0, 1, 'gate_proj')}.lora_{side}.weight"
        tensors[name] = tensors[name].astype(np.float16)


def _without_a_b(tensors: Tensors) -> None:
    del tensors[f"{EXPERT.format(1, 0, 'down_proj')}.lora_B.weight"]


def _twice(tensors: Tensors) -> None:
    """Under the name with the adapter's own, too."""
    for side, array in _pair(EXPERT.format(0, 3, "up_proj"), *WIDTHS["up_proj"]).items():
        tensors[side.replace(".weight", ".default.weight")] = array


def _twice_without_prefix(tensors: Tensors) -> None:
    module = EXPERT.format(0, 3, "up_proj").removeprefix("base_model.model.")
    tensors |= _pair(module, *WIDTHS["up_proj"])


def _one_too_many(tensors: Tensors) -> None:
    tensors |= _pair(EXPERT.format(1, E, "up_proj"), *WIDTHS["up_proj"])


def _spelled_with_a_zero(tensors: Tensors) -> None:
    tensors |= _pair(EXPERT.format(1, "03", "up_proj"), *WIDTHS["up_proj"])


def _unknown_layer(tensors: Tensors) -> None:
    tensors |= _pair(EXPERT.format(LAYERS, 0, "up_proj"), *WIDTHS["up_proj"])


def _wrong_width(tensors: Tensors) -> None:
    for expert in range(E):
        tensors |= _pair(EXPERT.format(1, expert, "up_proj"), D + 1, F)


@pytest.mark.parametrize(
    "change",
    [
        _another_shape,
        _another_dtype,
        _without_a_b,
        _twice,
        _twice_without_prefix,
        _one_too_many,
        _spelled_with_a_zero,
        _unknown_layer,
        _wrong_width,
    ],
)
def test_what_is_not_alike_is_looked_at_one_by_one(
    model: ModelSpec, tmp_path: Path, change: Callable[[Tensors], None]
) -> None:
    tensors = _tensors(model)
    change(tensors)
    with open_adapter(write_adapter(tmp_path / "adapter", tensors)) as adapter:
        at_once = _outcome(lambda: adapter.resolve(model))
        one_by_one = _outcome(lambda: adapter.resolve(model, paired=pair_tensors(adapter.header.tensors)))
        if isinstance(at_once, NormalForm) and isinstance(one_by_one, NormalForm):
            assert not _is_grid(at_once)
            _same(at_once, one_by_one)
        else:
            assert at_once == one_by_one


def _outcome(work: Callable[[], NormalForm]) -> NormalForm | tuple[str, str]:
    """What it makes, or why not."""
    try:
        return work()
    except AdapterFormatError as error:
        return error.reason, error.message


@pytest.mark.parametrize("patterns", [{"rank_pattern": {"q_proj": 3}}, {"alpha_pattern": {"experts.1.up_proj": 9}}])
def test_patterns_may_tell_experts_apart(model: ModelSpec, tmp_path: Path, patterns: dict[str, dict[str, int]]) -> None:
    with open_adapter(write_adapter(tmp_path / "adapter", _tensors(model), **patterns)) as adapter:
        at_once, one_by_one = _forms(adapter, model)
        assert not _is_grid(at_once)
        _same(at_once, one_by_one)


def test_words_of_a_text() -> None:
    text = b"a.7.b 12.c 0.d 07.e .f 1234567.g 12345678x.h abcdefghijk abcdefghijl"
    words = TextWords(text)
    ends = np.array([text.index(end) for end in (b".b", b".c", b".d", b".e", b".f", b".g", b".h")])
    values, begins = words.numbers(ends, max_digits=7)
    assert values.tolist() == [7, 12, 0, -1, -1, 1234567, -1]
    assert begins[:3].tolist() == [2, 6, 11]
    assert words.spells(ends[:3], np.array([7, 12, 1])).tolist() == [True, True, False]
    places = np.array([text.index(b"abcdefghijk"), text.index(b"abcdefghijl")])
    assert words.reads(places, b"abcdefghijk").tolist() == [True, False]
    assert words.reads(places, b"abcdefghij").tolist() == [True, True]
    assert words.reads(np.array([len(text) - 2]), b"jl\0").tolist() == [True]
    kinds = words.kinds(np.append(places, places[0]), np.append(places, places[0]) + 11, max_kinds=2)
    assert kinds is not None
    assert (kinds[0].tolist(), kinds[1]) == ([0, 1, 0], [0, 1])
    assert words.kinds(places, places + 11, max_kinds=1) is None
    assert words.run_starts(places, places + 10).tolist() == [0]
    assert words.run_starts(places, places + 11).tolist() == [0, 1]
    assert not all_differ(words.columns(places, places + 10))
    assert all_differ(words.columns(places, places + 11))
