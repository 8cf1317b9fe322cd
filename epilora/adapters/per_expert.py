"""The per-expert layouts: one pair of matrices for each expert and projection.

Written by PEFT where experts are lists of linear maps (transformers 4), and by most other trainers:
`...mlp.experts.7.gate_proj.lora_A.weight` [r, D], Mixtral `...block_sparse_moe.experts.7.w1...`. Where each projection
is a list of its own (gpt-oss in 4 bits), the number comes last: `...mlp.experts.gate_up_projs.7...`; the rows of its B
are in the model's own order.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from epilora.adapters.checks import check_linear
from epilora.adapters.extras import refuse_extras, vector
from epilora.adapters.keys import Pair
from epilora.adapters.normal_form import AdapterTarget, ExpertLayout, LoraPair, Region
from epilora.adapters.peft_config import PeftConfig
from epilora.errors import AdapterFormatError
from epilora.families import Projection
from epilora.model_spec import MoELayerSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertModule:
    """One projection of one expert."""

    moe: MoELayerSpec
    expert: int
    projection: Projection
    layout: ExpertLayout


@functools.cache
def _numbers(count: int) -> dict[str, int]:
    return {str(number): number for number in range(count)}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """An expert's projection that was looked at with care."""

    lora_rank: int
    scale: float
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]
    config_rank: int
    numbers: Mapping[str, int]
    """Experts of the layer, by how they are spelled."""
    by_expert: dict[int, LoraPair]
    """Pairs of the layer's experts, one projection."""


_new = tuple.__new__
_NO_EXTRAS = (False, None, None)
"""is_embedding, magnitude and bias of a pair that is nothing but A and B."""


class KnownExperts:
    """The experts found so far. Those beside one of them differ in the number alone, so little is left to check."""

    def __init__(self, config: PeftConfig, rank_differences: list[str]) -> None:
        """Args:
        config: adapter_config.json.
        rank_differences: what `place` adds to, as `rank_difference` says it.
        """
        self._config = config
        self._has_patterns = config.has_patterns
        self._rank_differences = rank_differences
        self._found: dict[tuple[str, str], _Found] = {}
        """By path of the experts, as the file has it, and name of the projection."""

    def place(self, pair: Pair) -> bool:
        """Notes a pair if it is that of an expert beside one that was added, of the same shapes; else False."""
        parts = pair.module.rsplit(".", 2)
        if len(parts) != 3:
            return False
        path, middle, last = parts
        found = self._found.get((path, last))
        if found is None:
            return False
        expert = found.numbers.get(middle)
        if expert is None or expert in found.by_expert:
            return False
        if pair.a.shape != found.a_shape or pair.b.shape != found.b_shape or pair[3:] != _NO_EXTRAS:
            return False
        lora_rank, scale, expected = found.lora_rank, found.scale, found.config_rank
        if self._has_patterns:
            scale, expected = self._config.scale_of(pair.module, lora_rank), self._config.ranks.value_of(pair.module)
        if expected != lora_rank:
            self._rank_differences.append(rank_difference(pair.module, expected, lora_rank))
        # What Region and LoraPair themselves do, without a call of Python's own for each.
        a = _new(Region, (pair.a, 0, lora_rank, 0, 1, False))
        b = _new(Region, (pair.b, 0, found.b_shape[0], 0, 1, False))
        found.by_expert[expert] = _new(LoraPair, (a, b, lora_rank, scale, None, None))
        return True

    def add(self, pair: Pair, expert: ExpertModule, by_expert: dict[int, LoraPair]) -> None:
        """Notes an expert that was looked at, if its number is the last segment but one."""
        path, _, last = pair.module.rpartition(".")
        path, _, middle = path.rpartition(".")
        if expert.layout is ExpertLayout.PER_EXPERT and middle == str(expert.expert):
            resolved = by_expert[expert.expert]
            self._found[path, last] = _Found(
                lora_rank=resolved.lora_rank,
                scale=resolved.scale,
                a_shape=pair.a.shape,
                b_shape=pair.b.shape,
                config_rank=self._config.ranks.value_of(pair.module),
                numbers=_numbers(expert.moe.num_experts),
                by_expert=by_expert,
            )


def rank_difference(module: str, expected: int, got: int) -> str:
    """A line of the report."""
    return f"{module}: config {expected}, tensors {got}"


_LISTS = {"gate_up_projs": Projection.GATE_UP, "up_projs": Projection.UP, "down_projs": Projection.DOWN}


def match_expert(module: str, target: AdapterTarget) -> ExpertModule | None:
    """The expert and projection of a module path (renamed to today's tree); None if it is something else.

    Raises:
        AdapterFormatError: EXPERT_OUT_OF_RANGE; an expert that the model does not have.
    """
    path, _, last = module.rpartition(".")
    path, _, middle = path.rpartition(".")
    moe = target.moe_layers.get(path)
    if moe is None:
        return None
    if middle in _LISTS and _LISTS[middle] in target.family.stacked_parameters.values():
        number, projection, layout = last, _LISTS[middle], ExpertLayout.EXPERT_LISTS
    elif last in target.family.expert_projections:
        number, projection, layout = middle, target.family.expert_projections[last], ExpertLayout.PER_EXPERT
    else:
        return None
    if not (number.isascii() and number.isdecimal()):
        return None
    # "07" would be a second name of expert 7: not something a trainer writes.
    if len(number) > 9 or str(int(number)) != number or int(number) >= moe.num_experts:
        raise AdapterFormatError(
            f"{module}: expert {number[:20]} is not an expert of layer {moe.layer}, which has experts 0 to "
            f"{moe.num_experts - 1}; the adapter is for another model",
            reason="EXPERT_OUT_OF_RANGE",
            metadata={"module": module, "num_experts": moe.num_experts},
        )
    return ExpertModule(moe=moe, expert=int(number), projection=projection, layout=layout)


def features_of(moe: MoELayerSpec, projection: Projection) -> tuple[int, int]:
    """(in, out) of a projection of one expert."""
    if projection is Projection.DOWN:
        return moe.intermediate_size, moe.hidden_size
    rows = 2 * moe.intermediate_size if projection is Projection.GATE_UP else moe.intermediate_size
    return moe.hidden_size, rows


def resolve_expert_pair(pair: Pair, found: ExpertModule, config: PeftConfig) -> LoraPair:
    """The pair of one expert's projection.

    Raises:
        AdapterFormatError: SHAPE_MISMATCH, RANK_MISMATCH, UNSUPPORTED_ADAPTER (a bias).
    """
    in_features, out_features = features_of(found.moe, found.projection)
    lora_rank = check_linear(pair, in_features, out_features, config)
    refuse_extras(pair._replace(magnitude=None), "routed experts", "nothing adds a bias to a single expert's output")
    return LoraPair(
        a=Region(tensor=pair.a, row_begin=0, row_end=lora_rank),
        b=Region(tensor=pair.b, row_begin=0, row_end=pair.b.shape[0]),
        lora_rank=lora_rank,
        scale=config.scale_of(pair.module, lora_rank),
        magnitude=vector(pair.magnitude, out_features, config),
    )
