"""What is in an adapter, from its headers alone: by its names, and against a model if one is given."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from epilora.adapters.base_model import base_model_warnings
from epilora.adapters.checks import DEFAULT_MAX_LORA_RANK
from epilora.adapters.extras import check_extras
from epilora.adapters.keys import Pair, pair_tensors
from epilora.adapters.layout_hints import NO_HINTS, LayoutHints
from epilora.adapters.normal_form import NormalForm
from epilora.adapters.open_adapter import OpenAdapter, reading
from epilora.adapters.slice_plan import SliceSpec, plan_slices
from epilora.adapters.values import check_values
from epilora.errors import EpiloraError
from epilora.families import Projection
from epilora.load_spec import MoEEPLoadSpec
from epilora.model_spec import ModelSpec
from epilora.placement import ExpertPlacement
from epilora.slices import LAYOUT_VERSION, SliceMetadata

# What a name shows of the family it was trained on: first the most telling ones.
_SIGNS: Sequence[tuple[str, tuple[str, ...]]] = (
    ("mixer.experts", ("nemotron_h",)),
    ("block_sparse_moe", ("mixtral", "minimax_m2")),
    ("gate_up_projs", ("gpt_oss",)),
    ("mlp.router", ("gpt_oss",)),
    ("feed_forward.", ("llama4_text", "jamba")),
    ("linear_attn", ("qwen3_next", "qwen3_5_moe")),
    ("kv_a_proj_with_mqa", ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")),
    ("mlp.shared_experts", ("deepseek_v2", "deepseek_v3", "glm4_moe", "dots1", "ernie4_5_moe")),
    ("mlp.shared_expert", ("qwen2_moe", "qwen3_next", "qwen3_5_moe")),
    ("mlp.experts", ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe")),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why a service would refuse the adapter."""

    reason: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleGroup:
    """Pairs whose paths differ in layer and expert only."""

    path: str
    """With * for each number."""
    num_pairs: int
    rows_of_a: tuple[int, ...]
    """The first dimensions of A, ascending: r, but E*r for stacked experts."""
    num_bytes: int


@dataclass(kw_only=True, slots=True)
class Inspection:
    """The findings."""

    path: str
    producer: str = ""
    base_model: str = ""
    num_tensors: int = 0
    file_bytes: int = 0
    dtypes: tuple[str, ...] = ()
    groups: tuple[ModuleGroup, ...] = ()
    likely_families: tuple[str, ...] = ()
    names_by_layer: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    """Layer -> expert -> pairs, by names with an expert's number."""
    model: str = ""
    layout: str = ""
    experts_by_layer: Mapping[int, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    """Layer -> projection -> experts with a pair (with a model)."""
    num_experts: int = 0
    dense_modules: tuple[str, ...] = ()
    lora_ranks: tuple[int, ...] = ()
    """Of all pairs, ascending (with a model)."""
    scales: tuple[float, ...] = ()
    """What B @ A is multiplied by, of all pairs, ascending (with a model)."""
    saved_modules: tuple[str, ...] = ()
    """Dense modules whose whole weight is replaced."""
    bytes_per_rank: tuple[int, ...] = ()
    """In the dtypes of the file; a rank that serves another dtype holds the elements in that."""
    placement: str = ""
    ignored: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    values_read: bool = False
    """Whether NaN and infinities would have been seen."""
    refusal: Refusal | None = None

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "path": self.path,
            "producer": self.producer,
            "base_model": self.base_model,
            "num_tensors": self.num_tensors,
            "file_bytes": self.file_bytes,
            "dtypes": list(self.dtypes),
            "modules": [
                {
                    "path": group.path,
                    "num_pairs": group.num_pairs,
                    "rows_of_a": list(group.rows_of_a),
                    "num_bytes": group.num_bytes,
                }
                for group in self.groups
            ],
            "likely_families": list(self.likely_families),
            "model": self.model,
            "expert_layout": self.layout,
            "experts": {
                str(layer): {projection: list(experts) for projection, experts in by_projection.items()}
                for layer, by_projection in self.experts_by_layer.items()
            },
            "lora_ranks": list(self.lora_ranks),
            "scales": list(self.scales),
            "dense_modules": list(self.dense_modules),
            "saved_modules": list(self.saved_modules),
            "placement": self.placement,
            "bytes_per_rank": list(self.bytes_per_rank),
            "ignored_tensors": list(self.ignored),
            "warnings": list(self.warnings),
            "values_read": self.values_read,
            "refused": None
            if self.refusal is None
            else {"reason": self.refusal.reason, "message": self.refusal.message},
        }


