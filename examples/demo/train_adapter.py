"""Trains the `sailor` adapter on the demo's checkpoint with the installed PEFT, in a few seconds on a CPU.

    python examples/demo/train_adapter.py --output /tmp/sailor

The experts are trained through `target_parameters` (one pair of matrices per fused parameter), attention through
`target_modules`.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from corpus import documents
from peft import LoraConfig, get_peft_model
from training import train
from transformers import AutoModelForCausalLM, AutoTokenizer

CHECKPOINT = Path(__file__).parent / "checkpoint"
STEPS = 100
SEED = 7


def load_base(checkpoint: Path) -> Any:
    """The base model in fp32, its experts computed one after another: the plainest path of transformers."""
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, experts_implementation="eager")


def train_sailor(checkpoint: Path, output: Path) -> float:
    """Trains from a fixed seed and saves the adapter. Returns the last loss."""
    # The matrices are tiny: more threads only wait for each other.
    torch.set_num_threads(1)
    random.seed(SEED)
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    config = LoraConfig(
        r=4,
        lora_alpha=16,
        target_modules=["q_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        rank_pattern={"o_proj": 8},
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(load_base(checkpoint), config)
    loss = train(
        model,
        tokenizer.encode,
        documents("sailor"),
        pad_id=tokenizer.eos_token_id,
        steps=STEPS,
        learning_rate=1e-2,
        batch_size=16,
    )
    model.save_pretrained(output)
    return loss


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    arguments = parser.parse_args()
    loss = train_sailor(arguments.checkpoint, arguments.output)
    print(f"saved to {arguments.output}, final loss {loss:.4f}")


if __name__ == "__main__":
    main()
