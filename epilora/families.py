"""The model families as data: what their config.json calls things and which modules their layers hold.

A family is one Hugging Face `model_type`. Most need no entry: the worker reads their module tree. An entry of
`FAMILIES` either describes a family in full (`has_sizes`), so that config.json alone says all; or says how its adapters
differ from the usual names. Module paths are those of transformers 5.

Legend of the sizes that `DenseModuleTemplate` refers to (`Size`):
    D hidden size, Q query heads x head dim, KV key/value heads x head dim, E experts,
    F_DENSE width of a dense MLP layer, F_SHARED width of the shared expert, ONE 1.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypedDict

from epilora.errors import InvalidArgumentError


class GateUpLayout(enum.IntEnum):
    """How the experts' first projection is stored; values of the proto enum."""

    CONCATENATED = 1
    """Rows 0..F-1 are gate, F..2F-1 are up."""
    INTERLEAVED = 2
    """Even rows are gate, odd rows are up."""
    NOT_GATED = 3
    """No gate: the projection has F rows."""


class Size(enum.Enum):
    """A size that a family's config determines; see the module's legend."""

    D = "hidden"
    Q = "query"
    KV = "key_value"
    E = "experts"
    F_DENSE = "dense_intermediate"
    F_SHARED = "shared_intermediate"
    ONE = "one"


class StackedAxes(enum.Enum):
    """How stacked expert parameters are stored, and what PEFT takes them for: it heeds the module's `is_transposed`."""

    OUT_IN = "out_in"
    """(E, out, in)."""
    IN_OUT = "in_out"
    """(E, in, out), of a module whose `is_transposed` is true."""
    IN_OUT_UNMARKED = "in_out_unmarked"
    """(E, in, out), of a module without that attribute: PEFT takes in for out."""


class Where(enum.Enum):
    """Decoder layers that hold a module."""

    ALL = "all"
    MOE = "moe"
    DENSE = "dense"


class Projection(enum.StrEnum):
    """A projection of a routed expert, as the normal form and the slice files name it."""

    GATE_UP = "gate_up"
    GATE = "gate"
    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseModuleTemplate:
    """A linear map in decoder layers, outside the routed experts."""

    path: str
    """Path below the decoder layer, e.g. "self_attn.q_proj"."""
    in_size: Size
    out_size: Size
    where: Where = Where.ALL


@dataclass(frozen=True, kw_only=True, slots=True)
class PerExpertForm:
    """What checkpoints that hold a linear map for each expert call them."""

    projections: Mapping[Projection, str]
    """Name of an expert's linear map."""
    block: tuple[str, str] = ("", "")
    """Segment of the block of experts in today's module tree, and there; empty: the same."""
    root: str = ""
    """First segment of all paths of the model but lm_head; empty: the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFamily:
    """What epilora has to know of a model_type."""

    model_type: str
    layers_path: str = "model.layers"
    """Path of the list of decoder layers."""
    experts_path: str = "mlp.experts"
    """Path of the experts' module below a decoder layer."""
    num_experts_keys: tuple[str, ...] = ("num_experts", "num_local_experts")
    """Spellings of E in config.json, over the versions of transformers."""
    intermediate_size_key: str = "moe_intermediate_size"
    """Key of F in config.json."""
    shared_intermediate_size_key: str = ""
    """Key of the shared expert's width; empty if there is none."""
    sparse_layers_by_config: bool = False
    """True if mlp_only_layers and decoder_sparse_step say which layers have experts; else all have."""
    gate_up_layout: GateUpLayout = GateUpLayout.CONCATENATED
    stacked_axes: StackedAxes | None = StackedAxes.OUT_IN
    """Of the stacked expert parameters; None if not known."""
    has_sizes: bool = False
    """True if the keys and modules below describe the family in full; else only how adapters name its modules."""
    dense_modules: tuple[DenseModuleTemplate, ...] = ()
    embedding_path: str = "model.embed_tokens"
    """Path of the token embedding; empty if its pairs cannot be honoured."""
    lm_head_path: str = "lm_head"
    """Path of the last linear map; empty if its pairs cannot be honoured."""
    module_renames: tuple[tuple[str, str], ...] = ()
    """(old, new) path segments of adapters that were trained on an older module tree."""
    expert_projections: Mapping[str, Projection] = field(default_factory=lambda: _GATED_PROJECTIONS)
    """Name of a single expert's linear map in per-expert adapters -> projection."""
    stacked_parameters: Mapping[str, Projection] = field(default_factory=lambda: _GATED_PARAMETERS)
    """Name of a stacked expert parameter -> projection, in the order in which the module declares them."""
    per_expert_form: PerExpertForm | None = field(default_factory=lambda: _PROJ_NAMES)
    """Of released checkpoints; None if all of them hold stacked experts only."""
    text_path: str = ""
    """Path of the text model in the multimodal one, of families that have no language model by itself."""

    @property
    def tied_paths(self) -> tuple[str, str]:
        """Modules whose weights may be one."""
        return self.embedding_path, self.lm_head_path


