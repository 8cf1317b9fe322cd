"""The layout of PEFT's `target_parameters`: one pair of matrices for all experts of a stacked parameter.

E experts, r lora_rank. PEFT wraps the experts' module once for each parameter, the wrappers nested: with two
parameters the inner pair is at `...mlp.experts.base_layer.lora_*`, the outer at `...mlp.experts.lora_*`; with one it is
at `...mlp.experts.lora_*`, whichever parameter it is. So names do not say which parameter a pair is for; shapes do.

Axes: A [E*r, in] is expert-slowest (row e*r + i is row i of expert e), B [out, r*E] is expert-fastest (column i*E + e
is column i of expert e). Some releases of PEFT swap in and out: then A is [E*r, out] and B [in, r*E], and what we call
A_e is B's block transposed. Which do depends on how the parameter is stored and on whether its module says so:

    stored                                   below 0.19.0   0.19.0    0.19.1 and later
    (E, out, in)                             swapped        swapped   plain
    (E, in, out), is_transposed (gpt-oss)    plain          swapped   plain
    (E, in, out), not marked (Llama 4)       plain          plain     swapped

The file says nothing about it: shapes decide where they can, then the recorded version of PEFT, else the file is
refused.

Two pairs of a layer are told apart by their shapes, too. Where those allow both ways, the order in which PEFT wraps
decides: the parameter that the module declares first is innermost, in every release, also when it loads a file.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from epilora.adapters.checks import check_matrices, shape_error
from epilora.adapters.keys import Pair
from epilora.adapters.layout_hints import LayoutHints
from epilora.adapters.normal_form import AdapterTarget, LoraPair, Region
from epilora.adapters.peft_config import PeftConfig, parse_peft_version
from epilora.adapters.per_expert import features_of
from epilora.errors import AdapterFormatError
from epilora.families import ModelFamily, Projection, StackedAxes
from epilora.model_spec import MoELayerSpec

_WRAPPER = ".base_layer"
_LAST_OLD_RELEASE, _FIRST_NEW_RELEASE = (0, 18, 1), (0, 19, 1)
_SWAPPED = {True: "swapped", False: "not swapped"}


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedModule:
    """Where a pair sits."""

    moe: MoELayerSpec
    depth: int
    """Wrappers around it; the innermost pair has the largest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _LayerPairs:
    """The pairs of one layer's experts, innermost first."""

    moe: MoELayerSpec
    pairs: tuple[Pair, ...]


def match_stacked(module: str, target: AdapterTarget) -> StackedModule | None:
    """The layer of a pair at the experts' module itself; None if it is something else."""
    path, depth = module, 0
    while path.endswith(_WRAPPER):
        path, depth = path.removesuffix(_WRAPPER), depth + 1
    moe = target.moe_layers.get(path)
    return None if moe is None else StackedModule(moe=moe, depth=depth)


def resolve_stacked(
    found: Sequence[tuple[StackedModule, Pair]], target: AdapterTarget, config: PeftConfig, hints: LayoutHints
) -> Mapping[tuple[int, Projection], Mapping[int, LoraPair]]:
    """The pairs of every expert of every layer.

    Hints settle what names, shapes and the recorded version leave open; one that contradicts them is an error.

    Raises:
        AdapterFormatError: SHAPE_MISMATCH, RANK_MISMATCH, WRONG_EXPERT_COUNT, WRONG_PARAMETER_COUNT,
            AMBIGUOUS_ORIENTATION, AMBIGUOUS_PARAMETER, BAD_LAYOUT_HINTS.
    """
    layers = _by_layer(found, config)
    fits = {
        swapped: [_fitting(layer, target.family, config, hints, swapped) for layer in layers]
        for swapped in (False, True)
    }
    swapped = _orientation(layers, fits, target.family, config, hints)
    resolved: dict[tuple[int, Projection], Mapping[int, LoraPair]] = {}
    for layer, assignments in zip(layers, fits[swapped], strict=True):
        if len(assignments) > 1 and len(layer.pairs) == 1:
            raise AdapterFormatError(
                f"{layer.pairs[0].a.name}: its shape fits more than one parameter of {layer.moe.module}; "
                "name the parameter in target_parameters, or in layout_hints.stacked_parameters of the request",
                reason="AMBIGUOUS_PARAMETER",
            )
        # The first assignment is that of the order in which the module declares its parameters, as PEFT wraps them.
        for parameter, pair in zip(assignments[0], layer.pairs, strict=True):
            projection = target.family.stacked_parameters[parameter]
            key = f"{pair.module.replace(_WRAPPER, '')}.{parameter}"
            resolved[layer.moe.layer, projection] = _split(layer.moe, pair, key, config, hints, swapped)
    return resolved


