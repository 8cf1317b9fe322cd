"""What tests of generate steps share: a tiny model, prompts for it, and sequences of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from compute_worker.requests import GenerateRequest, OutputQueue, Sequence

MODEL = Path(__file__).resolve().parents[1] / "fixtures" / "models" / "qwen3moe-T"
PROMPTS = ([5, 17, 40, 3, 9, 22, 60, 1, 33], [9, 3], [21, 8, 8, 2])
NUM_TOKENS = 5


def new_sequence(prompt: Iterable[int], *, stop: int = -1, limit: int = 100, **fields: Any) -> Sequence:
    """A request for NUM_TOKENS, or as `fields` says, that ends at the token `stop`; in a running event loop.

    Args:
        limit: messages that its queue of outputs takes.
        fields: of GenerateRequest.
    """
    values = {"max_tokens": NUM_TOKENS, **fields}
    request = GenerateRequest(request_id="r", token_ids=tuple(prompt), stop_token_ids=frozenset({stop}), **values)
    return Sequence(request=request, outputs=OutputQueue(asyncio.get_running_loop(), limit))