_GATED_PROJECTIONS: Mapping[str, Projection] = MappingProxyType(
    {
        "gate_proj": Projection.GATE,
        "up_proj": Projection.UP,
        "down_proj": Projection.DOWN,
        "w1": Projection.GATE,
        "w3": Projection.UP,
        "w2": Projection.DOWN,
    }
)
_PROJ_NAMES: PerExpertForm = PerExpertForm(
    projections=MappingProxyType({Projection.GATE: "gate_proj", Projection.UP: "up_proj", Projection.DOWN: "down_proj"})
)
_W_NAMES = MappingProxyType({Projection.GATE: "w1", Projection.UP: "w3", Projection.DOWN: "w2"})
_BLOCK_SPARSE = PerExpertForm(projections=_W_NAMES, block=("mlp", "block_sparse_moe"))
_GATED_PARAMETERS: Mapping[str, Projection] = MappingProxyType(
    {"gate_up_proj": Projection.GATE_UP, "down_proj": Projection.DOWN}
)


class _NotGated(TypedDict):
    gate_up_layout: GateUpLayout
    expert_projections: Mapping[str, Projection]
    stacked_parameters: Mapping[str, Projection]


_NOT_GATED = _NotGated(
    gate_up_layout=GateUpLayout.NOT_GATED,
    expert_projections=MappingProxyType(
        {"up_proj": Projection.UP, "down_proj": Projection.DOWN, "w1": Projection.UP, "w2": Projection.DOWN}
    ),
    stacked_parameters=MappingProxyType({"up_proj": Projection.UP, "down_proj": Projection.DOWN}),
)

_ATTENTION = (
    DenseModuleTemplate(path="self_attn.q_proj", in_size=Size.D, out_size=Size.Q),
    DenseModuleTemplate(path="self_attn.k_proj", in_size=Size.D, out_size=Size.KV),
    DenseModuleTemplate(path="self_attn.v_proj", in_size=Size.D, out_size=Size.KV),
    DenseModuleTemplate(path="self_attn.o_proj", in_size=Size.Q, out_size=Size.D),
)
_ROUTER = (DenseModuleTemplate(path="mlp.gate", in_size=Size.D, out_size=Size.E, where=Where.MOE),)
_DENSE_MLP = (
    DenseModuleTemplate(path="mlp.gate_proj", in_size=Size.D, out_size=Size.F_DENSE, where=Where.DENSE),
    DenseModuleTemplate(path="mlp.up_proj", in_size=Size.D, out_size=Size.F_DENSE, where=Where.DENSE),
    DenseModuleTemplate(path="mlp.down_proj", in_size=Size.F_DENSE, out_size=Size.D, where=Where.DENSE),
)
_SHARED_EXPERT = (
    DenseModuleTemplate(path="mlp.shared_expert.gate_proj", in_size=Size.D, out_size=Size.F_SHARED, where=Where.MOE),
    DenseModuleTemplate(path="mlp.shared_expert.up_proj", in_size=Size.D, out_size=Size.F_SHARED, where=Where.MOE),
    DenseModuleTemplate(path="mlp.shared_expert.down_proj", in_size=Size.F_SHARED, out_size=Size.D, where=Where.MOE),
    DenseModuleTemplate(path="mlp.shared_expert_gate", in_size=Size.D, out_size=Size.ONE, where=Where.MOE),
)

