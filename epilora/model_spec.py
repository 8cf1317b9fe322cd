"""What epilora knows of a model before any weight is read: its layers, sizes, and the modules an adapter may change.

Legend: D hidden size, E experts of a layer, F intermediate size of an expert.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epilora.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError, reading_files
from epilora.families import FAMILIES, GateUpLayout, ModelFamily, Size, Where, sized_family_of
from epilora.model_digest import digest_of_model

__all__ = [
    "FAMILIES",
    "DenseModuleSpec",
    "GateUpLayout",
    "MoELayerSpec",
    "ModelDescription",
    "ModelSpec",
    "RecurrentLayerSpec",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class MoELayerSpec:
    """The routed experts of one decoder layer."""

    layer: int
    """Decoder layer, from 0."""
    module: str
    """Path of the module that holds them, e.g. "model.layers.0.mlp.experts"."""
    num_experts: int
    """E."""
    hidden_size: int
    """D."""
    intermediate_size: int
    """F."""
    gate_up_layout: GateUpLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseModuleSpec:
    """A linear map outside the routed experts: attention, router, shared expert, dense MLP, embedding, lm_head.

    The embedding is one from a one-hot vector: in_features is the vocabulary.
    """

    module: str
    in_features: int
    out_features: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentLayerSpec:
    """What a layer that keeps a state of fixed size takes for one sequence."""

    layer: int
    """Decoder layer, from 0."""
    conv_elements: int
    """Last inputs of its convolution, in the model's dtype."""
    recurrent_bytes: int
    """Its recurrent state, in a dtype of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDescription:
    """What a model's module tree says of it; the fields are those of ModelSpec."""

    num_layers: int
    moe_layers: tuple[MoELayerSpec, ...]
    num_experts_per_token: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    dense_modules: tuple[DenseModuleSpec, ...]
    recurrent_layers: tuple[RecurrentLayerSpec, ...]
    dense_elements: int

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ModelDescription:
        """Reverse of dataclasses.asdict, through JSON."""
        layers = tuple(
            MoELayerSpec(**{**layer, "gate_up_layout": GateUpLayout(layer["gate_up_layout"])})
            for layer in values["moe_layers"]
        )
        dense = tuple(DenseModuleSpec(**module) for module in values["dense_modules"])
        recurrent = tuple(RecurrentLayerSpec(**layer) for layer in values["recurrent_layers"])
        return cls(**{**values, "moe_layers": layers, "dense_modules": dense, "recurrent_layers": recurrent})


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A model, from its config.json."""

    name: str
    """Path as configured."""
    model_type: str
    digest: str
    """Lower-case hex; see `digest_of_model`."""
    num_layers: int
    moe_layers: tuple[MoELayerSpec, ...]
    """In order of layer."""
    num_experts_per_token: int
    """K."""
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    dense_modules: tuple[DenseModuleSpec, ...]
    """In order of layer, then of the family's table; last the embedding and lm_head."""
    eos_token_ids: tuple[int, ...]
    has_tokenizer: bool
    recurrent_layers: tuple[RecurrentLayerSpec, ...] = ()
    """In order of layer."""
    dense_elements: int = 0
    """Weights outside the routed experts; 0 if only the files say."""

    @classmethod
    def from_directory(cls, path: Path) -> ModelSpec:
        """Reads a checkpoint's config.json (and generation_config.json, and the headers of its weight files).

        Raises:
            NotFoundError: no such directory, or no config.json in it.
            InvalidArgumentError: config.json is broken, lacks a size, or names an unknown family
                (reason UNKNOWN_MODEL_FAMILY).
            FailedPreconditionError: a file cannot be read (reason MODEL_UNREADABLE).
        """
        with reading_model(path):
            return cls._from_config(path, _Config.of(path))

    @classmethod
    def _from_config(cls, path: Path, config: _Config) -> ModelSpec:
        family = sized_family_of(config.text("model_type"))
        num_layers = config.positive("num_hidden_layers")
        hidden_size = config.positive("hidden_size")
        num_experts = _num_experts(config, family)
        sparse = [_is_sparse(config, family, layer) for layer in range(num_layers)]
        moe_layers = tuple(
            MoELayerSpec(
                layer=layer,
                module=f"{family.layers_path}.{layer}.{family.experts_path}",
                num_experts=num_experts,
                hidden_size=hidden_size,
                intermediate_size=config.positive(family.intermediate_size_key),
                gate_up_layout=family.gate_up_layout,
            )
            for layer in range(num_layers)
            if sparse[layer]
        )
        if not moe_layers:
            raise InvalidArgumentError(
                f"{config.path}: none of the {num_layers} layers has routed experts", reason="NO_MOE_LAYERS"
            )
        return cls(
            name=str(path),
            model_type=family.model_type,
            digest=digest_of_model(path, config.values),
            num_layers=num_layers,
            moe_layers=moe_layers,
            num_experts_per_token=config.positive("num_experts_per_tok"),
            hidden_size=hidden_size,
            vocab_size=config.positive("vocab_size"),
            max_position_embeddings=config.positive("max_position_embeddings"),
            dense_modules=_dense_modules(config, family, sparse, num_experts),
            eos_token_ids=_eos_token_ids(path, config),
            has_tokenizer=_has_tokenizer(path),
        )

    @staticmethod
    def model_type_of(path: Path) -> str:
        """model_type of a checkpoint. Raises as from_directory, but for the family."""
        return _Config.of(path).text("model_type")

    @classmethod
    def from_description(cls, path: Path, description: ModelDescription) -> ModelSpec:
        """The spec of a checkpoint whose module tree was looked at. Raises as from_directory, but for the family."""
        config = _Config.of(path)
        return cls(
            name=str(path),
            model_type=config.text("model_type"),
            digest=digest_of_model(path, config.values),
            num_layers=description.num_layers,
            moe_layers=description.moe_layers,
            num_experts_per_token=description.num_experts_per_token,
            hidden_size=description.hidden_size,
            vocab_size=description.vocab_size,
            max_position_embeddings=description.max_position_embeddings,
            dense_modules=description.dense_modules,
            recurrent_layers=description.recurrent_layers,
            dense_elements=description.dense_elements,
            eos_token_ids=_eos_token_ids(path, config),
            has_tokenizer=_has_tokenizer(path),
        )


