"""The header parser: exact on good files, clean errors on everything else."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from epilora.adapters.safetensors_header import parse_header
from epilora.errors import AdapterFormatError


def _parse(header: bytes, data_bytes: int) -> Any:
    parsed = parse_header(header, file_bytes=8 + len(header) + data_bytes, where="file")
    return dataclasses.replace(parsed, tensors=tuple(parsed.tensors))


def _entry(begin: int, end: int, shape: Any = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def test_a_file_that_safetensors_wrote() -> None:
    arrays = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.ones(5, np.float16),
        "c": np.zeros((0, 2), "f4"),
    }
    raw = save(arrays, metadata={"format": "pt"})
    length = int.from_bytes(raw[:8], "little")
    header = parse_header(raw[8 : 8 + length], file_bytes=len(raw), where="file")
    assert header.metadata == {"format": "pt"}
    assert [tensor.index for tensor in header.tensors] == [0, 1, 2]
    for tensor in header.tensors:
        array = arrays[tensor.name]
        assert tensor.shape == array.shape
        assert raw[tensor.offset : tensor.offset + tensor.size_bytes] == array.tobytes()


BAD: dict[str, tuple[Any, str]] = {
    "list": ([], "is list, not an object"),
    "number for an entry": ({"a": 3}, "not an entry"),
    "extra key": ({"a": {**_entry(0, 8), "x": 1}}, "not an entry"),
    "missing key": ({"a": {"dtype": "F32", "shape": [2]}}, "not an entry"),
    "negative size": ({"a": _entry(0, 8, [-2])}, "not an entry"),
    "boolean size": ({"a": _entry(0, 4, [True])}, "not an entry"),
    "float offset": ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8.0]}}, "not an entry"),
    "three offsets": ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}}, "do not match shape"),
    "reversed offsets": ({"a": _entry(8, 0, [2])}, "do not match shape"),
    "shape of another size": ({"a": _entry(0, 8, [3])}, "do not match shape"),
    "overflowing shape": ({"a": _entry(0, 8, [2**62, 2**62])}, "do not match shape"),
    "long name": ({"a" * 300: _entry(0, 12)}, "name of 300 characters"),
    "name that is no text": ({"\ud800": _entry(0, 12)}, "not Unicode text"),
    "hole": ({"a": _entry(0, 4), "b": _entry(8, 12)}, "leaves a hole"),
    "hole at the start": ({"a": _entry(4, 8)}, "leaves a hole"),
    "overlap": ({"a": _entry(0, 8), "b": _entry(4, 12)}, "overlaps the one before"),
    "same place": ({"a": _entry(0, 8), "b": _entry(0, 8)}, "overlaps the one before"),
    "past the end": ({"a": _entry(0, 16)}, "is truncated"),
    "before the end": ({"a": _entry(0, 4)}, "bytes after its last tensor"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, "__metadata__"),
    "quantised": ({"a": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}}, "F8_E4M3"),
    "unknown dtype": ({"a": {"dtype": [], "shape": [8], "data_offsets": [0, 8]}}, "has dtype"),
}


@pytest.mark.parametrize("separators", [None, (",", ":")], ids=["spaces", "as safetensors writes"])
@pytest.mark.parametrize("kind", BAD)
def test_bad_headers(kind: str, separators: tuple[str, str] | None) -> None:
    content, text = BAD[kind]
    with pytest.raises(AdapterFormatError, match=text):
        _parse(json.dumps(content, separators=separators).encode(), 12)


_SIZES = st.lists(st.integers(0, 3), max_size=3)
_TENSORS = st.dictionaries(st.text(max_size=4), st.tuples(st.sampled_from(["F32", "F16", "BF16"]), _SIZES), max_size=5)


@given(tensors=_TENSORS, metadata=st.none() | st.dictionaries(st.text(max_size=2), st.text(max_size=2), max_size=2))
@settings(max_examples=200, deadline=None)
def test_every_spelling_of_a_header_means_the_same(
    tensors: dict[str, tuple[str, list[int]]], metadata: dict[str, str] | None
) -> None:
    """Spelled as safetensors does, a header takes a shorter way through the parser."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * {"F32": 4, "F16": 2, "BF16": 2}[dtype]
        entries[name] = _entry(begin, end, shape, dtype)
    compact, spaced = (json.dumps(entries, separators=way).encode() for way in ((",", ":"), (" ,", ": ")))
    # As long as each other, so that the offsets in the file are equal.
    compact = compact.ljust(len(spaced))
    assert _parse(compact, end) == _parse(spaced, end)


