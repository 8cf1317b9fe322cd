"""Adapter file + config + model -> normal form. Every tensor is used exactly once, or named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from epilora.adapters.checks import check_linear
from epilora.adapters.keys import Pair, named, pair_tensors
from epilora.adapters.normal_form import AdapterTarget, LoraPair, NormalForm, Region
from epilora.adapters.peft_config import PeftConfig
from epilora.adapters.per_expert import match_expert, resolve_expert_pair
from epilora.adapters.safetensors_header import SafetensorsHeader, TensorEntry
from epilora.adapters.stacked import StackedModule, match_stacked, resolve_stacked
from epilora.errors import AdapterFormatError
from epilora.families import Projection
from epilora.model_spec import DenseModuleSpec

_Experts = dict[tuple[int, Projection], dict[int, LoraPair]]


@dataclass(slots=True)
class _Found:
    """What the pairs of a file turned out to be."""

    experts: _Experts = field(default_factory=dict)
    stacked: list[tuple[StackedModule, Pair]] = field(default_factory=list)
    dense: dict[str, LoraPair] = field(default_factory=dict)
    left_over: list[TensorEntry] = field(default_factory=list)
    first_name: dict[object, str] = field(default_factory=dict)
    rank_differences: list[str] = field(default_factory=list)

    def claim(self, key: object, pair: Pair) -> None:
        """Two modules of the file must not be one module of the model."""
        other = self.first_name.setdefault(key, pair.a.name)
        if other != pair.a.name:
            raise AdapterFormatError(
                f"{other} and {pair.a.name} are for the same module of the model", reason="DUPLICATE_TENSOR"
            )

    def note_rank(self, module: str, expected: int, got: int) -> None:
        if expected != got:
            self.rank_differences.append(f"{module}: config {expected}, tensors {got}")


def resolve_adapter(
    header: SafetensorsHeader,
    config: PeftConfig,
    target: AdapterTarget,
    *,
    max_lora_rank: int,
    allow_partial: bool = False,
) -> NormalForm:
    """Finds what every tensor of an adapter is for.

    Args:
        header: of the weights file.
        config: adapter_config.json.
        target: the model.
        max_lora_rank: largest lora_rank accepted.
        allow_partial: leave out tensors that fit nothing in this model, instead of refusing the adapter.

    Raises:
        AdapterFormatError: see docs/adapters.md for the reasons.
    """
    paired = pair_tensors(header.tensors)
    found = _Found(left_over=list(paired.others))
    for pair in paired.pairs:
        _place(pair, target, config, found)
    if found.left_over and not allow_partial:
        raise _unknown_tensors(found.left_over, len(header.tensors), config)
    if found.stacked and found.experts:
        raise AdapterFormatError(
            f"the file has pairs for single experts and for stacked ones ({found.stacked[0][1].a.name})",
            reason="MIXED_LAYOUTS",
        )
    experts: Mapping[tuple[int, Projection], Mapping[int, LoraPair]] = (
        resolve_stacked(found.stacked, target, config) if found.stacked else found.experts
    )
    form = NormalForm(
        expert_layout="target_parameters" if found.stacked else "per_expert" if found.experts else "none",
        experts=_sorted_experts(experts),
        dense={module: found.dense[module] for module in target.dense_modules if module in found.dense},
        ignored=tuple(sorted(tensor.name for tensor in found.left_over)),
        rank_differences=tuple(found.rank_differences),
        warnings=tuple(_warnings(config, target, found)),
    )
    _check_pairs(form, max_lora_rank, len(header.tensors))
    return form


def _place(pair: Pair, target: AdapterTarget, config: PeftConfig, found: _Found) -> None:
    module = _renamed(pair.module, target)
    expert = match_expert(module, target)
    if expert is not None:
        found.claim((expert.moe.layer, expert.projection, expert.expert), pair)
        resolved = resolve_expert_pair(pair, expert, config)
        found.experts.setdefault((expert.moe.layer, expert.projection), {})[expert.expert] = resolved
        found.note_rank(pair.module, config.ranks.value_of(pair.module), resolved.lora_rank)
        return
    stacked = match_stacked(module, target)
    if stacked is not None:
        found.claim((stacked.moe.layer, stacked.depth), pair)
        found.stacked.append((stacked, pair))
        return
    dense = target.dense_modules.get(module)
    if dense is None:
        found.left_over += [pair.a, pair.b]
        return
    found.claim(module, pair)
    found.dense[module] = _dense_pair(pair, dense, config, found)


def _renamed(module: str, target: AdapterTarget) -> str:
    for old, new in target.family.module_renames:
        module = module.replace(f".{old}.", f".{new}.")
    return module


def _dense_pair(pair: Pair, dense: DenseModuleSpec, config: PeftConfig, found: _Found) -> LoraPair:
    lora_rank = check_linear(pair, dense.in_features, dense.out_features, config)
    # PEFT matches patterns against the parameter's path where a parameter was targeted (a router's weight).
    parameter = f"{pair.module}.weight"
    key = parameter if config.targets_parameter(parameter) else pair.module
    found.note_rank(pair.module, config.ranks.value_of(key), lora_rank)
    return LoraPair(
        a=Region.whole(pair.a), b=Region.whole(pair.b), lora_rank=lora_rank, scale=config.scale_of(key, lora_rank)
    )


def _sorted_experts(
    experts: Mapping[tuple[int, Projection], Mapping[int, LoraPair]],
) -> Mapping[tuple[int, Projection], Mapping[int, LoraPair]]:
    order = list(Projection)
    keys = sorted(experts, key=lambda key: (key[0], order.index(key[1])))
    return {key: {expert: experts[key][expert] for expert in sorted(experts[key])} for key in keys}


def _check_pairs(form: NormalForm, max_lora_rank: int, num_tensors: int) -> None:
    pairs = form.pairs()
    if not pairs:
        raise AdapterFormatError(
            f"none of the file's {num_tensors} tensors fits this model: {named(form.ignored)}",
            reason="NO_MATCHING_TENSORS",
        )
    for pair in pairs:
        if pair.lora_rank > max_lora_rank:
            raise AdapterFormatError(
                f"{pair.a.tensor.name}: lora_rank {pair.lora_rank} is above the limit {max_lora_rank} "
                "(EPILORA_MAX_LORA_RANK)",
                reason="LORA_RANK_TOO_LARGE",
                metadata={"lora_rank": pair.lora_rank, "limit": max_lora_rank},
            )
    for (layer, projection), by_expert in form.experts.items():
        for side in ("a", "b"):
            dtypes = {getattr(pair, side).tensor.dtype for pair in by_expert.values()}
            if len(dtypes) > 1:
                raise AdapterFormatError(
                    f"layer {layer}, {projection}: lora_{side.upper()} of its experts have dtypes {sorted(dtypes)}, "
                    "expected one",
                    reason="MIXED_DTYPES",
                )


def _unknown_tensors(left_over: Sequence[TensorEntry], num_tensors: int, config: PeftConfig) -> AdapterFormatError:
    base = f" The adapter was trained on {config.base_model!r}." if config.base_model else ""
    names = [tensor.name for tensor in left_over]
    return AdapterFormatError(
        f"{len(names)} of {num_tensors} tensors fit nothing in this model: {named(names)}.{base} "
        "Set allow_partial to load the rest without them.",
        reason="UNKNOWN_TENSORS",
        field="source",
        metadata={"num_unknown": len(names), "first": names[0]},
    )


def _warnings(config: PeftConfig, target: AdapterTarget, found: _Found) -> list[str]:
    warnings = list(config.warnings)
    for name, patterns in (("rank_pattern", config.ranks), ("alpha_pattern", config.alphas)):
        if patterns.unused:
            warnings.append(f"{name} has entries that match no module of the file: {named(patterns.unused)}")
    stacked = [name for name in target.family.stacked_parameters if config.targets_parameter_named(name)]
    if stacked and not found.stacked:
        warnings.append(f"target_parameters names {named(stacked)}, but the file has no pair for stacked experts")
    if found.rank_differences:
        warnings.append(f"{len(found.rank_differences)} modules have another lora_rank than the config says")
    return warnings
