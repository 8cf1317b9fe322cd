"""Adapter file + config + model -> normal form. Every tensor is used exactly once, or named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from epilora.adapters.checks import check_linear
from epilora.adapters.expert_grid import find_grid, resolve_groups
from epilora.adapters.extras import check_extras, refuse_extras, vector
from epilora.adapters.keys import Pair, PairedTensors, empty_tensors, named, pair_tensors
from epilora.adapters.layout_hints import NO_HINTS, LayoutHints
from epilora.adapters.module_paths import renamed_path
from epilora.adapters.normal_form import (
    AdapterTarget,
    ExpertLayout,
    GridPairs,
    LoraPair,
    NormalForm,
    Region,
    samples_of,
)
from epilora.adapters.packed import PackedModule, is_absent_gate, match_packed, rank_key, resolve_packed
from epilora.adapters.peft_config import PeftConfig
from epilora.adapters.per_expert import (
    ExpertModule,
    KnownExperts,
    match_expert,
    rank_difference,
    resolve_expert_pair,
)
from epilora.adapters.safetensors_header import SafetensorsHeader
from epilora.adapters.saved_modules import SavedModules, check_all_saved, find_saved_modules
from epilora.adapters.stacked import StackedModule, match_stacked, resolve_stacked
from epilora.adapters.targets import contradiction_warnings
from epilora.adapters.tensor_entry import TensorEntry
from epilora.adapters.tensor_table import TensorTable
from epilora.errors import AdapterFormatError
from epilora.families import Projection
from epilora.model_spec import DenseModuleSpec

_Place = tuple[int, Projection]
_NOT_IN_PEFT = "PEFT does not define it for parameters"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choices:
    """What a caller of resolve_adapter may choose."""

    max_lora_rank: int
    allow_partial: bool
    hints: LayoutHints


@dataclass(slots=True)
class _Found:
    """What the pairs of a file turned out to be."""

    known: KnownExperts
    rank_differences: list[str]
    singles: dict[_Place, dict[int, LoraPair]] = field(default_factory=dict)
    """By expert, where each has a pair of tensors of its own."""
    packed: dict[_Place, Mapping[int, LoraPair]] = field(default_factory=dict)
    layouts: dict[ExpertLayout, str] = field(default_factory=dict)
    """Layouts seen, and the first tensor of each."""
    absent: list[str] = field(default_factory=list)
    """Empty tensors that stand for a projection which the family does not have."""
    stacked: list[tuple[StackedModule, Pair]] = field(default_factory=list)
    dense: dict[str, LoraPair] = field(default_factory=dict)
    left_over: list[TensorEntry] = field(default_factory=list)
    contradicted: dict[str, str] = field(default_factory=dict)
    """By module with a pair that the config leaves out: by which field."""
    first_name: dict[object, str] = field(default_factory=dict)

    def claim(self, key: object, pair: Pair) -> None:
        """Two modules of the file must not be one module of the model."""
        other = self.first_name.setdefault(key, pair.a.name)
        if other != pair.a.name:
            raise _same_module(other, pair)

    def note_rank(self, module: str, expected: int, got: int) -> None:
        if expected != got:
            self.rank_differences.append(rank_difference(module, expected, got))


def resolve_adapter(
    header: SafetensorsHeader,
    config: PeftConfig,
    target: AdapterTarget,
    *,
    max_lora_rank: int,
    allow_partial: bool = False,
    hints: LayoutHints = NO_HINTS,
    paired: PairedTensors | None = None,
) -> NormalForm:
    """Finds what every tensor of an adapter is for.

    Args:
        header: of the weights file.
        config: adapter_config.json.
        target: the model.
        max_lora_rank: largest lora_rank accepted.
        allow_partial: leave out tensors that fit nothing in this model, instead of refusing the adapter.
        hints: what the caller says where the file is ambiguous.
        paired: the header's pairs, if the caller has them.

    Raises:
        AdapterFormatError: see docs/adapters.md for the reasons.
    """
    choices = _Choices(max_lora_rank=max_lora_rank, allow_partial=allow_partial, hints=hints)
    if paired is None:
        form = _resolve_grid(header, config, target, choices)
        if form is not None:
            return form
        paired = pair_tensors(header.tensors)
    form = _resolve(header, config, target, choices, paired=paired, grid={})
    assert form is not None
    return form


def _resolve_grid(
    header: SafetensorsHeader, config: PeftConfig, target: AdapterTarget, choices: _Choices
) -> NormalForm | None:
    """The normal form of a per-expert adapter whose experts are all alike; None of any other, or if anything is wrong.

    What is wrong is then found by looking at each tensor in turn: the message names the file's first fault.
    """
    table = header.tensors
    if not isinstance(table, TensorTable) or config.has_patterns or config.uses_dora or config.has_biases:
        return None
    grid = find_grid(table, tuple(target.family.expert_projections))
    if grid is None:
        return None
    try:
        experts = resolve_groups(grid, table, config, target, lambda module: renamed_path(module, target))
        if experts is None:
            return None
        paired = pair_tensors(table.rows(~grid.is_in_group), is_rest=True)
        return _resolve(header, config, target, choices, paired=paired, grid=experts)
    except AdapterFormatError:
        return None


def _resolve(
    header: SafetensorsHeader,
    config: PeftConfig,
    target: AdapterTarget,
    choices: _Choices,
    *,
    paired: PairedTensors,
    grid: Mapping[_Place, GridPairs],
) -> NormalForm | None:
    """The normal form of a grid and of the pairs beside it; None if there are experts among those, too."""
    check_extras(paired.pairs, config)
    saved = find_saved_modules(
        paired.others, target, config, lambda module: renamed_path(module, target), allow_partial=choices.allow_partial
    )
    differences: list[str] = []
    found = _Found(known=KnownExperts(config, differences), rank_differences=differences, left_over=saved.left_over)
    for pair in paired.pairs:
        if not found.known.place(pair):
            _place(pair, target, config, found)
    if grid:
        if found.layouts:
            return None
        found.layouts[ExpertLayout.PER_EXPERT] = next(iter(grid.values())).first.a.tensor.name
    if found.left_over and not choices.allow_partial:
        raise _unknown_tensors(found.left_over, len(header.tensors), config, target)
    _check_saved(saved, found, config, target.family.tied_paths, choices.allow_partial)
    layout = _one_layout(found.layouts)
    experts: Mapping[_Place, Mapping[int, LoraPair]] = {**grid, **found.singles, **found.packed}
    if found.stacked:
        experts = resolve_stacked(found.stacked, target, config, choices.hints)
    _check_projections(experts, target)
    form = NormalForm(
        expert_layout=layout,
        experts=_sorted_experts(experts),
        dense={module: found.dense[module] for module in target.dense_modules if module in found.dense},
        saved=saved.modules,
        ignored=tuple(sorted(tensor.name for tensor in found.left_over)),
        absent=tuple(sorted(found.absent)),
        rank_differences=tuple(found.rank_differences),
        warnings=tuple(_warnings(config, target, found, choices.hints)),
    )
    _check_pairs(form, choices.max_lora_rank, len(header.tensors))
    return form


def _place(pair: Pair, target: AdapterTarget, config: PeftConfig, found: _Found) -> None:
    module = renamed_path(pair.module, target)
    if pair.is_empty:
        if not is_absent_gate(module, target):
            raise empty_tensors([pair.a.name, pair.b.name])
        found.absent += [pair.a.name, pair.b.name]
        return
    expert = match_expert(module, target)
    if expert is not None:
        _place_expert(pair, expert, config, found)
        return
    stacked = match_stacked(module, target)
    if stacked is not None:
        refuse_extras(pair, "stacked experts", _NOT_IN_PEFT)
        found.claim((stacked.moe.layer, stacked.depth), pair)
        found.layouts.setdefault(ExpertLayout.TARGET_PARAMETERS, pair.a.name)
        found.stacked.append((stacked, pair))
        return
    packed = match_packed(module, target)
    if packed is not None:
        refuse_extras(pair, "stacked experts", _NOT_IN_PEFT)
        _place_packed(pair, packed, target, config, found)
        return
    dense = target.dense_modules.get(module)
    if dense is None or pair.is_embedding != (module == target.family.embedding_path):
        found.left_over += pair.tensors()
        return
    found.claim(module, pair)
    if left_out_by := config.leaves_out(pair.module):
        found.contradicted[pair.module] = left_out_by
    found.dense[module] = _dense_pair(pair, dense, config, found)


def _place_expert(pair: Pair, module: ExpertModule, config: PeftConfig, found: _Found) -> None:
    by_expert = found.singles.setdefault((module.moe.layer, module.projection), {})
    if module.expert in by_expert:
        raise _same_module(by_expert[module.expert].a.tensor.name, pair)
    found.layouts.setdefault(module.layout, pair.a.name)
    resolved = by_expert[module.expert] = resolve_expert_pair(pair, module, config)
    found.known.add(pair, module, by_expert)
    found.note_rank(pair.module, config.ranks.value_of(pair.module), resolved.lora_rank)


def _check_saved(
    saved: SavedModules, found: _Found, config: PeftConfig, tied_paths: Sequence[str], allow_partial: bool
) -> None:
    if config.ties_embeddings and any(module in found.dense or module in saved.modules for module in tied_paths):
        raise AdapterFormatError(
            "adapter_config.json: ensure_weight_tying is true: what the adapter has for the embedding counts for "
            "lm_head, too; such adapters are not supported",
            reason="UNSUPPORTED_ADAPTER",
            metadata={"config_field": "ensure_weight_tying"},
        )
    both = [module for module in saved.modules if module in found.dense]
    if both:
        raise AdapterFormatError(
            f"{found.dense[both[0]].a.tensor.name} and {saved.modules[both[0]].weight.name}: a pair and a whole weight "
            "are for the same module of the model",
            reason="DUPLICATE_TENSOR",
        )
    if not allow_partial:
        check_all_saved(list(saved.modules), config)


def _same_module(other: str, pair: Pair) -> AdapterFormatError:
    return AdapterFormatError(
        f"{other} and {pair.a.name} are for the same module of the model", reason="DUPLICATE_TENSOR"
    )


def _place_packed(pair: Pair, packed: PackedModule, target: AdapterTarget, config: PeftConfig, found: _Found) -> None:
    place = (packed.moe.layer, packed.projection)
    found.claim(place, pair)
    layout, pairs = resolve_packed(pair, packed, config, target.family)
    # Sharing one side is a way to pack: a file may do so for some projections only.
    if layout is ExpertLayout.SHARED_OUTER:
        found.layouts.pop(ExpertLayout.PACKED, None)
    elif layout is ExpertLayout.PACKED and ExpertLayout.SHARED_OUTER in found.layouts:
        layout = ExpertLayout.SHARED_OUTER
    found.layouts.setdefault(layout, pair.a.name)
    found.packed[place] = pairs
    found.note_rank(pair.module, config.ranks.value_of(rank_key(pair, packed, target.family)), pairs[0].lora_rank)


def _one_layout(layouts: Mapping[ExpertLayout, str]) -> ExpertLayout:
    if len(layouts) > 1:
        found = " and ".join(f"{layout} ({name})" for layout, name in layouts.items())
        raise AdapterFormatError(
            f"the file holds experts in more than one layout: {found}; save it in one", reason="MIXED_LAYOUTS"
        )
    return next(iter(layouts), ExpertLayout.NONE)


def _check_projections(experts: Mapping[tuple[int, Projection], Mapping[int, LoraPair]], target: AdapterTarget) -> None:
    """A pair of the whole first projection and one of a part of it would be two deltas of the same rows."""
    for (layer, projection), by_expert in experts.items():
        for part in (Projection.GATE, Projection.UP) if projection is Projection.GATE_UP else ():
            both = sorted(by_expert.keys() & experts.get((layer, part), {}).keys())
            if both:
                pair = by_expert[both[0]]
                raise AdapterFormatError(
                    f"layer {layer}, expert {both[0]}: {pair.a.tensor.name} is for gate and up together, and there is "
                    f"a pair for {part} alone, {experts[layer, part][both[0]].a.tensor.name}",
                    reason="DUPLICATE_TENSOR",
                )


def _dense_pair(pair: Pair, dense: DenseModuleSpec, config: PeftConfig, found: _Found) -> LoraPair:
    lora_rank = check_linear(pair, dense.in_features, dense.out_features, config)
    # PEFT matches patterns against the parameter's path where a parameter was targeted (a router's weight).
    parameter = f"{pair.module}.weight"
    key = parameter if config.targets_parameter(parameter) else pair.module
    found.note_rank(pair.module, config.ranks.value_of(key), lora_rank)
    return LoraPair(
        a=Region.whole(pair.a),
        b=Region.whole(pair.b),
        lora_rank=lora_rank,
        scale=config.scale_of(key, lora_rank),
        magnitude=vector(pair.magnitude, dense.out_features, config),
        bias=vector(pair.bias, dense.out_features, config),
    )


def _sorted_experts(
    experts: Mapping[tuple[int, Projection], Mapping[int, LoraPair]],
) -> Mapping[tuple[int, Projection], Mapping[int, LoraPair]]:
    order = list(Projection)
    keys = sorted(experts, key=lambda key: (key[0], order.index(key[1])))
    return {key: _by_number(experts[key]) for key in keys}


def _by_number(by_expert: Mapping[int, LoraPair]) -> Mapping[int, LoraPair]:
    if isinstance(by_expert, GridPairs):
        return by_expert
    return {expert: by_expert[expert] for expert in sorted(by_expert)}


def _check_pairs(form: NormalForm, max_lora_rank: int, num_tensors: int) -> None:
    pairs = form.samples()
    if not pairs and not form.saved:
        raise AdapterFormatError(
            f"none of the file's {num_tensors} tensors fits this model: {named(form.ignored)}",
            reason="NO_MATCHING_TENSORS",
        )
    if max((pair.lora_rank for pair in pairs), default=0) > max_lora_rank:
        pair = next(pair for pair in pairs if pair.lora_rank > max_lora_rank)
        raise AdapterFormatError(
            f"{pair.a.tensor.name}: lora_rank {pair.lora_rank} is above the limit {max_lora_rank} "
            "(EPILORA_MAX_LORA_RANK)",
            reason="LORA_RANK_TOO_LARGE",
            metadata={"lora_rank": pair.lora_rank, "limit": max_lora_rank},
        )
    for (layer, projection), by_expert in form.experts.items():
        samples = samples_of(by_expert)
        a_dtypes = {pair.a.tensor.dtype for pair in samples}
        b_dtypes = {pair.b.tensor.dtype for pair in samples}
        others = {pair.magnitude.tensor.dtype for pair in samples if pair.magnitude is not None}
        for what, dtypes in (("lora_A", a_dtypes), ("lora_B", b_dtypes), ("lora_magnitude_vector", others)):
            if len(dtypes) > 1:
                raise AdapterFormatError(
                    f"layer {layer}, {projection}: {what} of its experts have dtypes {sorted(dtypes)}, expected one",
                    reason="MIXED_DTYPES",
                )


def _unknown_tensors(
    left_over: Sequence[TensorEntry], num_tensors: int, config: PeftConfig, target: AdapterTarget
) -> AdapterFormatError:
    base = f" The adapter was trained on {config.base_model!r}." if config.base_model else ""
    names = [tensor.name for tensor in left_over]
    copies = (
        " Tensors named base_layer.weight are copies of the base model's own, which PEFT saves with a pair for the "
        "embedding or lm_head; they can be left out if training did not change them."
        if any(name.endswith(".base_layer.weight") for name in names)
        else ""
    )
    has_embedding = target.family.embedding_path in target.dense_modules
    if not has_embedding and any(".lora_embedding_" in name for name in names):
        copies = (
            " This model's embedding scales its output, and whether PEFT scales a pair's part, too, depends on its "
            "release: pairs for it are not supported."
        )
    return AdapterFormatError(
        f"{len(names)} of {num_tensors} tensors fit nothing in this model: {named(names)}.{copies}{base} "
        "Set allow_partial to load the rest without them.",
        reason="UNKNOWN_TENSORS",
        field="source",
        metadata={"num_unknown": len(names), "first": names[0]},
    )


def _warnings(config: PeftConfig, target: AdapterTarget, found: _Found, hints: LayoutHints) -> list[str]:
    warnings = list(config.warnings)
    for name, patterns in (("rank_pattern", config.ranks), ("alpha_pattern", config.alphas)):
        if patterns.unused:
            warnings.append(f"{name} has entries that match no module of the file: {named(patterns.unused)}")
        if patterns.conflicts:
            warnings.append(
                f"{name} has entries of different values for one module: {named(patterns.conflicts)}. The first one "
                "counts, as in PEFT; but PEFT sorts them when it saves: another one may have counted in training"
            )
    stacked = [name for name in target.family.stacked_parameters if config.targets_parameter_named(name)]
    if stacked and not found.stacked:
        warnings.append(f"target_parameters names {named(stacked)}, but the file has no pair for stacked experts")
    if hints != NO_HINTS and not found.stacked:
        warnings.append("layout_hints had no effect: the file has no pair for stacked experts, which they are about")
    warnings += contradiction_warnings(found.contradicted)
    if found.absent:
        warnings.append(f"{len(found.absent)} empty tensors stand for the gate that this model's experts do not have")
    if found.rank_differences:
        warnings.append(f"{len(found.rank_differences)} modules have another lora_rank than the config says")
    return warnings