def inspect_adapter(
    adapter: OpenAdapter,
    *,
    model: ModelSpec | None = None,
    num_ranks: int = 1,
    placement: str = "linear",
    allow_partial: bool = False,
    hints: LayoutHints = NO_HINTS,
    verify: bool = False,
) -> Inspection:
    """Looks at an adapter's names and shapes, of its values only if asked; a refusal is a finding, not an error.

    Args:
        adapter: open.
        model: what it would be loaded into; None: names alone.
        num_ranks: expert-parallel ranks that bytes are counted for.
        placement: see ExpertPlacement.make.
        allow_partial: as in LoadAdapterRequest.
        hints: as in LoadAdapterRequest.
        verify: read all values, too.

    Raises:
        InvalidArgumentError, NotFoundError: the placement is no placement of the model.
    """
    found = Inspection(path=str(adapter.path))
    found.num_tensors = len(adapter.header.tensors)
    found.file_bytes = adapter.header.file_bytes
    found.dtypes = tuple(adapter.header.dtypes())
    try:
        config = adapter.config()
        found.producer, found.base_model, found.warnings = config.peft_version, config.base_model, config.warnings
        paired = pair_tensors(adapter.header.tensors)
        _look_at_names(paired.pairs, found)
        check_extras(paired.pairs, config)
        form = None
        if model is not None:
            form = adapter.resolve(model, allow_partial=allow_partial, hints=hints, paired=paired)
            _look_at_form(form, model, ExpertPlacement.make(placement, model, num_ranks), found)
        if verify:
            with reading(adapter.path):
                found.warnings = (*found.warnings, *check_values(adapter, form))
            found.values_read = True
    except EpiloraError as error:
        if error.reason in ("BAD_PLACEMENT", "PLACEMENT_NOT_FOUND"):
            raise
        found.refusal = Refusal(reason=error.reason, message=error.message)
    return found


def _look_at_names(pairs: Sequence[Pair], found: Inspection) -> None:
    groups = _by_path(pairs)
    found.groups = tuple(
        ModuleGroup(
            path=path,
            num_pairs=len(groups[path]),
            rows_of_a=tuple(sorted({shape[0] if shape else 0 for shape in {pair.a.shape for pair in groups[path]}})),
            num_bytes=sum([pair.a.size_bytes + pair.b.size_bytes for pair in groups[path]]),
        )
        for path in sorted(groups)
    )
    by_layer: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for path, members in groups.items():
        layer, expert = _number_place("layers", path), _number_place("experts", path)
        if layer is not None and expert is not None:
            numbers = Counter([tuple(itemgetter(layer, expert)(pair.module.split("."))) for pair in members])
            for (layer_text, expert_text), count in numbers.items():
                # A name may hold a star of its own.
                if _is_number(layer_text + expert_text) and max(len(layer_text), len(expert_text)) < 6:
                    by_layer[int(layer_text)][int(expert_text)] += count
    found.names_by_layer = {layer: dict(by_layer[layer]) for layer in sorted(by_layer)}
    found.likely_families = next((families for sign, families in _SIGNS if any(sign in path for path in groups)), ())


