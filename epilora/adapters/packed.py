"""The 3D layouts: one pair of tensors for all experts of a projection, with the expert as the first dimension.

E experts, D and F widths of an expert, r lora_rank. Three writers, told apart by the module's name:

    packed    `...experts.gate_up_proj.lora_A` [E, r, D], `lora_B` [E, 2F, r]; `down_proj` alike. Rows of gate_up are in
              the model's own order. `gate_proj`, `up_proj` are read too.
    shared    `...experts.w1|w3|w2.lora_A` [1, r, D], `lora_B` [E, F, r]: gate, up, down; either side may have one
              matrix that all experts share.
    grouped   `...experts.lora_gate_and_up_A` [E, D, r], `..._B` [E, r, 2F]: in comes first, so both are transposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from epilora.adapters.checks import shape_error
from epilora.adapters.keys import Pair
from epilora.adapters.normal_form import AdapterTarget, ExpertLayout, LoraPair, Region
from epilora.adapters.peft_config import PeftConfig
from epilora.adapters.per_expert import features_of
from epilora.adapters.tensor_entry import TensorEntry
from epilora.errors import AdapterFormatError
from epilora.families import GateUpLayout, ModelFamily, Projection
from epilora.model_spec import MoELayerSpec

_GROUPED_NAMES = ("gate_and_up_projs", "down_projs")
_MISSING_WITHOUT_GATE = ("gate_proj", "w3")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedModule:
    """One projection of all experts of a layer."""

    moe: MoELayerSpec
    projection: Projection
    in_first: bool
    """True if A is stored [in, r] and B [r, out]."""


def match_packed(module: str, target: AdapterTarget) -> PackedModule | None:
    """The layer and projection of a module path; None if it is something else."""
    experts_path, _, name = module.rpartition(".")
    moe = target.moe_layers.get(experts_path)
    projection = _projection_of(name, target.family)
    if moe is None or projection is None:
        return None
    return PackedModule(moe=moe, projection=projection, in_first=name in _GROUPED_NAMES)


def _projection_of(name: str, family: ModelFamily) -> Projection | None:
    if name in _GROUPED_NAMES:
        first = Projection.UP if family.gate_up_layout is GateUpLayout.NOT_GATED else Projection.GATE_UP
        return first if name == _GROUPED_NAMES[0] else Projection.DOWN
    return family.stacked_parameters.get(name) or family.expert_projections.get(name)


def is_absent_gate(module: str, target: AdapterTarget) -> bool:
    """True for the projection that a family without a gate lacks, for which some trainers write empty tensors."""
    experts_path, _, name = module.rpartition(".")
    not_gated = target.family.gate_up_layout is GateUpLayout.NOT_GATED
    return not_gated and name in _MISSING_WITHOUT_GATE and experts_path in target.moe_layers


def resolve_packed(
    pair: Pair, found: PackedModule, config: PeftConfig, family: ModelFamily
) -> tuple[ExpertLayout, Mapping[int, LoraPair]]:
    """The layout that the shapes show, and the pair of every expert.

    Raises:
        AdapterFormatError: SHAPE_MISMATCH, RANK_MISMATCH, WRONG_EXPERT_COUNT.
    """
    lora_rank = _check_shapes(pair, found, config)
    scale = config.scale_of(_pattern_key(pair.module, found, family), lora_rank)
    num_experts = found.moe.num_experts
    pairs = {
        expert: LoraPair(
            a=_plane(pair.a, expert, found), b=_plane(pair.b, expert, found), lora_rank=lora_rank, scale=scale
        )
        for expert in range(num_experts)
    }
    if found.in_first:
        return ExpertLayout.GROUPED, pairs
    is_shared = num_experts > 1 and 1 in (pair.a.shape[0], pair.b.shape[0])
    return (ExpertLayout.SHARED_OUTER if is_shared else ExpertLayout.PACKED), pairs


def rank_key(pair: Pair, found: PackedModule, family: ModelFamily) -> str:
    """The path that rank_pattern is matched against."""
    return _pattern_key(pair.module, found, family)


def _pattern_key(module: str, found: PackedModule, family: ModelFamily) -> str:
    if not found.in_first:
        return module
    parameter = next(name for name, projection in family.stacked_parameters.items() if projection is found.projection)
    return f"{module.rpartition('.')[0]}.{parameter}"


def _plane(tensor: TensorEntry, expert: int, found: PackedModule) -> Region:
    return Region.plane(tensor, min(expert, tensor.shape[0] - 1), transpose=found.in_first)


def _check_shapes(pair: Pair, found: PackedModule, config: PeftConfig) -> int:
    in_features, out_features = features_of(found.moe, found.projection)
    num_experts = found.moe.num_experts
    if found.in_first:
        expected = f"[{num_experts}, {in_features}, r] and [{num_experts}, r, {out_features}]"
    else:
        expected = f"[{num_experts} or 1, r, {in_features}] and [{num_experts} or 1, {out_features}, r]"
    if len(pair.a.shape) != 3 or len(pair.b.shape) != 3:
        raise shape_error(pair, expected, config)
    (a_rank, a_in), (b_out, b_rank) = pair.a.shape[1:], pair.b.shape[1:]
    if found.in_first:
        a_rank, a_in, b_out, b_rank = a_in, a_rank, b_rank, b_out
    if (a_in, b_out) != (in_features, out_features):
        raise shape_error(pair, expected, config)
    if a_rank != b_rank:
        raise AdapterFormatError(
            f"{pair.a.name} has lora_rank {a_rank} and {pair.b.name} {b_rank}, expected the same",
            reason="RANK_MISMATCH",
            metadata={"module": pair.module},
        )
    for tensor in (pair.a, pair.b):
        if tensor.shape[0] != num_experts and (found.in_first or tensor.shape[0] != 1):
            raise AdapterFormatError(
                f"{tensor.name} holds {tensor.shape[0]} experts, layer {found.moe.layer} has {num_experts}; "
                f"expected {expected}",
                reason="WRONG_EXPERT_COUNT",
                metadata={"num_experts": num_experts, "got": tensor.shape[0]},
            )
    return a_rank