def reading_model(path: Path) -> AbstractContextManager[None]:
    """`reading_files` of a checkpoint: FailedPreconditionError, reason MODEL_UNREADABLE."""
    return reading_files(
        path, FailedPreconditionError, reason="MODEL_UNREADABLE", advice="; is the checkpoint complete?"
    )


class _Config:
    """config.json with checked access."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    @classmethod
    def of(cls, directory: Path) -> _Config:
        """That of a checkpoint."""
        config_file = directory / "config.json"
        with reading_model(directory):
            if not directory.is_dir():
                raise NotFoundError(f"model directory {directory} does not exist", reason="MODEL_NOT_FOUND")
            if not config_file.is_file():
                raise NotFoundError(f"{directory} has no config.json", reason="MODEL_NOT_FOUND")
            return cls(_read_json(config_file), config_file)

    def error(self, message: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"{self.path}: {message}", reason="BAD_MODEL_CONFIG")

    def text(self, key: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str):
            raise self.error(f"{key} is {value!r}, expected a string")
        return value

    def positive(self, key: str) -> int:
        value = self.values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(f"{key} is {value!r}, expected a positive integer")
        return value

    def positive_or(self, key: str, otherwise: int) -> int:
        return otherwise if self.values.get(key) is None else self.positive(key)


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{path} is not valid JSON: {error}", reason="BAD_MODEL_CONFIG") from error
    if not isinstance(values, dict):
        raise InvalidArgumentError(f"{path} holds {type(values).__name__}, not an object", reason="BAD_MODEL_CONFIG")
    return values


def _num_experts(config: _Config, family: ModelFamily) -> int:
    found = {key: config.positive(key) for key in family.num_experts_keys if config.values.get(key) is not None}
    if not found:
        raise config.error(f"no number of experts, expected one of {', '.join(family.num_experts_keys)}")
    if len(set(found.values())) > 1:
        raise config.error(f"two different numbers of experts: {found}")
    return next(iter(found.values()))


def _is_sparse(config: _Config, family: ModelFamily, layer: int) -> bool:
    if not family.sparse_layers_by_config:
        return True
    mlp_only = config.values.get("mlp_only_layers") or []
    if not isinstance(mlp_only, list):
        raise config.error(f"mlp_only_layers is {mlp_only!r}, expected a list of layers")
    return layer not in mlp_only and (layer + 1) % config.positive_or("decoder_sparse_step", 1) == 0


def _dense_modules(
    config: _Config, family: ModelFamily, sparse: list[bool], num_experts: int
) -> tuple[DenseModuleSpec, ...]:
    hidden_size = config.positive("hidden_size")
    num_heads = config.positive("num_attention_heads")
    head_dim = config.positive_or("head_dim", hidden_size // num_heads)
    sizes = {
        Size.D: hidden_size,
        Size.Q: num_heads * head_dim,
        Size.KV: config.positive_or("num_key_value_heads", num_heads) * head_dim,
        Size.E: num_experts,
        Size.ONE: 1,
    }
    if not all(sparse):
        sizes[Size.F_DENSE] = config.positive("intermediate_size")
    if family.shared_intermediate_size_key:
        sizes[Size.F_SHARED] = config.positive(family.shared_intermediate_size_key)
    ends = (
        (family.embedding_path, config.positive("vocab_size"), hidden_size),
        (family.lm_head_path, hidden_size, config.positive("vocab_size")),
    )
    in_layers = tuple(
        DenseModuleSpec(
            module=f"{family.layers_path}.{layer}.{template.path}",
            in_features=sizes[template.in_size],
            out_features=sizes[template.out_size],
        )
        for layer, is_sparse in enumerate(sparse)
        for template in family.dense_modules
        if template.where in (Where.ALL, Where.MOE if is_sparse else Where.DENSE)
    )
    return in_layers + tuple(
        DenseModuleSpec(module=path, in_features=in_features, out_features=out_features)
        for path, in_features, out_features in ends
        if path
    )


def _eos_token_ids(path: Path, config: _Config) -> tuple[int, ...]:
    """generation_config.json's where it has them, else config.json's: what transformers' generate ends at."""
    generation_file = path / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.is_file() else {}
    text = config.values.get("text_config")
    for values in (generation, config.values, text if isinstance(text, dict) else {}):
        ids = values.get("eos_token_id")
        if ids is not None:
            listed = ids if isinstance(ids, list) else [ids]
            if not all(isinstance(token, int) and not isinstance(token, bool) for token in listed):
                raise config.error(f"eos_token_id is {ids!r}, expected an integer or a list of integers")
            return tuple(listed)
    return ()


def _has_tokenizer(path: Path) -> bool:
    single = any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    return single or all((path / name).is_file() for name in ("vocab.json", "merges.txt"))
