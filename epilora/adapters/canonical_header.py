"""Headers spelled as safetensors itself spells them, looked at all at once.

A per-expert adapter has tens of thousands of tensors, and to parse and check them one by one takes longer than to copy
a rank's share of them. Here the quotes say where everything has to be, and all entries are compared with that together.
Whatever is not exactly as expected is left to the parser that looks at each entry and can say what is wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np

from epilora.adapters.tensor_entry import FLOAT_BYTES, MAX_NAME_LENGTH
from epilora.adapters.tensor_table import TensorKind, TensorTable
from epilora.adapters.text_words import Positions, TextWords, all_differ, digits

# No spaces, no escapes, one key of metadata at most (two could be the same).
_NUMBER = r"(?:0|[1-9][0-9]{0,17})"
_STRING = re.compile(r'"([^"\\\x00-\x1f]*)":"([^"\\\x00-\x1f]*)"')
_START = re.compile(rf'\{{(?:"__metadata__":\{{(?P<metadata>(?:{_STRING.pattern})?)\}},)?')
_KIND = re.compile(rf'({"|".join(FLOAT_BYTES)})","shape":\[((?:{_NUMBER}(?:,{_NUMBER}){{0,7}})?)')
_PRINTABLE = bytes(character for character in range(0x20, 0x7F) if character != ord("\\"))
# `"name":{"dtype":"F32","shape":[3,8],"data_offsets":[0,96]},"next":` and so on. The ten quotes of an entry:
_QUOTES = 10
_NAME_OPENS, _NAME_CLOSES, _DTYPE_OPENS, _DTYPE_CLOSES, _OFFSETS_OPEN = 0, 1, 4, 5, 8
_AFTER_NAME, _AFTER_DTYPE, _BEFORE_OFFSETS = b'":{"dtype":"', b'","shape":[', b'],"data_offsets":['
_AFTER_OFFSETS, _END = b']},"', b"]}}"
_MAX_KINDS, _MAX_KIND_LENGTH = 256, 256
_MAX_BYTES = 1 << 50
"""Of a tensor: sums of sizes must fit 64 bits."""


def parse_canonical(header: bytes, file_bytes: int) -> tuple[TensorTable, Mapping[str, str]] | None:
    """The tensors and the metadata of a header in which nothing is unusual or wrong; None of any other."""
    if header.translate(None, _PRINTABLE):
        return None
    text = header.decode("ascii")
    start = _START.match(text)
    stop = header.rfind(_END) + len(_END)
    if start is None or header[stop:].strip(b" "):
        return None
    tensors = _tensors(TextWords(header), text, range(start.end(), stop), file_bytes)
    return None if tensors is None else (tensors, dict(_STRING.findall(start["metadata"] or "")))


def _tensors(words: TextWords, text: str, body: range, file_bytes: int) -> TensorTable | None:
    """The tensors of a header whose entries begin and end where `body` does."""
    quotes = np.flatnonzero(words.bytes[body.start : body.stop] == ord('"')) + body.start
    if not len(quotes) or len(quotes) % _QUOTES or quotes[0] != body.start:
        return None
    places = np.ascontiguousarray(quotes.reshape(-1, _QUOTES).T)
    kinds_found = _kinds(words, text, places) if _has_structure(words, places) else None
    if kinds_found is None:
        return None
    codes, kinds = kinds_found
    # Each begins where the one before ends, and the sizes are those of the shapes.
    bounds = np.concatenate(([0], np.cumsum(np.array([kind.size_bytes for kind in kinds])[codes])))
    data_start = 8 + len(text)
    begins, ends = places[_NAME_OPENS] + 1, places[_NAME_CLOSES]
    names = words.columns(begins, ends)
    is_right = (
        data_start + bounds[-1] == file_bytes
        and _has_offsets(words, places, bounds, body.stop)
        and all_differ(names)
        and '"__metadata__":{"dtype"' not in text
    )
    if not is_right:
        return None
    return TensorTable(
        words=words,
        text=text,
        name_begins=begins,
        name_ends=ends,
        name_columns=names,
        kinds=kinds,
        codes=codes,
        offsets=data_start + bounds[:-1],
    )


def _kinds(words: TextWords, text: str, places: Positions) -> tuple[Positions, list[TensorKind]] | None:
    """Which kind each tensor is, and the kinds; None if one of them is not spelled as expected."""
    begins, ends = places[_DTYPE_OPENS] + 1, places[_OFFSETS_OPEN] - 2
    found = words.kinds(begins, ends, max_kinds=_MAX_KINDS) if (ends - begins).max() <= _MAX_KIND_LENGTH else None
    if found is None:
        return None
    codes, firsts = found
    kinds = [kind for row in firsts if (kind := _kind(text[begins[row] : ends[row]])) is not None]
    return (codes, kinds) if len(kinds) == len(firsts) else None


def _has_structure(words: TextWords, places: Positions) -> bool:
    """True if what stands between names, kinds and offsets is what has to. The quotes in it are all that there are."""
    lengths = places[_NAME_CLOSES] - places[_NAME_OPENS] - 1
    return bool(
        lengths.min() >= 1
        and lengths.max() <= MAX_NAME_LENGTH
        and words.reads(places[_NAME_CLOSES], _AFTER_NAME).all()
        and words.reads(places[_DTYPE_CLOSES], _AFTER_DTYPE).all()
        and words.reads(places[_OFFSETS_OPEN] - 2, _BEFORE_OFFSETS).all()
        and words.reads(places[_NAME_OPENS, 1:] - len(_AFTER_OFFSETS) + 1, _AFTER_OFFSETS).all()
    )


def _has_offsets(words: TextWords, places: Positions, bounds: Positions, stop: int) -> bool:
    """True if the offsets of each entry are two neighbours of `bounds`."""
    counts = digits(bounds)
    commas = places[_OFFSETS_OPEN] - 2 + len(_BEFORE_OFFSETS) + counts[:-1]
    ends = commas + 1 + counts[1:]
    expected = np.append(places[_NAME_OPENS, 1:] - len(_AFTER_OFFSETS) + 1, stop - len(_END))
    return bool(
        np.array_equal(ends, expected)
        and (words.bytes[commas] == ord(",")).all()
        and words.spells(commas, bounds[:-1]).all()
        and words.spells(ends, bounds[1:]).all()
    )


def _kind(text: str) -> TensorKind | None:
    match = _KIND.fullmatch(text)
    if match is None:
        return None
    shape = tuple(map(int, match[2].split(","))) if match[2] else ()
    size = math.prod(shape) * FLOAT_BYTES[match[1]]
    return TensorKind(dtype=match[1], shape=shape, size_bytes=size) if size <= _MAX_BYTES else None