def _by_layer(found: Sequence[tuple[StackedModule, Pair]], config: PeftConfig) -> list[_LayerPairs]:
    grouped: dict[int, list[tuple[StackedModule, Pair]]] = {}
    for where, pair in found:
        check_matrices(pair, config)
        grouped.setdefault(where.moe.layer, []).append((where, pair))
    layers = []
    for layer in sorted(grouped):
        inner_first = sorted(grouped[layer], key=lambda item: -item[0].depth)
        layers.append(_LayerPairs(moe=inner_first[0][0].moe, pairs=tuple(pair for _, pair in inner_first)))
    return layers


def _fitting(
    layer: _LayerPairs, family: ModelFamily, config: PeftConfig, hints: LayoutHints, swapped: bool
) -> list[tuple[str, ...]]:
    """Assignments of parameters to the layer's pairs that its shapes allow."""
    candidates = list(family.stacked_parameters)
    if hints.stacked_parameters and not config.target_parameters:
        candidates = [name for name in candidates if name in hints.stacked_parameters]
        if len(candidates) != len(set(hints.stacked_parameters)):
            raise AdapterFormatError(
                f"layout_hints.stacked_parameters is {list(hints.stacked_parameters)}, expected names among "
                f"{list(family.stacked_parameters)}",
                reason="BAD_LAYOUT_HINTS",
                field="layout_hints",
            )
    if config.target_parameters:
        module = layer.pairs[-1].module.replace(_WRAPPER, "")
        candidates = [name for name in candidates if config.targets_parameter(f"{module}.{name}")]
        if len(candidates) != len(layer.pairs):
            raise AdapterFormatError(
                f"{module} has {len(layer.pairs)} pairs in the file, but target_parameters names {len(candidates)} of "
                f"its parameters: {list(config.target_parameters)}",
                reason="WRONG_PARAMETER_COUNT",
            )
    return [
        assignment
        for assignment in itertools.permutations(candidates, len(layer.pairs))
        if all(
            _fits(layer.moe, pair, family.stacked_parameters[parameter], swapped)
            for parameter, pair in zip(assignment, layer.pairs, strict=True)
        )
    ]


def _fits(moe: MoELayerSpec, pair: Pair, projection: Projection, swapped: bool) -> bool:
    features = features_of(moe, projection)
    return (pair.a.shape[1], pair.b.shape[0]) == (features[::-1] if swapped else features)


