"""What is to be known of a model, from its module tree: for families that are not in the table of sizes.

The model is built without memory, and every experts module, router, linear map and embedding in it is found. So a
family that transformers knows, and whose experts go through its experts interface, needs no code here.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from compute_worker.experts_modules import experts_modules, shape_of
from compute_worker.recurrent import recurrent_modules, state_of
from compute_worker.text_model import is_multimodal_without_language_model, text_model
from epilora.errors import EpiloraError, InvalidArgumentError
from epilora.families import SIZED_FAMILIES, family_of
from epilora.model_spec import DenseModuleSpec, ModelDescription, ModelSpec, MoELayerSpec, RecurrentLayerSpec

_LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# Experts chosen a token, over the families' configs.
_TOP_K_KEYS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "top_k_experts",
    "moe_topk",
    "moe_num_active_experts",
)

# Jamba's mixer multiplies by this matrix itself, so a pair on the module would change nothing.
_READ_AS_A_MATRIX = (".mamba.dt_proj",)

_log = structlog.get_logger()


def load_spec_of_model(path: Path) -> ModelSpec:
    """The spec of a checkpoint's model: from the table of families, else from its module tree.

    Raises:
        NotFoundError, InvalidArgumentError: see ModelSpec.from_directory; UNKNOWN_MODEL_FAMILY if transformers does
            not know the family or it has no experts behind transformers' interface.
    """
    model_type = ModelSpec.model_type_of(path)
    if model_type in SIZED_FAMILIES:
        return ModelSpec.from_directory(path)
    return ModelSpec.from_description(path, describe_model(path))


def describe_model(path: Path) -> ModelDescription:
    """What the module tree of a checkpoint's model says. Raises as load_spec_of_model."""
    model = build_without_memory(path)
    config = model.config.get_text_config()
    moe_layers = _moe_layers(model)
    if not moe_layers:
        raise InvalidArgumentError(
            f"{path}: {type(model).__name__} has no experts behind transformers' experts interface; this family cannot"
            " be served",
            reason="UNKNOWN_MODEL_FAMILY",
            metadata={"model_type": config.model_type},
        )
    return ModelDescription(
        num_layers=config.num_hidden_layers,
        moe_layers=moe_layers,
        num_experts_per_token=_num_experts_per_token(config),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        dense_modules=_dense_modules(model, moe_layers),
        recurrent_layers=_recurrent_layers(model),
        dense_elements=_dense_elements(model, moe_layers),
    )


def build_without_memory(path: Path, **options: Any) -> PreTrainedModel:
    """transformers' causal language model of a checkpoint, or of its text part, on the meta device.

    Raises:
        InvalidArgumentError: reason UNKNOWN_MODEL_FAMILY; transformers has no such causal language model.
    """
    try:
        config = AutoConfig.from_pretrained(path)
        build = text_model if is_multimodal_without_language_model(config) else AutoModelForCausalLM.from_config
        with torch.device("meta"):
            model: PreTrainedModel = build(config, **options)
    except ValueError as error:
        raise InvalidArgumentError(
            f"{path}: transformers cannot build a causal language model of it: {str(error).splitlines()[0]}",
            reason="UNKNOWN_MODEL_FAMILY",
        ) from error
    return model


def _moe_layers(model: nn.Module) -> tuple[MoELayerSpec, ...]:
    layers = []
    for path, module, traits in experts_modules(model):
        number = _LAYER_NUMBER.search(path)
        if number is None:
            raise InvalidArgumentError(
                f"{path} is not in a list of decoder layers; this family cannot be served", reason="UNSUPPORTED_EXPERTS"
            )
        shape = shape_of(path, module, traits)
        layers.append(
            MoELayerSpec(
                layer=int(number[1]),
                module=path,
                num_experts=shape.num_experts,
                hidden_size=shape.hidden_size,
                intermediate_size=shape.intermediate_size,
                gate_up_layout=traits.layout,
            )
        )
    return tuple(sorted(layers, key=lambda layer: layer.layer))


