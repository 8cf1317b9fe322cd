"""A trial step of one token that finds out whether a model can be served, and what of it adapters can change.

It runs the real model with stand-ins for attention and experts. What the model does not send through our functions
would be computed without us, and wrong: so it is found here, when the worker starts, and refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from compute_worker.dense_lora import DenseLora
from compute_worker.kv_cache import KVShape
from compute_worker.paged_attention import AttentionForward, LayerAttention, LayerInput, Visible
from compute_worker.query_scale import QueryScales
from compute_worker.recurrent import attach_recurrent, recurrent_modules
from compute_worker.recurrent_probe import RecurrentProbe
from compute_worker.state_cache import StateShape
from epilora.errors import EpiloraError, InvalidArgumentError
from epilora.model_spec import DenseModuleSpec, ModelSpec

# Arguments of attention and recurrent layers that have no effect on one packed step without a mask.
_WITHOUT_EFFECT = frozenset(
    {
        "position_ids",
        "cache_position",
        "use_cache",
        "past_key_values",
        "past_key_value",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "is_causal",
        "position_embeddings",
        "logits_to_keep",
        "num_items_in_batch",
    }
)

_WITHOUT_STATE = ("moe", "mlp")
_ATTENTION_CACHES = (DynamicLayer, DynamicSlidingWindowLayer)
_STATE_CACHES = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelProbe:
    """What the trial step showed.

    Attributes:
        kv_shapes: attention layer -> what one position takes.
        state_shapes: recurrent layer -> what one sequence takes.
        dense_modules: those of the spec whose pairs take effect.
    """

    kv_shapes: Mapping[int, KVShape]
    state_shapes: Mapping[int, StateShape]
    dense_modules: tuple[DenseModuleSpec, ...]


class _ExpertsProbe:
    """Stands in for an ExpertLayer: notes the call, returns zeros."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []

    def forward(self, x_TD: torch.Tensor, expert_TK: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
        """See ExpertLayer.forward."""
        self.calls.append((*expert_TK.shape, *weight_TK.shape))
        return torch.zeros_like(x_TD)


class _AttentionProbe:
    """Stands in for PagedAttention: notes shapes, returns zeros."""

    def __init__(self) -> None:
        self.shapes: dict[int, KVShape] = {}
        self.unknown: set[str] = set()

    def forward(self, given: LayerInput, others: Mapping[str, object]) -> torch.Tensor:
        """See PagedAttention.forward."""
        if given.layer in self.shapes:
            raise _unsupported(f"layer {given.layer} attends twice")
        self.shapes[given.layer] = KVShape(
            num_heads=given.k.shape[1], key_dim=given.k.shape[3], value_dim=given.v.shape[3]
        )
        self.unknown |= {name for name, value in others.items() if value is not None and name not in _WITHOUT_EFFECT}
        _, num_heads, num_tokens, _ = given.q.shape
        return given.q.new_zeros((1, num_tokens, num_heads, given.v.shape[3]))


def probe_model(model: PreTrainedModel, spec: ModelSpec, lora: DenseLora, scales: QueryScales) -> ModelProbe:
    """Runs the trial step. DenseLora must be attached; attention and experts are attached anew afterwards.

    Raises:
        InvalidArgumentError: reason UNSUPPORTED_MODEL; the family cannot be served, and why.
    """
    _check_states(model)
    attention, experts = _AttentionProbe(), {layer.module: _ExpertsProbe() for layer in spec.moe_layers}
    recurrent = RecurrentProbe()
    attach_attention(model, attention.forward, scales)
    attach_recurrent(model, recurrent.forward, others=recurrent.others)
    for path, probe in experts.items():
        model.get_submodule(path).epilora_layer = probe
    device = next(model.parameters()).device
    token = torch.zeros((1, 1), dtype=torch.int64, device=device)
    lora.seen = set()
    try:
        model(input_ids=token, position_ids=token, use_cache=False)
    except (EpiloraError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise _unsupported(f"a trial token fails in its code with {type(error).__name__}: {error}") from error
    seen, lora.seen = lora.seen, None
    if attention.unknown:
        raise _unsupported(f"its attention has the options {', '.join(sorted(attention.unknown))}")
    _check_recurrent(model, recurrent)
    wanted = [(1, spec.num_experts_per_token, 1, spec.num_experts_per_token)]
    for path, probe in experts.items():
        if probe.calls != wanted:
            raise _unsupported(
                f"{path} was called with experts and weights of shapes {probe.calls}, expected once, with {wanted[0]}"
            )
    if not attention.shapes:
        raise _unsupported("no layer attends through transformers' attention interface")
    return ModelProbe(
        kv_shapes=dict(sorted(attention.shapes.items())),
        state_shapes=dict(sorted(recurrent.shapes.items())),
        dense_modules=tuple(module for module in spec.dense_modules if module.module in seen),
    )


def attach_attention(model: PreTrainedModel, forward: AttentionForward, scales: QueryScales) -> None:
    """Gives each attention module its LayerAttention.

    Args:
        forward: see LayerAttention.
        scales: of the model's queries.
    """
    config = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None) or []
    limits = {
        "sliding_attention": Visible(window=getattr(config, "sliding_window", None) or 0),
        "chunked_attention": Visible(chunk=getattr(config, "attention_chunk_size", None) or 0),
    }
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and (hasattr(module, "is_causal") or hasattr(module, "scaling")):
            kind = layer_types[layer] if layer < len(layer_types) else ""
            module.epilora_attention = LayerAttention(
                layer=layer, visible=limits.get(kind, Visible()), forward=scales.scaled(module, forward)
            )


def _check_states(model: PreTrainedModel) -> None:
    """Keys and values are carried from step to step, and the states of the layers that recurrent_modules finds."""
    recurrent = {found.path: found.layer for found in recurrent_modules(model)}
    layers = DynamicCache(config=model.config).layers
    names = getattr(model.config.get_text_config(), "layer_types", None) or [""] * len(layers)
    kinds = set()
    for number, (layer, name) in enumerate(zip(layers, names, strict=False)):
        has_state = number in recurrent.values() and type(layer) in _STATE_CACHES
        one_state = not has_state or getattr(layer, "number_of_states", 1) == 1
        # Layers that are nothing but an MLP are listed, too.
        if not (has_state and one_state) and type(layer) not in _ATTENTION_CACHES and name not in _WITHOUT_STATE:
            kinds.add(type(layer).__name__)
    convolutions = {
        type(module).__name__
        for path, module in model.named_modules()
        if isinstance(module, nn.Conv1d) and path.rpartition(".")[0] not in recurrent
    }
    if kinds or convolutions:
        what = ", ".join(sorted(kinds) or sorted(convolutions))
        raise _unsupported(
            f"some layers keep another state than keys and values, or one convolution and one recurrent state ({what}),"
            " which is not carried from step to step"
        )


def _check_recurrent(model: PreTrainedModel, probe: RecurrentProbe) -> None:
    expected = sorted(found.layer for found in recurrent_modules(model))
    if sorted(probe.shapes) != expected:
        raise _unsupported(f"the recurrent layers {sorted(probe.shapes)} ran, expected {expected}, each once")
    if unread := sorted(probe.unread):
        raise _unsupported(f"the recurrent layers {unread} do not go on from the state that they are given")
    if unknown := sorted(probe.unknown - _WITHOUT_EFFECT):
        raise _unsupported(f"its recurrent layers have the options {', '.join(unknown)}")


def _unsupported(why: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"this model cannot be served: {why}", reason="UNSUPPORTED_MODEL")
