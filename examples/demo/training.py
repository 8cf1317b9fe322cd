"""One small training loop, used for the base model and for both adapters."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

IGNORED = -100
"""Label of the positions that add nothing to the loss."""


def make_batch(rows: list[list[int]], pad_id: int) -> dict[str, torch.Tensor]:
    """Rows padded on the right to one length: ids, attention mask and labels, each int64 [B, T]."""
    longest = max(map(len, rows))
    return {
        "input_ids": torch.tensor([row + [pad_id] * (longest - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows]),
        "labels": torch.tensor([row + [IGNORED] * (longest - len(row)) for row in rows]),
    }


def train(
    model: Any,
    encode: Callable[[str], list[int]],
    texts: list[str],
    *,
    pad_id: int,
    steps: int,
    learning_rate: float,
    batch_size: int,
) -> float:
    """Trains what requires a gradient on whole texts, with AdamW and a linear decay. Returns the last loss.

    Args:
        model: a causal language model of transformers, or PEFT's wrapper of one.
        encode: text -> token ids.
        texts: one document each; drawn at random with the `random` module's state.
        pad_id: any valid id, for padding.
        steps: batches.
        learning_rate: at the first step.
        batch_size: documents a step.
    """
    rows = [encode(text) for text in texts]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.05, total_iters=steps)
    model.train()
    loss = float("nan")
    for _ in range(steps):
        output = model(**make_batch(random.sample(rows, k=min(batch_size, len(rows))), pad_id))
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        loss = float(output.loss.detach())
    model.eval()
    return loss
