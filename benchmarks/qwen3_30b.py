"""A Qwen3-30B-A3B with random weights and synthetic adapters: shapes of the real thing, made in place.

Only config.json is written: workers draw the weights themselves (EPILORA_LOAD_FORMAT=random). The adapters have the
two layouts that PEFT writes, r 16 on every expert and on attention, bf16, 1.66 GB and 1.27 GB.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

NUM_LAYERS, NUM_EXPERTS, HIDDEN, INTERMEDIATE = 48, 128, 2048, 768
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, VOCAB = 32, 4, 128, 151936
LORA_RANK = 16

_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": INTERMEDIATE,
    "norm_topk_prob": True,
    "num_attention_heads": NUM_HEADS,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 8,
    "num_hidden_layers": NUM_LAYERS,
    "num_key_value_heads": NUM_KV_HEADS,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}


def write_model(directory: Path, *, num_layers: int = NUM_LAYERS) -> None:
    """Writes config.json; fewer layers for a trial."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**_CONFIG, "num_hidden_layers": num_layers}, indent=2))


def write_adapter(directory: Path, layout: str, *, seed: int, num_layers: int = NUM_LAYERS) -> None:
    """Writes an adapter, "per_expert" or "target_parameters"; its deltas are about a tenth of a weight in size."""
    directory.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        # delta = alpha / r * B A = 2 * B A: sqrt(16) * 2 * 0.015^2 is 0.0018, a tenth of the weights' 0.02. With deltas
        # as large as weights all tokens would go to few experts.
        values = torch.randn(*shape, generator=generator, device=device) * 0.015
        return values.to(torch.bfloat16).cpu()

    tensors: dict[str, torch.Tensor] = {}
    for layer in range(num_layers):
        prefix = f"base_model.model.model.layers.{layer}"
        for name, fan_in, fan_out in (
            ("self_attn.q_proj", HIDDEN, NUM_HEADS * HEAD_DIM),
            ("self_attn.o_proj", NUM_HEADS * HEAD_DIM, HIDDEN),
        ):
            tensors[f"{prefix}.{name}.lora_A.weight"] = draw(LORA_RANK, fan_in)
            tensors[f"{prefix}.{name}.lora_B.weight"] = draw(fan_out, LORA_RANK)
        experts = f"{prefix}.mlp.experts"
        if layout == "per_expert":
            _per_expert(tensors, experts, draw)
        else:
            rows = NUM_EXPERTS * LORA_RANK
            tensors[f"{experts}.base_layer.lora_A.weight"] = draw(rows, HIDDEN)
            tensors[f"{experts}.base_layer.lora_B.weight"] = draw(2 * INTERMEDIATE, rows)
            tensors[f"{experts}.lora_A.weight"] = draw(rows, INTERMEDIATE)
            tensors[f"{experts}.lora_B.weight"] = draw(HIDDEN, rows)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config: dict[str, object] = {"peft_type": "LORA", "r": LORA_RANK, "lora_alpha": 2 * LORA_RANK, "bias": "none"}
    if layout == "per_expert":
        config["target_modules"] = ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    else:
        config["target_modules"] = ["q_proj", "o_proj"]
        config["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        config["peft_version"] = "0.21.2"
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2))


def _per_expert(tensors: dict[str, torch.Tensor], experts: str, draw) -> None:  # type: ignore[no-untyped-def]
    """One draw a projection, cut into experts: 36,864 draws of their own would take minutes."""
    for name, fan_in, fan_out in (
        ("gate_proj", HIDDEN, INTERMEDIATE),
        ("up_proj", HIDDEN, INTERMEDIATE),
        ("down_proj", INTERMEDIATE, HIDDEN),
    ):
        a_ERI, b_EOR = draw(NUM_EXPERTS, LORA_RANK, fan_in), draw(NUM_EXPERTS, fan_out, LORA_RANK)
        for expert in range(NUM_EXPERTS):
            tensors[f"{experts}.{expert}.{name}.lora_A.weight"] = a_ERI[expert]
            tensors[f"{experts}.{expert}.{name}.lora_B.weight"] = b_EOR[expert]
