"""Trains the `poet` adapter: one pair of matrices per expert and projection, which no current PEFT writes any more.

    python3.11 -m venv /tmp/per-expert
    /tmp/per-expert/bin/pip install torch==2.13.0 transformers==4.57.3 peft==0.17.1 accelerate safetensors
    /tmp/per-expert/bin/python examples/demo/train_per_expert.py --output examples/demo/per_expert_adapter

Transformers 4 keeps each expert as a module of its own, so PEFT adapts each like any linear layer; transformers 5
fused them. The router (`mlp.gate`) is adapted too, which only works there. The result is committed with PEFT's own
greedy tokens and logits for `prompts.PROMPTS` in `expected.safetensors`: `prompt_ids.<i>`, `token_ids.<i>` (int64) and
`logits.<i>` (float32 [P + N - 1, V]). Takes about a minute on one core.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from corpus import END, documents
from peft import LoraConfig, PeftModel, get_peft_model
from prompts import PROMPTS, answer_greedily
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from training import train
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

CHECKPOINT = Path(__file__).parent / "checkpoint"
STEPS = 120
SEED = 11


def load_base(checkpoint: Path) -> Qwen3MoeForCausalLM:
    """The checkpoint in transformers 4, which spells two settings otherwise and takes defaults without a word."""
    values = json.loads((checkpoint / "config.json").read_text())
    values["num_experts"] = values.pop("num_local_experts")
    values["rope_theta"] = values.pop("rope_parameters")["rope_theta"]
    values.pop("dtype")
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**values)).to(torch.float32)
    model.load_state_dict(load_file(checkpoint / "model.safetensors"), strict=True)
    return model.eval()


def main() -> None:
    """Trains, saves, loads what was saved and records its answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    arguments = parser.parse_args()
    random.seed(SEED)
    torch.manual_seed(SEED)
    tokenizer = Tokenizer.from_file(str(arguments.checkpoint / "tokenizer.json"))
    end_id = tokenizer.token_to_id(END)
    assert end_id is not None

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text).ids)

    config = LoraConfig(
        r=4,
        lora_alpha=12,
        target_modules=["q_proj", "o_proj", "gate", "gate_proj", "up_proj", "down_proj"],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(load_base(arguments.checkpoint), config)
    loss = train(model, encode, documents("poet"), pad_id=end_id, steps=STEPS, learning_rate=1e-2, batch_size=16)
    model.save_pretrained(arguments.output)
    print(f"saved to {arguments.output}, final loss {loss:.4f}")

    saved = PeftModel.from_pretrained(load_base(arguments.checkpoint), arguments.output).eval()
    expected = {}
    for index, prompt in enumerate(PROMPTS):
        answer = answer_greedily(saved, encode(prompt), end_id)
        expected[f"prompt_ids.{index}"] = torch.tensor(answer.prompt_ids)
        expected[f"token_ids.{index}"] = torch.tensor(answer.token_ids)
        expected[f"logits.{index}"] = answer.logits_TV
        print(repr(prompt), "->", repr(tokenizer.decode(answer.token_ids)))
    save_file(expected, arguments.output / "expected.safetensors")


if __name__ == "__main__":
    main()
