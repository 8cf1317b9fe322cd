"""adapter_config.json: what of it counts when an adapter is served, and what is refused by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from epilora.adapters.patterns import ModulePatterns
from epilora.adapters.safetensors_header import is_text
from epilora.adapters.targets import TargetModules
from epilora.errors import AdapterFormatError

MAX_CONFIG_BYTES = 16 << 20
_MAX_NAMES = 10_000
_MAX_FLOAT32 = 3.4028234e38
_DEFAULTS: Mapping[str, int] = {"r": 8, "lora_alpha": 8}

# Fields that say how an adapter was trained or what it was applied to; the tensors of the file show the result.
_NO_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_dtype",
        "lora_ga_config",
        "lorap_emb_lr",
        "lorap_lr_ratio",
        "megatron_core",
        "model_key_mapping",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "velora_config",
    }
)
_HONOURED = frozenset(
    {
        "peft_type",
        "peft_version",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_parameters",
        "init_lora_weights",
        "fan_in_fan_out",
        "bias",
        "ensure_weight_tying",
        "use_dora",
        "lora_bias",
        "modules_to_save",
    }
)
# What a truthy value of a field would mean, as the reason of a refusal.
_REFUSED: Mapping[str, str] = {
    "trainable_token_indices": "rows of the embedding are replaced by trained ones",
    "layer_replication": "decoder layers are repeated, so the adapter is for another model",
    "alora_invocation_tokens": "activated LoRA applies to part of a sequence only",
    "use_qalora": "QALoRA pools the input of lora_A",
    "use_bdlora": "block-diagonal LoRA splits the pair",
    "arrow_config": "Arrow routes among several adapters",
    "kasa_config": "KaSA truncates the base weights and has a diagonal between A and B",
    "monteclora_config": "MonteCLoRA samples around the pair",
    "megatron_config": "the file may hold shards of tensor-parallel layers",
}
_INITS_THAT_KEEP_THE_BASE = ("gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftConfig:
    """A LoRA adapter's config."""

    ranks: ModulePatterns[int]
    """lora_rank of a module, as the config has it."""
    alphas: ModulePatterns[float]
    """lora_alpha of a module."""
    use_rslora: bool
    target_parameters: tuple[str, ...]
    """Names (or suffixes) of stacked parameters that have a pair."""
    peft_version: str
    """Recorded by the writer; empty if it recorded none."""
    base_model: str
    """base_model_name_or_path, for messages; may be empty."""
    ties_embeddings: bool
    """ensure_weight_tying."""
    uses_dora: bool
    """Each pair has a magnitude."""
    has_biases: bool
    """lora_bias: each lora_B has a bias."""
    modules_to_save: tuple[str, ...]
    """Ends of the paths of modules whose whole weights are in the file."""
    target_modules: TargetModules
    """Which modules should have a pair."""
    warnings: tuple[str, ...]

    @property
    def has_patterns(self) -> bool:
        """True if modules may differ in lora_rank or alpha."""
        return self.ranks.num_patterns > 0 or self.alphas.num_patterns > 0

    def scale_of(self, module: str, lora_rank: int) -> float:
        """alpha / r, or alpha / sqrt(r) with rsLoRA; r is the tensors'.

        Raises:
            AdapterFormatError: reason BAD_ADAPTER_CONFIG; the scale is no float32.
        """
        divisor = math.sqrt(lora_rank) if self.use_rslora else lora_rank
        scale = self.alphas.value_of(module) / divisor
        if abs(scale) > _MAX_FLOAT32:
            raise _error(f"the scale of {module} is {scale}, which is more than a float32 holds")
        return scale

    def targets_parameter(self, parameter: str) -> bool:
        """True if target_parameters names a parameter, by its path or by a suffix at a dot, as PEFT matches it."""
        return any(parameter == name or parameter.endswith(f".{name}") for name in self.target_parameters)

    def leaves_out(self, module: str) -> str:
        """The field by which a module (outside the experts) would have no pair in PEFT; empty if it has one."""
        field = self.target_modules.leaves_out(module)
        return "" if field and self.targets_parameter(f"{module}.weight") else field

    def saves(self, module: str) -> bool:
        """True if modules_to_save names a module, by the end of its path, as PEFT matches it."""
        return any(module.endswith(name) for name in self.modules_to_save)

    def targets_parameter_named(self, name: str) -> bool:
        """True if an entry of target_parameters ends in a parameter's name."""
        return any(entry.rpartition(".")[2] == name for entry in self.target_parameters)


