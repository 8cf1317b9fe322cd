"""adapter_config.json: refusals by name, defaults, and patterns as PEFT matches them."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epilora.adapters import peft_config
from epilora.adapters.patterns import ModulePatterns
from epilora.adapters.peft_config import parse_peft_config
from epilora.errors import AdapterFormatError

FIELDS = ["peft_type", "peft_version", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"]


def _parse(**changes: Any) -> Any:
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **changes}
    return parse_peft_config(json.dumps(values).encode())


REFUSED = {
    "peft_type": ["LOHA", "IA3", None, 1],
    "bias": ["all", "lora_only"],
    "trainable_token_indices": [[1, 2], {"embed_tokens": [3]}],
    "layer_replication": [[[0, 2], [1, 3]]],
    "alora_invocation_tokens": [[1], []],
    "use_qalora": [True],
    "use_bdlora": [{"nblocks": 2}],
    "arrow_config": [{"top_k": 1}],
    "kasa_config": [{"beta": 1}],
    "monteclora_config": [{"num_samples": 1}],
    "megatron_config": [{"tensor_parallel": 2}],
    "init_lora_weights": ["pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "lora_ga", "future", 3],
    "some_future_field": [True, "x", [1]],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in REFUSED.items() for value in values])
def test_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(AdapterFormatError, match=field) as caught:
        _parse(**{field: value})
    assert caught.value.reason == "UNSUPPORTED_ADAPTER"
    assert caught.value.metadata["config_field"] == field


@pytest.mark.parametrize(
    "changes",
    [{"init_lora_weights": value} for value in (True, False, None, "gaussian", "Gaussian", "eva", "orthogonal", "mica")]
    + [{"bias": None}, {"bias": "none"}, {"use_dora": False}, {"modules_to_save": []}, {"some_future_field": None}]
    + [{"lora_dropout": 0.5, "target_modules": "all-linear", "layers_to_transform": [1], "exclude_modules": ["x"]}],
)
def test_accepted(changes: dict[str, Any]) -> None:
    assert _parse(**changes).warnings == ()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"r": 0}, "r is 0, expected a positive integer"),
        ({"r": 4.0}, r"r is 4\.0"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": "16"}, "lora_alpha is '16', expected a finite number"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes'"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern is"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern is"),
        ({"alpha_pattern": {"q_proj(": 1}}, "is not a regular expression"),
        ({"alpha_pattern": {"(a+)+": 1}}, "may take forever"),
        ({"alpha_pattern": {"a*b*c*d*e*": 1}}, "may take forever"),
        ({"alpha_pattern": {".?" * 30 + "x": 1}}, "may take forever"),
        ({"alpha_pattern": {"(.|.)" * 30 + "x": 1}}, "may take forever"),
        ({"alpha_pattern": {r"(a)\\*\1": 1}}, "may take forever"),
        ({"alpha_pattern": {r"\\\\(a+)*": 1}}, "may take forever"),
        ({"rank_pattern": {"x" * 600: 1}}, "600 characters"),
        ({"target_parameters": "mlp.experts.gate_up_proj"}, "target_parameters is"),
        ({"target_parameters": ["x"] * 20_000}, "20000 names"),
        ({"peft_version": 18}, "peft_version is 18"),
        ({"use_dora": 1}, "use_dora is 1, expected true or false"),
        ({"use_dora": True, "lora_bias": True}, "use_dora and lora_bias are both set"),
        ({"modules_to_save": "lm_head"}, "modules_to_save is 'lm_head', expected a list"),
    ],
)
def test_bad_values(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(AdapterFormatError, match=text) as caught:
        _parse(**changes)
    assert caught.value.reason == "BAD_ADAPTER_CONFIG"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"x": "\\ud800"}'])
def test_broken_json(content: bytes) -> None:
    with pytest.raises(AdapterFormatError) as caught:
        parse_peft_config(content)
    assert caught.value.reason == "BAD_ADAPTER_CONFIG"


def test_defaults_are_pefts_and_named() -> None:
    config = parse_peft_config(b'{"peft_type": "LORA"}')
    assert config.ranks.value_of("x") == 8
    assert config.scale_of("x", 8) == 1.0
    assert [warning.split(";")[0] for warning in config.warnings] == [
        "adapter_config.json has no r",
        "adapter_config.json has no lora_alpha",
    ]
    assert "lora_alpha is 0" in _parse(lora_alpha=0).warnings[0]
    assert _parse(lora_alpha=-4).scale_of("x", 4) == -1.0


def test_every_field_that_peft_writes_is_known_and_documented() -> None:
    """Honoured, refused by name, or known to have no effect: no field is passed over."""
    peft = pytest.importorskip("peft")
    written = set(peft.LoraConfig().to_dict()) | {field.name for field in dataclasses.fields(peft.LoraConfig)}
    known = peft_config._NO_EFFECT | peft_config._HONOURED | set(peft_config._REFUSED)
    assert written <= known
    text = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text()
    table = text.split("## adapter_config.json", 1)[1].split("\n## ", 1)[0]
    missing = sorted(field for field in known if f"`{field}`" not in table)
    assert not missing


PATTERNS = [
    "q_proj",
    "self_attn.q_proj",
    "proj",
    "layers.1.self_attn.q_proj",
    "^model.layers.0.self_attn.q_proj",
    "^layers.0.self_attn.q_proj",
    r".*\.experts\.[02]\.(w1|w2)",
    r"model\.layers\.\d+\.mlp\.gate",
    "mlp.gate",
    "gate",
    r".*\.gate_up_proj",
    "experts.down_proj",
    "model.layers.0.self_attn.q_proj",
    "",
]
MODULES = [
    "q_proj",
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.q_proj",
    "model.layers.11.self_attn.q_proj",
    "model.layers.0.self_attn.xq_proj",
    "model.layers.0.mlp.gate",
    "model.layers.0.mlp.gate_proj",
    "model.layers.0.mlp.shared_expert_gate",
    "model.layers.0.block_sparse_moe.experts.2.w1",
    "model.layers.0.block_sparse_moe.experts.12.w1",
    "model.layers.0.mlp.experts.gate_up_proj",
    "model.layers.0.mlp.experts.down_proj",
]


@pytest.mark.parametrize("module", MODULES)
def test_patterns_match_as_in_peft(module: str) -> None:
    other = pytest.importorskip("peft.utils.other")
    table = {pattern: number for number, pattern in enumerate(PATTERNS)}
    for keys in ([pattern] for pattern in PATTERNS):
        single = {key: table[key] for key in keys}
        expected = single.get(other.get_pattern_key(single.keys(), module), -1)
        assert ModulePatterns("p", single, -1).value_of(module) == expected, keys
    for start in range(len(PATTERNS)):
        rotated = {key: table[key] for key in PATTERNS[start:] + PATTERNS[:start]}
        expected = rotated.get(other.get_pattern_key(rotated.keys(), module), -1)
        assert ModulePatterns("p", rotated, -1).value_of(module) == expected


def test_matching_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst expression that is accepted takes a moment a name; many names are stopped."""
    monkeypatch.setattr("epilora.adapters.patterns._MAX_SECONDS", 0.05)
    patterns = ModulePatterns("alpha_pattern", {".*.*.*.*X": 1}, 0)
    start = time.monotonic()
    names = (f"model.layers.{layer}.mlp.experts.127.down_proj" for layer in range(100_000))
    with pytest.raises(AdapterFormatError, match="alpha_pattern takes more than"):
        list(map(patterns.value_of, names))
    assert time.monotonic() - start < 20


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=9), children, max_size=3),
    max_leaves=8,
)
configs = st.dictionaries(st.sampled_from([*REFUSED, *FIELDS]), json_values, max_size=6)


