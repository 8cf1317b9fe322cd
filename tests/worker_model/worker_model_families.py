"""Tiny configs of every model family that transformers' experts interface serves, by model_type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "intermediate_size": 24,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "moe_intermediate_size": 20,
    "intermediate_size": 40,
    "first_k_dense_replace": 1,
    "n_group": 3,
    "topk_group": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "routed_scaling_factor": 1.5,
}

_GATED_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}

CONFIGS: Mapping[str, dict[str, Any]] = {
    "gpt_oss": {
        "num_local_experts": 5,
        "head_dim": 8,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v2": {**_DEEPSEEK, "topk_method": "group_limited_greedy", "q_lora_rank": None},
    "glm4_moe": {
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "moe_intermediate_size": 20,
        "intermediate_size": 40,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "head_dim": 8,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "minimax_m2": {"num_local_experts": 5, "head_dim": 8, "rotary_dim": 4},
    "llama4_text": {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "intermediate_size_mlp": 40,
        "head_dim": 8,
        "interleave_moe_layer_step": 2,
        "num_hidden_layers": 4,
        "attention_chunk_size": 6,
        "no_rope_layers": [1, 1, 1, 0],
        "floor_scale": 4,
        "attn_scale": 0.5,
    },
    "gemma4_text": {
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 20,
        "enable_moe_block": True,
        "head_dim": 8,
        "global_head_dim": 12,
        "num_global_key_value_heads": 1,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 5,
        "moe_k": 2,
        "moe_intermediate_size": 20,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 1,
        "head_dim": 8,
    },
    "granitemoe": {
        "num_local_experts": 5,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.7,
    },
    "phimoe": {"num_local_experts": 5, "sliding_window": None},
    "qwen3_next": {
        "num_experts": 5,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 16,
        "head_dim": 8,
        **_GATED_DELTA,
    },
    "qwen3_5_moe_text": {
        "num_experts": 5,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 16,
        "head_dim": 8,
        **_GATED_DELTA,
    },
    "nemotron_h": {
        "n_routed_experts": 6,
        "moe_intermediate_size": 20,
        "moe_shared_expert_intermediate_size": 16,
        "n_group": 2,
        "topk_group": 1,
        "head_dim": 8,
        "layers_block_type": ["mamba", "moe", "attention", "moe", "mamba"],
        "moe_latent_size": 16,
        "ssm_state_size": 4,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "chunk_size": 4,
        # transformers' code heeds it in prompts only, so that a prompt's logits would depend on its chunks.
        "time_step_min": 1e-9,
    },
    "jamba": {
        "num_experts": 4,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_state": 4,
        "mamba_dt_rank": 3,
    },
    "granitemoehybrid": {
        "num_local_experts": 5,
        "shared_intermediate_size": 16,
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_d_state": 4,
        "mamba_chunk_size": 4,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.7,
    },
    "lfm2_moe": {
        "num_experts": 5,
        "moe_intermediate_size": 20,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "kimi_linear": {
        **_DEEPSEEK,
        "num_local_experts": 6,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "linear_head_dim": 8,
        "linear_num_heads": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "glm4_moe_lite": {**_DEEPSEEK, "rope_interleave": True},
    "dots1": {
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "moe_intermediate_size": 20,
        "intermediate_size": 40,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "head_dim": 8,
    },
}
"""Options of a config beyond the common ones."""

_OF_ANOTHERS_KIND = ("dots1", "granitemoehybrid", "kimi_linear", "lfm2_moe", "qwen3_5_moe_text")
"""Families that differ little from another one: most of their tests are long-running ones."""


def parameters(names: Iterable[str]) -> list[Any]:
    """Families as parameters of a test."""
    return [pytest.param(name, marks=pytest.mark.soak) if name in _OF_ANOTHERS_KIND else name for name in names]


RECURRENT = ("qwen3_next", "qwen3_5_moe_text", "nemotron_h", "jamba", "granitemoehybrid", "lfm2_moe", "kimi_linear")
"""Families some of whose layers keep a recurrent state."""


def family_config(model_type: str, options: Mapping[str, Any]) -> Any:
    """A tiny config."""
    return AutoConfig.for_model(model_type, **{**_COMMON, **options})


_TEXT: dict[str, Any] = {**_COMMON, "num_hidden_layers": 2, "head_dim": 8}
_QWEN_VISION: dict[str, Any] = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}

MULTIMODAL: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama4": (
        {**_TEXT, **CONFIGS["llama4_text"], "num_experts_per_tok": 1},
        {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16},
    ),
    "qwen3_vl_moe": (
        {
            **_TEXT,
            "num_experts": 5,
            "moe_intermediate_size": 20,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
        },
        {**_QWEN_VISION, "out_hidden_size": 32, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "qwen3_5_moe": (
        {**_TEXT, **CONFIGS["qwen3_5_moe_text"], "num_hidden_layers": 3},
        {**_QWEN_VISION, "out_hidden_size": 32, "num_position_embeddings": 16},
    ),
}
"""(options of the text config, of the vision config) of multimodal families, by model_type."""


def write_multimodal(model_type: str, directory: Path) -> PreTrainedModel:
    """A tiny multimodal checkpoint with random weights, and the model that it holds."""
    text, vision = MULTIMODAL[model_type]
    torch.manual_seed(1)
    config = AutoConfig.for_model(model_type, text_config=text, vision_config=vision, tie_word_embeddings=False)
    whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    whole.save_pretrained(directory)
    return whole