def _by_path(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    """Pairs by path, with * for each number."""
    # Nearly all names differ in the last segment but one alone, the expert's number: the others are looked at once.
    beside: dict[tuple[str, str], list[Pair]] = {}
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        path, _, last = pair.module.rpartition(".")
        path, _, middle = path.rpartition(".")
        if not _is_number(middle):
            path, last = pair.module, ""
        members = beside.get((path, last))
        if members is None:
            starred = ".".join(["*" if _is_number(part) else part for part in pair.module.split(".")])
            members = beside[path, last] = groups.setdefault(starred, [])
        members.append(pair)
    return groups


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdecimal()


def _number_place(name: str, path: str) -> int | None:
    """Which segment of a path is the first number behind a name."""
    parts = path.split(".")
    if name not in parts or "*" not in parts[parts.index(name) :]:
        return None
    return parts.index("*", parts.index(name))


def _look_at_form(form: NormalForm, model: ModelSpec, placement: ExpertPlacement, found: Inspection) -> None:
    found.model, found.placement = model.name, placement.strategy
    found.layout, found.num_experts = form.expert_layout.value, max(layer.num_experts for layer in model.moe_layers)
    experts: defaultdict[int, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for (layer, projection), by_expert in form.experts.items():
        experts[layer][projection.value] = tuple(by_expert)
    found.experts_by_layer = dict(sorted(experts.items()))
    found.dense_modules, found.saved_modules, found.ignored = tuple(form.dense), tuple(form.saved), form.ignored
    samples = form.samples()
    found.lora_ranks = tuple(sorted({pair.lora_rank for pair in samples}))
    found.scales = tuple(sorted({pair.scale for pair in samples}))
    load_specs = [MoEEPLoadSpec.make(model, placement, rank) for rank in range(placement.num_ranks)]
    found.warnings = (
        *form.warnings,
        *base_model_warnings(found.base_model, model.name),
        *_rank_warnings(max(found.lora_ranks, default=0)),
        *_placement_warnings(load_specs),
    )
    specs = [SliceSpec(layers=spec.layers, metadata=_metadata(spec)) for spec in load_specs]
    found.bytes_per_rank = tuple(layout.tensor_bytes for layout in plan_slices(form, specs).layouts)


def _rank_warnings(largest: int) -> Sequence[str]:
    if largest <= DEFAULT_MAX_LORA_RANK:
        return []
    return [
        f"lora_rank {largest} is above {DEFAULT_MAX_LORA_RANK}, the default of EPILORA_MAX_LORA_RANK: a service that "
        "does not set it refuses the adapter (LORA_RANK_TOO_LARGE)"
    ]


def _placement_warnings(specs: Sequence[MoEEPLoadSpec]) -> Sequence[str]:
    idle = [spec.ep_rank for spec in specs if not any(layer.local_experts for layer in spec.layers)]
    if not idle:
        return []
    return [f"{len(idle)} of {len(specs)} EP ranks hold no expert, the first is rank {idle[0]}"]


def _metadata(spec: MoEEPLoadSpec) -> SliceMetadata:
    return SliceMetadata(
        layout_version=LAYOUT_VERSION,
        model_digest=spec.model_digest,
        placement_id=spec.placement_id,
        ep_rank=spec.ep_rank,
    )


def coverage(found: Inspection) -> tuple[int, Mapping[int, Sequence[float]]]:
    """(experts, layer -> part of each expert's projections that has a pair), for a picture.

    With a model: what it resolves to. Without: the names that have an expert's number.
    """
    if found.experts_by_layer:
        names = [projection for by in found.experts_by_layer.values() for projection in by]
        most = 2 if Projection.GATE_UP in names or Projection.GATE not in names else 3
        layers = {}
        for layer, by_projection in found.experts_by_layer.items():
            touched = Counter([expert for experts in by_projection.values() for expert in experts])
            layers[layer] = [min(1.0, touched[expert] / most) for expert in range(found.num_experts)]
        return found.num_experts, layers
    if not found.names_by_layer:
        return 0, {}
    num_experts = min(4096, max(expert for by_expert in found.names_by_layer.values() for expert in by_expert) + 1)
    most = max(count for by_expert in found.names_by_layer.values() for count in by_expert.values())
    return num_experts, {
        layer: [by_expert.get(expert, 0) / most for expert in range(num_experts)]
        for layer, by_expert in found.names_by_layer.items()
    }
