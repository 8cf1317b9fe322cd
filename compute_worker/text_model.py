"""The text part of multimodal families for which transformers has no causal language model of its own (Qwen3-VL-MoE).

Its text model and a head, under the paths that language models have: model.layers, model.embed_tokens, lm_head.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming, WeightTransform
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
)


class TextOfMultimodal(PreTrainedModel):  # type: ignore[misc]
    """A text model and its head; the config is that of the text model."""

    config_class = PreTrainedConfig
    base_model_prefix = "model"
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    _supports_attention_backend = True
    multimodal_type: str = ""
    """model_type of the multimodal family."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.model = AutoModel.from_config(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logits_to_keep: torch.Tensor | None = None,
        **others: Any,
    ) -> CausalLMOutput:
        """As transformers' language models; `logits_to_keep` int64 [n], tokens whose logits are wanted, None: all."""
        hidden = self.model(input_ids=input_ids, position_ids=position_ids, **others).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(hidden if logits_to_keep is None else hidden[:, logits_to_keep]))


def is_multimodal_without_language_model(config: PreTrainedConfig) -> bool:
    """True if only the text part of a model of this config can be run as a language model, by TextOfMultimodal."""
    text = config.get_text_config()
    return (
        text is not config
        and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
        and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        and type(text) in MODEL_MAPPING
    )


def text_model(config: PreTrainedConfig, **options: Any) -> TextOfMultimodal:
    """The text part of a multimodal model's config.

    Args:
        options: as of AutoModelForCausalLM.from_config.
    """
    text = config.get_text_config()
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", False)
    model: TextOfMultimodal = TextOfMultimodal._from_config(text, **options)
    model.multimodal_type = config.model_type
    return model


def text_transforms(model: TextOfMultimodal) -> list[WeightTransform]:
    """transformers' conversions of the multimodal family's checkpoints, then its paths become the text model's."""
    whole = get_checkpoint_conversion_mapping(model.multimodal_type) or []
    return [*whole, WeightRenaming(source_patterns=r"^model\.language_model\.", target_patterns="model.")]
