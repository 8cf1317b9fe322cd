"""Which tensors of a checkpoint fill which parameters of the model, by transformers' own tables of names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightTransform, rename_source_key

from compute_worker.text_model import TextOfMultimodal, text_transforms
from epilora.errors import InvalidArgumentError

_EXPERT_NUMBER = re.compile(r"\.experts\.(\d+)\.")
# Rotary tables that old writers stored; they are computed.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$")
# Parts of a multimodal checkpoint beside its text model, which is what is served.
_NOT_TEXT = re.compile(
    r"^(model\.)?(vision_model|vision_tower|visual|multi_modal_projector|embed_vision|audio_tower)\."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertPart:
    """One tensor of one expert: part `index` of `num_parts` equal parts, along the rows, of its matrix."""

    key: str
    index: int
    num_parts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPlan:
    """Keys by what they fill.

    Attributes:
        dense: parameter name -> key, or keys of parts that lie one below the other in it.
        fused_experts: name of a 3D expert parameter -> key of a tensor that holds all experts.
        transposed_experts: those of them whose matrices are the other way round in the file, unless the shape says not.
        expert_parts: (name of a 3D expert parameter, logical expert) -> its parts, in order.
    """

    dense: dict[str, tuple[str, ...]] = field(default_factory=dict)
    fused_experts: dict[str, str] = field(default_factory=dict)
    transposed_experts: set[str] = field(default_factory=set)
    expert_parts: dict[tuple[str, int], list[ExpertPart]] = field(default_factory=lambda: defaultdict(list))


def plan_checkpoint(
    model: PreTrainedModel, keys: Iterable[str], expert_parameters: Mapping[str, tuple[int, ...]]
) -> CheckpointPlan:
    """Sorts a checkpoint's keys.

    Args:
        model: on the meta device, as transformers built it.
        keys: of the checkpoint.
        expert_parameters: shape [E, out, in] of each 3D expert parameter, by name.

    Raises:
        InvalidArgumentError: a key that the model has no parameter for (UNEXPECTED_WEIGHT), or one that would have to
            be converted in a way not served (UNSUPPORTED_CHECKPOINT).
    """
    transforms: list[WeightTransform] = (
        text_transforms(model) if isinstance(model, TextOfMultimodal) else get_model_conversion_mapping(model)
    )
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    renamings = [transform for transform in transforms if not isinstance(transform, WeightConverter)]
    known: dict[str, torch.Tensor] = model.state_dict()
    ignored = [
        _IGNORED,
        _NOT_TEXT,
        *(re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
    ]
    plan, joined = CheckpointPlan(), defaultdict[str, dict[int, str]](dict)
    for key in keys:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        if name not in known:
            if any(expression.search(key) for expression in ignored):
                continue
            raise InvalidArgumentError(
                f"Checkpoint key {key} becomes {name}, which {type(model).__name__} does not have; the weights are of"
                " another model than config.json",
                reason="UNEXPECTED_WEIGHT",
            )
        if pattern is not None:
            converter = next(converter for converter in converters if pattern in converter.source_patterns)
            if name in expert_parameters and _transposes_experts(converter):
                plan.fused_experts[name] = key
                plan.transposed_experts.add(name)
                continue
            if name not in expert_parameters and _joins_rows(converter):
                joined[name][converter.source_patterns.index(pattern)] = key
                if len(joined[name]) == len(converter.source_patterns):
                    plan.dense[name] = tuple(part for _, part in sorted(joined[name].items()))
                continue
            number = _EXPERT_NUMBER.search(key)
            if number is None or name not in expert_parameters or not _stacks_experts(converter):
                operations = " and ".join(type(operation).__name__ for operation in converter.operations)
                raise InvalidArgumentError(
                    f"Checkpoint key {key} needs {operations} to become {name}; only experts stored one by one, or"
                    " stacked as the model has them, can be read. Save the checkpoint with transformers 5 and use that",
                    reason="UNSUPPORTED_CHECKPOINT",
                )
            patterns = converter.source_patterns
            part = ExpertPart(key=key, index=patterns.index(pattern), num_parts=len(patterns))
            plan.expert_parts[name, int(number[1])].append(part)
        elif name in expert_parameters:
            plan.fused_experts[name] = key
        else:
            plan.dense[name] = (key,)
    for parts in plan.expert_parts.values():
        parts.sort(key=lambda part: part.index)
    return plan


def _joins_rows(converter: WeightConverter) -> bool:
    """True if all that a conversion does is to put tensors one below the other."""
    operations = converter.operations
    return [type(operation).__name__ for operation in operations] == ["Concatenate"] and operations[0].dim == 0


def _transposes_experts(converter: WeightConverter) -> bool:
    """True if all that a conversion does is to swap the sides of each expert's matrix where its shape is swapped."""
    operations = converter.operations
    if [type(operation).__name__ for operation in operations] != ["Transpose"]:
        return False
    return {operations[0].dim0, operations[0].dim1} == {1, 2} and bool(operations[0].check_dims)


def _stacks_experts(converter: WeightConverter) -> bool:
    """True if all that a conversion does is to stack experts, and to put gate on top of up."""
    operations = [type(operation).__name__ for operation in converter.operations]
    if operations == ["MergeModulelist"]:
        return len(converter.source_patterns) == 1
    return operations == ["MergeModulelist", "Concatenate"] and bool(converter.operations[1].dim == 1)