def _num_experts_per_token(config: Any) -> int:
    for key in _TOP_K_KEYS:
        value = getattr(config, key, None)
        if isinstance(value, int) and value > 0:
            return value
    raise InvalidArgumentError(
        f"the config of {config.model_type} has none of {', '.join(_TOP_K_KEYS)}", reason="BAD_MODEL_CONFIG"
    )


def _dense_modules(model: PreTrainedModel, moe_layers: tuple[MoELayerSpec, ...]) -> tuple[DenseModuleSpec, ...]:
    """Linear maps and routers in the decoder layers, then the embedding and lm_head."""
    experts = tuple(f"{layer.module}." for layer in moe_layers)
    blocks = {layer.module.rpartition(".")[0] for layer in moe_layers}
    family = family_of(model.config.get_text_config().model_type, moe_layers[0].gate_up_layout)
    found = []
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        is_matrix = isinstance(weight, nn.Parameter) and weight.dim() == 2
        # A router is no nn.Linear in most families, but uses its matrix as one.
        is_router = is_matrix and path.rpartition(".")[0] in blocks and not isinstance(module, nn.Embedding)
        if (
            path.startswith(experts)
            or path.endswith(_READ_AS_A_MATRIX)
            or not (isinstance(module, nn.Linear) or is_router)
        ):
            continue
        if path != family.lm_head_path and _LAYER_NUMBER.search(f"{path}.") is not None:
            assert isinstance(weight, nn.Parameter)
            found.append(DenseModuleSpec(module=path, in_features=weight.shape[1], out_features=weight.shape[0]))
    embedding: Any = model.get_input_embeddings()
    # One that scales its output is a class of its own; whether a pair is scaled, too, depends on the release of PEFT.
    at_its_path = dict(model.named_modules()).get(family.embedding_path) is embedding
    if isinstance(embedding, nn.Embedding) and type(embedding) is nn.Embedding and at_its_path:
        found.append(
            DenseModuleSpec(
                module=family.embedding_path,
                in_features=embedding.num_embeddings,
                out_features=embedding.embedding_dim,
            )
        )
    head = dict(model.named_modules()).get(family.lm_head_path)
    if isinstance(head, nn.Linear):
        found.append(
            DenseModuleSpec(module=family.lm_head_path, in_features=head.in_features, out_features=head.out_features)
        )
    return tuple(found)


def _dense_elements(model: PreTrainedModel, moe_layers: tuple[MoELayerSpec, ...]) -> int:
    """Weights and stored tables that are no expert's; those of tied modules once."""
    model.tie_weights()
    experts = tuple(f"{layer.module}." for layer in moe_layers)
    stored = model.state_dict(keep_vars=True)
    unique = {id(tensor): tensor.numel() for name, tensor in stored.items() if not name.startswith(experts)}
    return sum(unique.values())


def _recurrent_layers(model: PreTrainedModel) -> tuple[RecurrentLayerSpec, ...]:
    """Sizes of the states that the model's own code makes of one token."""
    hidden_size = model.config.get_text_config().hidden_size
    found = []
    for recurrent in recurrent_modules(model):
        token = torch.empty((1, 1, hidden_size), dtype=model.dtype, device="meta")
        shape, _ = state_of(recurrent.layer, recurrent.run, token)
        found.append(
            RecurrentLayerSpec(
                layer=recurrent.layer,
                conv_elements=0 if shape.conv is None else torch.Size(shape.conv).numel(),
                recurrent_bytes=shape.recurrent_bytes,
            )
        )
    return tuple(sorted(found, key=lambda layer: layer.layer))


def main() -> None:
    """Prints the description of one checkpoint's model as a line of JSON, or its error; for processes without torch."""
    try:
        print(json.dumps(dataclasses.asdict(describe_model(Path(sys.argv[1])))))
    except EpiloraError as error:
        print(json.dumps({"error": error.message, "reason": error.reason, "code": error.code.name}))


if __name__ == "__main__":
    main()