def parse_peft_config(content: bytes) -> PeftConfig:
    """Reads adapter_config.json.

    Raises:
        AdapterFormatError: reason BAD_ADAPTER_CONFIG (broken), or UNSUPPORTED_ADAPTER (a feature that we cannot
            honour, named in the message).
    """
    values = _load(content)
    _refuse_unsupported(values)
    warnings: list[str] = []
    for field, default in _DEFAULTS.items():
        if values.get(field) is None:
            warnings.append(f"adapter_config.json has no {field}; PEFT's default {default} is used")
    lora_rank = _or_default(values, "r", _is_rank, "a positive integer")
    alpha = _or_default(values, "lora_alpha", _is_number, "a finite number")
    if alpha == 0:
        warnings.append("lora_alpha is 0: modules without an alpha_pattern are not changed")
    if values.get("use_dora") and values.get("lora_bias"):
        raise _error("use_dora and lora_bias are both set, which PEFT does not allow")
    if values.get("fan_in_fan_out"):
        warnings.append("fan_in_fan_out is set; it has no meaning for this model's linear maps, as in PEFT")
    return PeftConfig(
        ranks=ModulePatterns("rank_pattern", _table(values, "rank_pattern", _is_rank, "positive integers"), lora_rank),
        alphas=ModulePatterns(
            "alpha_pattern", _table(values, "alpha_pattern", _is_number, "finite numbers"), float(alpha)
        ),
        use_rslora=_flag(values, "use_rslora"),
        target_parameters=_names(values, "target_parameters"),
        peft_version=_text(values, "peft_version"),
        base_model=_text(values, "base_model_name_or_path"),
        ties_embeddings=_flag(values, "ensure_weight_tying"),
        uses_dora=_flag(values, "use_dora"),
        has_biases=_flag(values, "lora_bias"),
        modules_to_save=_names(values, "modules_to_save"),
        target_modules=TargetModules.of(values),
        warnings=tuple(warnings),
    )


def _load(content: bytes) -> dict[str, Any]:
    try:
        values = json.loads(content)
        text = json.dumps(values, ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        raise _error(f"not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise _error(f"holds {type(values).__name__}, not an object")
    if not is_text(text):
        raise _error("holds strings that are not Unicode text")
    return values


def _refuse_unsupported(values: Mapping[str, Any]) -> None:
    peft_type = values.get("peft_type")
    if peft_type != "LORA":
        raise _unsupported(f"peft_type is {_short(peft_type)}, expected 'LORA'", "peft_type")
    for field, meaning in _REFUSED.items():
        # An empty list is a setting here: activated LoRA with no invocation tokens is still not plain LoRA.
        if values.get(field) or (field == "alora_invocation_tokens" and values.get(field) is not None):
            raise _unsupported(f"{field} is {_short(values[field])}: {meaning}", field)
    if values.get("bias") not in (None, "none"):
        raise _unsupported(f"bias is {_short(values['bias'])}: biases of the base model were trained", "bias")
    init = values.get("init_lora_weights", True)
    if not (init is None or isinstance(init, bool) or str(init).lower() in _INITS_THAT_KEEP_THE_BASE):
        raise _unsupported(
            f"init_lora_weights is {_short(init)}: such an adapter is right only on base weights that its "
            "initialisation has changed; convert it with PEFT (path_initial_model_for_weight_conversion) first",
            "init_lora_weights",
        )
    known = _NO_EFFECT | _HONOURED | set(_REFUSED)
    unknown = sorted(field for field, value in values.items() if value and field not in known)
    if unknown:
        raise _unsupported(
            f"field {_short(unknown[0])} is {_short(values[unknown[0]])}; it is not known here and may change the "
            "result; remove it if it does not",
            unknown[0],
        )


def _or_default(values: Mapping[str, Any], field: str, check: Callable[[Any], bool], expected: str) -> Any:
    value = values.get(field)
    if value is None:
        return _DEFAULTS[field]
    if not check(value):
        raise _error(f"{field} is {_short(value)}, expected {expected}")
    return value


def _table(values: Mapping[str, Any], field: str, check: Callable[[Any], bool], expected: str) -> dict[str, Any]:
    table = values.get(field) or {}
    if not isinstance(table, dict) or not all(check(value) for value in table.values()):
        raise _error(f"{field} is {_short(table)}, expected an object of module name: {expected}")
    return table


def _flag(values: Mapping[str, Any], field: str) -> bool:
    value = values.get(field)
    if value is not None and not isinstance(value, bool):
        raise _error(f"{field} is {_short(value)}, expected true or false")
    return bool(value)


def _names(values: Mapping[str, Any], field: str) -> tuple[str, ...]:
    names = values.get(field) or []
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise _error(f"{field} is {_short(names)}, expected a list of names")
    if len(names) > _MAX_NAMES:
        raise _error(f"{field} has {len(names)} names, the limit is {_MAX_NAMES}")
    return tuple(names)


def _text(values: Mapping[str, Any], field: str) -> str:
    value = values.get(field)
    if value is not None and not isinstance(value, str):
        raise _error(f"{field} is {_short(value)}, expected a string")
    return value or ""


def _is_rank(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_number(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(float(value))
    except OverflowError:
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftVersion:
    """A version of PEFT, for comparing."""

    release: tuple[int, int, int]
    is_release: bool
    """False for development versions, which lie somewhere before their release."""


def parse_peft_version(text: str) -> PeftVersion | None:
    """The version in a recorded string such as "0.19.1" or "0.18.1.dev0@abc"; None if it is not one."""
    match = re.match(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})(.*)$", text, re.DOTALL)
    if match is None:
        return None
    major, minor, patch = (int(part) for part in match.groups()[:3])
    return PeftVersion(release=(major, minor, patch), is_release=match.group(4) in ("", ".post1"))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:120] + "..."


def _error(message: str) -> AdapterFormatError:
    return AdapterFormatError(f"adapter_config.json: {message}", reason="BAD_ADAPTER_CONFIG")


def _unsupported(message: str, field: str) -> AdapterFormatError:
    return AdapterFormatError(
        f"adapter_config.json: {message}", reason="UNSUPPORTED_ADAPTER", metadata={"config_field": field}
    )