def _orientation(
    layers: Sequence[_LayerPairs],
    fits: Mapping[bool, Sequence[Sequence[tuple[str, ...]]]],
    family: ModelFamily,
    config: PeftConfig,
    hints: LayoutHints,
) -> bool:
    """True if in and out are swapped: one writer wrote all layers, so one answer must fit all of them."""
    possible = [swapped for swapped in (False, True) if all(fits[swapped])]
    if len(possible) == 1:
        if hints.swapped not in (None, possible[0]):
            raise AdapterFormatError(
                f"layout_hints.orientation says that in and out are {_SWAPPED[hints.swapped]}, but the shapes of "
                f"{layers[0].pairs[0].a.name} and the others show that they are {_SWAPPED[possible[0]]}",
                reason="BAD_LAYOUT_HINTS",
                field="layout_hints",
            )
        return possible[0]
    if not possible:
        index = next((i for i in range(len(layers)) if not fits[False][i]), 0)
        raise _no_fit(layers[index], family, config)
    if hints.swapped is not None:
        return hints.swapped
    recorded = _swapped_by_version(config.peft_version, family)
    if recorded is None:
        raise AdapterFormatError(
            f"{layers[0].pairs[0].a.name}: for this model's sizes the shapes do not say whether in and out are "
            f"swapped, and the recorded peft_version {config.peft_version!r} does not either; say it in "
            "layout_hints.orientation of the request, or save the adapter again with PEFT 0.19.1 or later",
            reason="AMBIGUOUS_ORIENTATION",
        )
    return recorded


def _swapped_by_version(text: str, family: ModelFamily) -> bool | None:
    """What a release of PEFT writes; None if the version does not tell."""
    version = parse_peft_version(text)
    if version is None:
        return None
    # What decides was changed in 0.19.0 and in 0.19.1; a build between two releases may have it either way.
    if not version.is_release and _LAST_OLD_RELEASE < version.release <= _FIRST_NEW_RELEASE:
        return None
    is_new = version.release >= _FIRST_NEW_RELEASE
    match family.stacked_axes:
        case StackedAxes.OUT_IN:
            return not is_new
        case StackedAxes.IN_OUT:
            return version.release == (0, 19, 0)
        case StackedAxes.IN_OUT_UNMARKED:
            return is_new
    # Of a family that is not in the table, only what today's PEFT does is known.
    return False if is_new else None


def _no_fit(layer: _LayerPairs, family: ModelFamily, config: PeftConfig) -> AdapterFormatError:
    moe = layer.moe
    expected = "; or ".join(
        "[{0}*r, {1}] and [{2}, {0}*r] for {3}".format(moe.num_experts, *features_of(moe, projection), parameter)
        for parameter, projection in family.stacked_parameters.items()
    )
    return shape_error(layer.pairs[0], expected, config)


def _split(  # noqa: PLR0917
    moe: MoELayerSpec, pair: Pair, key: str, config: PeftConfig, hints: LayoutHints, swapped: bool
) -> Mapping[int, LoraPair]:
    num_experts, rows = moe.num_experts, pair.a.shape[0]
    lora_rank = config.ranks.value_of(key)
    if hints.expert_rank_from_shape and rows % num_experts == 0:
        lora_rank = rows // num_experts
    if rows != num_experts * lora_rank:
        held = f"{rows // lora_rank} experts" if rows % lora_rank == 0 else "no whole number of experts"
        raise AdapterFormatError(
            f"{pair.a.name} has {rows} rows, which at lora_rank {lora_rank} are {held}; layer {moe.layer} has "
            f"{num_experts} experts, expected {num_experts * lora_rank} rows. If the file does hold all {num_experts} "
            "experts, at another rank than the config says, set layout_hints.expert_rank_from_shape",
            reason="WRONG_EXPERT_COUNT",
            metadata={"rows": rows, "lora_rank": lora_rank, "num_experts": num_experts},
        )
    scale = config.scale_of(key, lora_rank)
    pairs = {}
    for expert in range(num_experts):
        block = {"row_begin": expert * lora_rank, "row_end": (expert + 1) * lora_rank}
        by_rows = Region(tensor=pair.a, **block, transpose=swapped)
        by_columns = Region(
            tensor=pair.b,
            row_begin=0,
            row_end=pair.b.shape[0],
            column_begin=expert,
            column_step=num_experts,
            transpose=swapped,
        )
        a, b = (by_columns, by_rows) if swapped else (by_rows, by_columns)
        pairs[expert] = LoraPair(a=a, b=b, lora_rank=lora_rank, scale=scale)
    return pairs
