"""Comparing many places of one text at once: eight bytes at a time, at any positions.

A header has tens of thousands of entries that differ in little. To cut a string out for each and compare it takes many
times as long as to look at the same eight bytes of all of them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

Positions = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]

_WORD = 8
_MAX_BYTES = 512
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MASKS = np.array([(1 << 8 * count) - 1 for count in range(_WORD + 1)], dtype=np.uint64)
"""By number of bytes that count."""
_POWERS = np.array([10**exponent for exponent in range(19)], dtype=np.int64)


class TextWords:
    """A text of bytes."""

    def __init__(self, text: bytes) -> None:
        self.bytes = np.frombuffer(text, dtype=np.uint8)
        self._padded = np.frombuffer(text + bytes(_MAX_BYTES), dtype=np.uint8)

    def rows(self, positions: Positions, num_bytes: int) -> Words:
        """The bytes that begin at each position as [len(positions), words], eight a word and the first one lowest.

        The last word is full, whatever num_bytes is; zeros are behind the end of the text.
        """
        width = -(-num_bytes // _WORD) * _WORD
        assert width <= _MAX_BYTES, num_bytes
        windows = as_strided(self._padded, (len(self.bytes) + 1, width), (1, 1), writeable=False)
        return windows[positions].view(np.dtype("<u8"))

    def reads(self, positions: Positions, expected: bytes) -> Mask:
        """Where the text has some bytes."""
        found = self.rows(positions, len(expected))
        result = np.ones(len(positions), dtype=np.bool_)
        for place in range(found.shape[1]):
            part = expected[_WORD * place : _WORD * (place + 1)]
            result &= (found[:, place] & _MASKS[len(part)]) == np.uint64(int.from_bytes(part, "little"))
        return result

    def columns(self, begins: Positions, ends: Positions) -> Words:
        """The texts between `begins` and `ends`, 512 bytes at most, as [words, len(begins)] with zeros behind each."""
        sizes = ends - begins
        columns = np.ascontiguousarray(self.rows(begins, int(sizes.max(initial=0))).T)
        shortest = int(sizes.min()) if len(sizes) else 0
        for place in range(shortest // _WORD, len(columns)):
            columns[place] &= _MASKS[np.clip(sizes - _WORD * place, 0, _WORD)]
        return columns

    def kinds(self, begins: Positions, ends: Positions, *, max_kinds: int) -> tuple[Positions, list[int]] | None:
        """Which of the texts between `begins` and `ends` are the same.

        Returns:
            The kind of each, and where the first of each kind is among them; None if there are more than `max_kinds`.
        """
        columns = self.columns(begins, ends)
        codes = np.full(len(begins), -1, dtype=np.int64)
        firsts: list[int] = []
        left = np.arange(len(begins))
        while len(left):
            if len(firsts) == max_kinds:
                return None
            is_alike = np.ones(len(left), dtype=np.bool_)
            for column in columns:
                is_alike &= column[left] == column[left[0]]
            codes[left[is_alike]] = len(firsts)
            firsts.append(int(left[0]))
            left = left[~is_alike]
        return codes, firsts

    def run_starts(self, begins: Positions, ends: Positions) -> Positions:
        """Which of the texts between `begins` and `ends` differ from the one before; the first one does."""
        differs = np.zeros(len(begins), dtype=np.bool_)
        differs[:1] = True
        for column in self.columns(begins, ends):
            differs[1:] |= column[1:] != column[:-1]
        return np.flatnonzero(differs)

    def spells(self, ends: Positions, numbers: Positions) -> Mask:
        """Where the digits before a position are those of a number, 0 or more; what is before them is not looked at."""
        result = np.ones(len(ends), dtype=np.bool_)
        counts, rest = digits(numbers), numbers
        for place in range(int(counts.max(initial=0))):
            rest, digit = np.divmod(rest, 10)
            result &= (self.bytes[ends - 1 - place] == digit + ord("0")) | (place >= counts)
        return result

    def numbers(self, ends: Positions, *, max_digits: int) -> tuple[Positions, Positions]:
        """The decimal numbers that end at some positions, and where they begin; -1 where there is none.

        None are those without digits, with more than `max_digits`, or with a zero in front.
        """
        values, counts = np.zeros(len(ends), dtype=np.int64), np.zeros(len(ends), dtype=np.int64)
        goes_on = np.ones(len(ends), dtype=np.bool_)
        for place in range(max_digits + 1):
            digit = self.bytes[np.maximum(ends - 1 - place, 0)].astype(np.int64) - ord("0")
            goes_on &= (digit >= 0) & (digit <= 9)
            counts += goes_on
            values += np.where(goes_on, digit * _POWERS[place], 0)
        is_number = (counts > 0) & (counts <= max_digits) & (digits(values) == counts)
        return np.where(is_number, values, -1), ends - counts


def all_differ(columns: Words) -> bool:
    """True if texts, as `TextWords.columns` has them, are seen to be all different; hardly ever false if they are."""
    hashes = np.zeros(columns.shape[1], dtype=np.uint64)
    for column in columns:
        hashes = (hashes ^ column) * _FACTOR
        hashes ^= hashes >> np.uint64(29)
    hashes.sort()
    return not (hashes[1:] == hashes[:-1]).any()


def digits(numbers: Positions) -> Positions:
    """How many decimal digits numbers have that are 0 or more."""
    return np.maximum(np.searchsorted(_POWERS, numbers, side="right"), 1).astype(np.int64)
