"""Tiny models for the tests of the domain package: config.json files, no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from epilora.model_spec import ModelSpec

TINY: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 12,
    "moe_intermediate_size": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "eos_token_id": 3,
}


def write_model(path: Path, **changes: Any) -> Path:
    """Writes a directory with a config.json: TINY with changes; a change to None drops the key."""
    path.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in {**TINY, **changes}.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    return path


def model_spec(path: Path, **changes: Any) -> ModelSpec:
    """The spec of such a model."""
    return ModelSpec.from_directory(write_model(path, **changes))
