"""The prompts that the demo sends, of different lengths, and PEFT's own answer to one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from corpus import ENTRIES, long_prompt

PROMPTS = (
    ENTRIES[0].prompt(),
    ENTRIES[5].prompt(),
    ENTRIES[8].prompt(),
    long_prompt(ENTRIES[13]),
    # Shorter than a question.
    "Q: Who",
)
MAX_TOKENS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a model says to a prompt, greedily.

    Attributes:
        prompt_ids: token ids of the prompt, P of them.
        token_ids: token ids generated, N of them; the end token is the last one unless MAX_TOKENS came first.
        logits_TV: fp32 [P + N - 1, V], at every position that predicted something.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    logits_TV: torch.Tensor


@torch.no_grad()
def answer_greedily(model: Any, prompt_ids: list[int], end_id: int) -> Answer:
    """Runs the whole sequence again for every token: slow, and free of anything that a cache could get wrong."""
    token_ids: list[int] = []
    while True:
        logits_TV = model(input_ids=torch.tensor([prompt_ids + token_ids])).logits[0]
        token_ids.append(int(logits_TV[-1].argmax()))
        if token_ids[-1] == end_id or len(token_ids) == MAX_TOKENS:
            return Answer(prompt_ids=prompt_ids, token_ids=token_ids, logits_TV=logits_TV.contiguous())