@settings(max_examples=300, deadline=None)
@given(values=configs)
def test_any_values_give_a_config_or_a_clean_error(values: dict[str, Any]) -> None:
    try:
        config = _parse(**values)
        assert math.isfinite(config.scale_of("model.layers.0.self_attn.q_proj", 3))
    except AdapterFormatError as error:
        text = f"{error.reason} {error.message}"
        assert len(text) < 1500


def test_scales_that_no_float32_holds() -> None:
    with pytest.raises(AdapterFormatError, match="more than a float32 holds"):
        _parse(lora_alpha=1e300).scale_of("x", 4)


def test_entries_that_contest_a_module_are_named() -> None:
    """PEFT saves its patterns sorted: which of them came first in training is lost."""
    patterns = ModulePatterns("alpha_pattern", {r"layers\.0\..*": 4.0, "k_proj": 4.0, "q_proj": 8.0, "x": 1.0}, 6.0)
    assert patterns.value_of("model.layers.0.self_attn.k_proj") == 4.0
    assert patterns.conflicts == [], "entries of one value do not differ"
    assert patterns.value_of("model.layers.0.self_attn.q_proj") == 4.0
    assert patterns.value_of("model.layers.0.self_attn.o_proj") == 4.0
    assert patterns.value_of("model.layers.1.self_attn.q_proj") == 8.0
    (conflict,) = patterns.conflicts
    assert conflict == r"model.layers.0.self_attn.q_proj by 'layers\\.0\\..*' (4.0) and by 'q_proj' (8.0)"