FAMILIES: Mapping[str, ModelFamily] = MappingProxyType(
    {
        family.model_type: family
        for family in (
            ModelFamily(
                model_type="qwen3_moe",
                has_sizes=True,
                sparse_layers_by_config=True,
                dense_modules=(*_ATTENTION, *_ROUTER, *_DENSE_MLP),
            ),
            ModelFamily(
                model_type="qwen2_moe",
                has_sizes=True,
                sparse_layers_by_config=True,
                shared_intermediate_size_key="shared_expert_intermediate_size",
                dense_modules=(*_ATTENTION, *_ROUTER, *_SHARED_EXPERT, *_DENSE_MLP),
            ),
            ModelFamily(
                model_type="mixtral",
                has_sizes=True,
                intermediate_size_key="intermediate_size",
                dense_modules=(*_ATTENTION, *_ROUTER),
                # What transformers 4 called the block.
                module_renames=(("block_sparse_moe", "mlp"),),
                per_expert_form=_BLOCK_SPARSE,
            ),
            ModelFamily(
                model_type="olmoe",
                has_sizes=True,
                intermediate_size_key="intermediate_size",
                dense_modules=(*_ATTENTION, *_ROUTER),
            ),
            ModelFamily(
                model_type="gpt_oss",
                gate_up_layout=GateUpLayout.INTERLEAVED,
                stacked_axes=StackedAxes.IN_OUT,
                per_expert_form=None,
            ),
            ModelFamily(model_type="llama4_text", stacked_axes=StackedAxes.IN_OUT_UNMARKED, per_expert_form=None),
            ModelFamily(model_type="llama4", stacked_axes=StackedAxes.IN_OUT_UNMARKED, per_expert_form=None),
            ModelFamily(model_type="deepseek_v2"),
            ModelFamily(model_type="deepseek_v3"),
            ModelFamily(model_type="glm4_moe"),
            ModelFamily(
                model_type="minimax_m2", module_renames=(("block_sparse_moe", "mlp"),), per_expert_form=_BLOCK_SPARSE
            ),
            ModelFamily(
                model_type="kimi_linear", module_renames=(("block_sparse_moe", "mlp"),), per_expert_form=_BLOCK_SPARSE
            ),
            ModelFamily(
                model_type="phimoe",
                module_renames=(("block_sparse_moe", "mlp"), ("mlp.gate", "mlp.router")),
                per_expert_form=_BLOCK_SPARSE,
            ),
            ModelFamily(model_type="lfm2_moe", per_expert_form=PerExpertForm(projections=_W_NAMES)),
            ModelFamily(model_type="granitemoe", per_expert_form=None),
            ModelFamily(model_type="granitemoehybrid", per_expert_form=None),
            ModelFamily(
                # Its experts were stored the other way round before transformers 5.
                model_type="qwen3_vl_moe",
                stacked_axes=None,
                per_expert_form=None,
                text_path="model.language_model",
            ),
            ModelFamily(
                model_type="nemotron_h",
                module_renames=(("backbone", "model"),),
                embedding_path="model.embeddings",
                per_expert_form=PerExpertForm(
                    projections=MappingProxyType({Projection.UP: "up_proj", Projection.DOWN: "down_proj"}),
                    root="backbone",
                ),
                **_NOT_GATED,
            ),
            ModelFamily(model_type="gemma4_text", module_renames=(("moe.experts", "experts"),), per_expert_form=None),
        )
    }
)


SIZED_FAMILIES = frozenset(name for name, family in FAMILIES.items() if family.has_sizes)
"""Families whose config.json says all that `ModelSpec` needs; others need the module tree."""


def family_of(model_type: str, gate_up_layout: GateUpLayout) -> ModelFamily:
    """How adapters of a model_type name its modules: the table's entry, else the names that transformers uses.

    Args:
        model_type: of config.json.
        gate_up_layout: of the model's experts, which says whether there is a gate.
    """
    family = FAMILIES.get(model_type)
    if family is not None:
        return family
    if gate_up_layout is GateUpLayout.NOT_GATED:
        return ModelFamily(model_type=model_type, stacked_axes=None, **_NOT_GATED)
    return ModelFamily(model_type=model_type, stacked_axes=None, gate_up_layout=gate_up_layout)


def sized_family_of(model_type: str) -> ModelFamily:
    """The table's entry of a family whose config.json says all.

    Raises:
        InvalidArgumentError: reason UNKNOWN_MODEL_FAMILY.
    """
    family = FAMILIES.get(model_type)
    if family is None or not family.has_sizes:
        raise InvalidArgumentError(
            f"model_type {model_type!r} needs the module tree of the model; known from config.json alone are "
            f"{', '.join(sorted(SIZED_FAMILIES))}",
            reason="UNKNOWN_MODEL_FAMILY",
            metadata={"model_type": model_type},
        )
    return family