def test_entries_in_any_order() -> None:
    entries = {"c": _entry(20, 24), "a": _entry(0, 12, [3, 1]), "e": _entry(12, 12, [0]), "b": _entry(12, 20)}
    compact, spaced = (json.dumps(entries, separators=way).encode() for way in ((",", ":"), (", ", ": ")))
    parsed = _parse(compact.ljust(len(spaced)), 24)
    assert parsed == _parse(spaced, 24)
    assert [tensor.name for tensor in parsed.tensors] == ["a", "e", "b", "c"]


@pytest.mark.parametrize(
    "offsets",
    [
        "[0,4,12],[12]",
        "[0],[4,4,12]",
        "[0,04],[4,12]",
        "[0,+4],[4,12]",
        "[0,4.0],[4,12]",
        "[0, 4],[4,12]",
        "[-0,4],[4,12]",
    ],
)
def test_numbers_that_the_short_way_must_not_take(offsets: str) -> None:
    """JSON allows some of them; either way the careful parser has the last word."""
    first, second = offsets.replace("],[", "]|[").split("|")
    entry = '"{}":{{"dtype":"F32","shape":[{}],"data_offsets":{}}}'
    header = "{" + entry.format("a", 1, first) + "," + entry.format("b", 2, second) + "}"
    try:
        expected = json.loads(header)
        is_good = all(type(number) is int for entry in expected.values() for number in entry["data_offsets"]) and [
            len(entry["data_offsets"]) for entry in expected.values()
        ] == [2, 2]
    except ValueError:
        is_good = False
    if is_good:
        assert [tensor.size_bytes for tensor in _parse(header.encode(), 12).tensors] == [4, 8]
    else:
        with pytest.raises(AdapterFormatError):
            _parse(header.encode(), 12)


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},"a":{"dtype":"F32","shape":[0],"data_offsets":[12,12]}}',
        b'{"__metadata__":{"x":"1","x":"2"},"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}',
        b'{"a":{"dtype":"F32","dtype":"F32","shape":[3],"data_offsets":[0,12]}}',
    ],
)
def test_keys_that_are_there_twice(header: bytes) -> None:
    with pytest.raises(AdapterFormatError, match="twice in its header"):
        _parse(header, 12)


def test_a_name_twice() -> None:
    entry = json.dumps(_entry(0, 8))
    with pytest.raises(AdapterFormatError, match="has 'a' twice"):
        _parse(f'{{"a": {entry}, "a": {entry}}}'.encode(), 8)


@pytest.mark.parametrize("header", [b"", b"\xff{}", b"[" * 200_000, b'{"a": 1e999}', b'{"\\ud800": {}}', b"{} x"])
def test_not_json(header: bytes) -> None:
    with pytest.raises(AdapterFormatError):
        _parse(header, 0)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["F32", "BF16"]),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=12,
)
entries = st.fixed_dictionaries({"dtype": st.sampled_from(["F32", "F16", "I8"]) | json_values}) | json_values


def _tensor_bytes(header: bytes, data_bytes: int) -> int | str:
    """Bytes of all tensors, or the reason of the refusal. Anything else than a clean error goes through."""
    try:
        parsed = _parse(header, data_bytes)
    except AdapterFormatError as error:
        return error.reason if len(error.message) < 1000 else error.message
    return sum(tensor.size_bytes for tensor in parsed.tensors)


REASONS = ("BAD_SAFETENSORS", "UNSUPPORTED_DTYPE")


@settings(max_examples=200, deadline=None)
@given(content=st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), entries, max_size=3) | json_values)
def test_any_json_gives_a_header_or_a_clean_error(content: Any) -> None:
    assert _tensor_bytes(json.dumps(content).encode(), 16) in (16, *REASONS)


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 200), value=st.integers(0, 255))
def test_any_changed_byte_gives_a_header_or_a_clean_error(position: int, value: int) -> None:
    raw = bytearray(save({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float16)}))
    length = int.from_bytes(raw[:8], "little")
    raw[8 + position % length] = value
    assert _tensor_bytes(bytes(raw[8 : 8 + length]), 32) in (32, *REASONS)
