"""Text in and out: the model's tokenizer, decoding token by token, stop strings."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from epilora.errors import FailedPreconditionError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_INCOMPLETE = "\ufffd"
NUM_CONTEXT_TOKENS = 6
"""Tokens of the prompt that the first output tokens are decoded with: how a token reads depends on those before."""


class Tokenizer:
    """The tokenizer of a checkpoint. Encoding runs in a thread of its own, decoding in the caller's."""

    def __init__(self, tokenizer: Any) -> None:
        self._encoder = tokenizer
        self.max_token_characters = max(map(len, tokenizer.get_vocab()), default=1)
        """Characters of the longest entry of the vocabulary: no token stands for more of a text."""
        # The library's object may not be used from two threads at once.
        self._decoder = copy.deepcopy(tokenizer)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")

    @classmethod
    async def load(cls, model: Path) -> Tokenizer | None:
        """Reads the tokenizer; None if the checkpoint has none.

        Raises:
            FailedPreconditionError: there are tokenizer files, but they cannot be read.
        """
        if not any((model / name).exists() for name in _TOKENIZER_FILES):
            return None
        return cls(await asyncio.to_thread(_read, model))

    async def encode(self, text: str) -> list[int]:
        """Token ids, with the tokenizer's special tokens."""
        loop = asyncio.get_running_loop()
        ids = await loop.run_in_executor(self._thread, lambda: self._encoder.encode(text))
        return [int(token) for token in ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        text = self._decoder.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)


def _read(model: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=True)
    except Exception as error:
        raise FailedPreconditionError(
            f"the tokenizer of {model} cannot be read: {error}; repair its files, or remove them "
            "to serve token ids only",
            reason="TOKENIZER_BROKEN",
            metadata={"model": model},
        ) from error


class TextStream:
    """Decodes tokens as they come. The pieces together are the text of all tokens.

    A character whose bytes are not all there yet decodes to U+FFFD at the end; such an end waits
    for the tokens that complete it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt[-NUM_CONTEXT_TOKENS:])
        self._num_context = len(self._window)
        self._num_sent = len(tokenizer.decode(self._window).rstrip(_INCOMPLETE))

    def push(self, token: int) -> str:
        """The text that one more token completes."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        whole = text.rstrip(_INCOMPLETE)
        piece = whole[self._num_sent :]
        self._num_sent = max(self._num_sent, len(whole))
        if whole == text and len(self._window) > 2 * NUM_CONTEXT_TOKENS + self._num_context:
            self._shorten(text)
        return piece

    def finish(self) -> str:
        """What was still incomplete."""
        text = self._tokenizer.decode(self._window)
        return text[self._num_sent :]

    def _shorten(self, whole: str) -> None:
        # Not where the first tokens left would begin inside a character, or read otherwise than they did.
        shorter = self._window[-NUM_CONTEXT_TOKENS:]
        text = self._tokenizer.decode(shorter)
        if text and not text.startswith(_INCOMPLETE) and whole.endswith(text):
            self._window, self._num_sent, self._num_context = shorter, len(text), 0


class StopStrings:
    """Holds text back while it may be the beginning of a stop string."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stops = tuple(stop_strings)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Text that may be sent, and whether a stop string was found; the text then ends before it."""
        text = self._held + piece
        found = [index for index in (text.find(stop) for stop in self._stops) if index >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def _num_held(self, text: str) -> int:
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0

    def finish(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held


class TextOutput:
    """Text of one generation: decoding and stop strings together."""

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int], stop_strings: Sequence[str]) -> None:
        self._stream = TextStream(tokenizer, prompt) if tokenizer is not None else None
        self._stops = StopStrings(stop_strings)

    def push(self, tokens: Sequence[int]) -> tuple[str, int | None]:
        """Text that may be sent, and how many of the tokens belong to the output if a stop string was found."""
        if self._stream is None:
            return "", None
        text = ""
        for index, token in enumerate(tokens):
            piece, stopped = self._stops.push(self._stream.push(token))
            text += piece
            if stopped:
                return text, index + 1
        return text, None

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        if self._stream is None:
            return ""
        text, stopped = self._stops.push(self._stream.finish())
        return text if stopped else text + self._stops.finish()
