"""Checks one GenerateRequest and makes the worker's request of it."""

from __future__ import annotations

import math
import secrets
import uuid
from dataclasses import dataclass

import numpy as np

from epilora.errors import EpiloraError, FailedPreconditionError, InvalidArgumentError
from epilora.v1 import generation_service_pb2, worker_service_pb2
from gateway.text import Tokenizer

DEFAULT_MAX_TOKENS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 256
MAX_STOP_TOKENS = 64
MIN_TEMPERATURE = float(np.float32(1e-5))
"""Smallest temperature but 0; logits divided by less may overflow. Rounded as the message rounds it."""
MAX_TEMPERATURE = 100.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLimits:
    """What a request must fit."""

    vocab_size: int
    max_sequence_length: int
    """Prompt and output together, tokens."""
    eos_token_ids: tuple[int, ...]


def _bad(field: str, expected: str, got: object, *, reason: str = "BAD_OPTION") -> InvalidArgumentError:
    return InvalidArgumentError(f"{field} is {got}, expected {expected}", reason=reason, field=field)


def check_options(request: generation_service_pb2.GenerateRequest, limits: ModelLimits, *, has_tokenizer: bool) -> None:
    """InvalidArgumentError with the field at fault, or FailedPreconditionError where a tokenizer is missing."""
    sampling, stop = request.sampling, request.stop
    if sampling.temperature != 0 and not MIN_TEMPERATURE <= sampling.temperature <= MAX_TEMPERATURE:
        expected = f"0 for greedy, or at least 1e-5 and at most {MAX_TEMPERATURE:g}"
        raise _bad("sampling.temperature", expected, sampling.temperature)
    if not (math.isfinite(sampling.top_p) and 0 <= sampling.top_p <= 1):
        raise _bad("sampling.top_p", "more than 0 and at most 1, or 0 for all tokens", sampling.top_p)
    if sampling.top_k < 0:
        raise _bad("sampling.top_k", "0 or more", sampling.top_k)
    if stop.max_tokens < 0:
        raise _bad("stop.max_tokens", "0 or more", stop.max_tokens)
    if len(stop.stop_token_ids) > MAX_STOP_TOKENS:
        raise _bad("stop.stop_token_ids", f"at most {MAX_STOP_TOKENS} tokens", f"{len(stop.stop_token_ids)} tokens")
    _check_tokens(list(stop.stop_token_ids), limits, field="stop.stop_token_ids")
    if len(stop.stop_strings) > MAX_STOP_STRINGS:
        raise _bad("stop.stop_strings", f"at most {MAX_STOP_STRINGS} strings", f"{len(stop.stop_strings)} strings")
    for index, text in enumerate(stop.stop_strings):
        if not 1 <= len(text) <= MAX_STOP_STRING_CHARACTERS:
            expected = f"1 to {MAX_STOP_STRING_CHARACTERS} characters"
            raise _bad(f"stop.stop_strings[{index}]", expected, f"{len(text)} characters")
    if stop.stop_strings and not has_tokenizer:
        raise _no_tokenizer("stop.stop_strings", "stop.stop_token_ids")


def _no_tokenizer(field: str, instead: str) -> EpiloraError:
    message = f"{field} needs a tokenizer, and the model that is served has none; use {instead}"
    return FailedPreconditionError(message, reason="NO_TOKENIZER", field=field)


def _check_tokens(tokens: list[int], limits: ModelLimits, *, field: str) -> None:
    ids = np.asarray(tokens, dtype=np.int64)
    wrong = np.flatnonzero((ids < 0) | (ids >= limits.vocab_size))
    if wrong.size:
        index = int(wrong[0])
        raise _bad(f"{field}[{index}]", f"0 to {limits.vocab_size - 1}", int(ids[index]), reason="BAD_TOKEN_ID")


def _check_text(text: str, limits: ModelLimits, tokenizer: Tokenizer) -> None:
    # All requests share one thread that encodes: what cannot fit must not keep it busy.
    most = limits.max_sequence_length * tokenizer.max_token_characters
    if len(text) > most:
        raise InvalidArgumentError(
            f"text has {len(text)} characters, expected at most {most}: the model's context is "
            f"{limits.max_sequence_length} tokens, of at most {tokenizer.max_token_characters} characters each",
            reason="PROMPT_TOO_LONG",
            field="text",
            metadata={
                "num_characters": len(text),
                "max_characters": most,
                "max_sequence_length": limits.max_sequence_length,
            },
        )


async def encode_prompt(
    request: generation_service_pb2.GenerateRequest, limits: ModelLimits, tokenizer: Tokenizer | None
) -> list[int]:
    """The prompt's token ids; at least one, and with room for at least one more."""
    field = request.WhichOneof("prompt")
    if field is None:
        raise _bad("prompt", "text or token_ids", "unset", reason="NO_PROMPT")
    if field == "text":
        if tokenizer is None:
            raise _no_tokenizer("text", "token_ids")
        _check_text(request.text, limits, tokenizer)
        tokens = await tokenizer.encode(request.text)
    else:
        field = "token_ids.ids"
        tokens = list(request.token_ids.ids)
        _check_tokens(tokens, limits, field=field)
    if not tokens:
        raise _bad(field, "at least one token", "empty", reason="EMPTY_PROMPT")
    if len(tokens) >= limits.max_sequence_length:
        raise InvalidArgumentError(
            f"{field} has {len(tokens)} tokens, expected at most {limits.max_sequence_length - 1}: the model's context "
            f"is {limits.max_sequence_length} tokens, prompt and output together",
            reason="PROMPT_TOO_LONG",
            field=field,
            metadata={"num_tokens": len(tokens), "max_sequence_length": limits.max_sequence_length},
        )
    return tokens


def worker_request(
    request: generation_service_pb2.GenerateRequest, prompt: list[int], limits: ModelLimits
) -> worker_service_pb2.GenerateTokensRequest:
    """The worker's request, without its adapter: the seed drawn if unset, max_tokens limited by the context."""
    stop = request.stop
    stop_tokens = set(stop.stop_token_ids) | (set() if stop.ignore_eos else set(limits.eos_token_ids))
    result = worker_service_pb2.GenerateTokensRequest(
        request_id=uuid.uuid4().hex,
        token_ids=prompt,
        sampling=request.sampling,
        max_tokens=min(stop.max_tokens or DEFAULT_MAX_TOKENS, limits.max_sequence_length - len(prompt)),
        stop_token_ids=sorted(stop_tokens),
        return_logits=request.return_logits,
        return_prompt_logits=request.return_prompt_logits,
    )
    if not request.sampling.HasField("seed"):
        result.sampling.seed = secrets.randbits(63)
    return result
