"""Writes the demo's base model: a small Qwen3-MoE, trained on `corpus.py` until it answers in the plain voice.

    python examples/demo/make_checkpoint.py --output examples/demo/checkpoint

The result is committed, so that every machine serves the same weights; run this only to change them. Ten experts,
because neither 3 nor 4 ranks divide ten. Takes about a minute. Written with transformers 5.17.0 and torch 2.13.0.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from corpus import END, VOICES, documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from training import train
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCABULARY = 512
STEPS = 500
MAX_POSITIONS = 512


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on the corpus; it encodes any text and adds no special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text.removesuffix(END) for voice in VOICES for text in documents(voice)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, model_max_length=MAX_POSITIONS)


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeForCausalLM:
    """The model with random weights."""
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=10,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        # 0.02 suits wide models; at width 64 it would make routing a coin toss for the first steps.
        initializer_range=0.08,
        dtype=torch.float32,
    )
    config._experts_implementation = "eager"
    return Qwen3MoeForCausalLM(config)


def main() -> None:
    """Trains and saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    torch.manual_seed(20)
    random.seed(20)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    loss = train(
        model,
        tokenizer.encode,
        documents("plain"),
        pad_id=tokenizer.eos_token_id,
        steps=STEPS,
        learning_rate=3e-3,
        batch_size=8,
    )
    print(f"{sum(p.numel() for p in model.parameters())} parameters, final loss {loss:.4f}")
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    main()
