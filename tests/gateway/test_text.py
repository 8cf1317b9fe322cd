"""Text token by token: the pieces together are the text of all tokens, and stop strings never leak."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from epilora.errors import FailedPreconditionError
from gateway.text import StopStrings, TextOutput, TextStream, Tokenizer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and some of several, so that every character of more than one byte is split."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = RustTokenizer(models.BPE(vocab={**vocabulary, "Ġt": 256, "he": 257}, merges=[("Ġ", "t"), ("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


TOKENIZER = Tokenizer(byte_tokenizer())


def stream(tokens: list[int], prompt: list[int]) -> list[str]:
    text = TextStream(TOKENIZER, prompt)
    return [*(text.push(token) for token in tokens), text.finish()]


@pytest.mark.parametrize("text", ["", "plain", "Grüße, 世界! 🙂🙃", "e\u0301", "a\ufffdb", "👩‍👩‍👧 the the"])
async def test_pieces_are_whole_characters(text: str) -> None:
    tokens = await TOKENIZER.encode(text)
    pieces = stream(tokens, [])
    assert "".join(pieces) == text
    for piece in pieces:
        assert "\ufffd" not in piece or "\ufffd" in text


def test_character_that_never_ends_is_replaced_at_the_end() -> None:
    smile = TOKENIZER._encoder.encode("🙂")
    assert stream(smile[:3], []) == ["", "", "", "\ufffd"]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 257), max_size=60), st.lists(st.integers(0, 127), max_size=8))
def test_any_bytes_give_the_text_of_all_tokens(tokens: list[int], prompt: list[int]) -> None:
    whole, before = TOKENIZER.decode(prompt + tokens), TOKENIZER.decode(prompt)
    if not before.endswith("\ufffd"):
        assert "".join(stream(tokens, prompt)) == whole[len(before) :]


def test_character_begun_by_the_prompt_is_completed() -> None:
    smile = TOKENIZER._encoder.encode("🙂")
    assert stream(smile[2:], smile[:2]) == ["", "🙂", ""]


def test_window_stays_short() -> None:
    text = TextStream(TOKENIZER, [])
    for token in TOKENIZER._encoder.encode("some text " * 200):
        text.push(token)
    assert len(text._window) < 20


@pytest.mark.parametrize(
    "pieces, stops, expected, stopped",
    [
        (["hello"], ["ll"], "he", True),
        (["he", "l", "l", "o"], ["ll"], "he", True),
        (["a", "ab", "abc"], ["abcabd"], "aababc", False),
        (["aa", "ab"], ["aab"], "a", True),
        (["xy", "z"], ["z", "yz"], "x", True),
        (["one", "two"], [], "onetwo", False),
        (["ends with sto"], ["stop"], "ends with sto", False),
    ],
)
def test_stop_strings(pieces: list[str], stops: list[str], expected: str, stopped: bool) -> None:
    matcher, sent, found = StopStrings(stops), "", False
    for piece in pieces:
        text, found = matcher.push(piece)
        sent += text
        if found:
            break
    assert (sent + matcher.finish(), found) == (expected, stopped)


@settings(max_examples=200, deadline=None)
@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.integers(0, 99))
def test_stop_strings_however_the_text_is_cut(text: str, stops: list[str], seed: int) -> None:
    cuts = random.Random(seed)
    matcher, sent, position, found = StopStrings(stops), "", 0, False
    while position < len(text) and not found:
        step = cuts.randint(1, 4)
        piece, found = matcher.push(text[position : position + step])
        sent, position = sent + piece, position + step
    sent += "" if found else matcher.finish()
    if not any(stop in text for stop in stops):
        assert sent == text
    else:
        assert found
        assert text.startswith(sent)
        assert not any(stop in sent for stop in stops)
        assert any(text.startswith(stop, len(sent)) for stop in stops)


def test_stop_string_counts_the_tokens_that_made_it() -> None:
    output = TextOutput(TOKENIZER, [], [" the"])
    tokens = TOKENIZER._encoder.encode("see the end")
    text, used = output.push(tokens)
    assert text == "see"
    assert used is not None
    assert TOKENIZER.decode(tokens[:used]) == "see the"


async def test_no_tokenizer_and_a_broken_one(tmp_path: Path) -> None:
    assert await Tokenizer.load(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(FailedPreconditionError) as caught:
        await Tokenizer.load(tmp_path)
    assert caught.value.reason == "TOKENIZER_BROKEN"
