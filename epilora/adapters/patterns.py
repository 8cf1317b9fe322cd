"""rank_pattern and alpha_pattern, matched as PEFT matches them, without letting a hostile expression hang us."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Generic, TypeVar

from epilora.errors import AdapterFormatError

Value = TypeVar("Value")

_MAX_LENGTH = 512
_MAX_PATTERNS = 100_000
# A failing match may try every combination of the choices in an expression, and the interpreter runs nothing else
# meanwhile. Real expressions have one or two: `.*\.layers\.(3|4)\.mlp\.gate`.
_MAX_CHOICES = 4
_MAX_ALTERNATIVES = 64
_MAX_SECONDS = 30.0
_MAX_COMPARED = 32

_ESCAPE = re.compile(r"\\.", re.DOTALL)
_CHARACTER_CLASS = re.compile(r"\[[^\]]*\]")
_CHOICE = re.compile(r"[*+{(]|(?<!\()\?")
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_BACK_REFERENCE = re.compile(r"\\[1-9]|\(\?P=|\(\?\(")


class ModulePatterns(Generic[Value]):
    """Values by module, from a table of expression -> value.

    Semantics: the first expression, in the table's order, for which `(.*\\.)?(expression)$` matches the module's
    path from its start; the default if none does. So "q_proj" and "self_attn.q_proj" match by suffix, a regular
    expression matches what it says, and "^model.layers.0.x" anchors.
    """

    def __init__(self, field: str, table: Mapping[str, Value], default: Value) -> None:
        """Args:
            field: name of the field, for messages.
            table: expression -> value.
            default: value of modules that none matches.

        Raises:
            AdapterFormatError: reason BAD_ADAPTER_CONFIG; not an expression, or one that may take forever.
        """
        if len(table) > _MAX_PATTERNS:
            raise _error(field, f"has {len(table)} entries, the limit is {_MAX_PATTERNS}")
        self._field = field
        self._default = default
        self._compiled = [(_compile(field, key), key, value) for key, value in table.items()]
        self._unused = set(table)
        self._conflicts: dict[str, str] = {}
        self._seconds = 0.0

    def value_of(self, module: str) -> Value:
        """The value of a module (or of a parameter, for target_parameters), by the path the adapter has for it.

        Raises:
            AdapterFormatError: reason BAD_ADAPTER_CONFIG; matching has taken too long in all.
        """
        if not self._compiled:
            return self._default
        start = time.monotonic()
        try:
            for index, (pattern, key, value) in enumerate(self._compiled):
                if pattern.match(module):
                    self._unused.discard(key)
                    self._look_for_conflict(module, index)
                    return value
            return self._default
        finally:
            self._spend(time.monotonic() - start)

    @property
    def conflicts(self) -> list[str]:
        """For each entry that another one of a different value contests, the first module that both match."""
        return list(self._conflicts.values())

    def _look_for_conflict(self, module: str, index: int) -> None:
        """Notes later entries that say something else. Tables of a line for each module are not looked through."""
        _, key, value = self._compiled[index]
        if key in self._conflicts or len(self._compiled) > _MAX_COMPARED:
            return
        for pattern, other, contested in self._compiled[index + 1 :]:
            if contested != value and pattern.match(module):
                self._conflicts[key] = f"{module} by {key!r} ({value}) and by {other!r} ({contested})"
                return

    @property
    def num_patterns(self) -> int:
        """Entries of the table."""
        return len(self._compiled)

    @property
    def unused(self) -> list[str]:
        """Expressions that no module asked for has matched, sorted."""
        return sorted(self._unused)

    def _spend(self, seconds: float) -> None:
        self._seconds += seconds
        if self._seconds > _MAX_SECONDS:
            raise _error(self._field, f"takes more than {_MAX_SECONDS:.0f} s to match; write out the module names")


def _compile(field: str, key: str) -> re.Pattern[str]:
    return compile_expression(field, key, before=r"(.*\.)?(", after=")$")


def compile_expression(field: str, key: str, *, before: str = "", after: str = "") -> re.Pattern[str]:
    """An expression of a config between two parts of ours.

    Raises:
        AdapterFormatError: reason BAD_ADAPTER_CONFIG; it is none, or may take forever to match.
    """
    if len(key) > _MAX_LENGTH:
        raise _error(field, f"has an expression of {len(key)} characters, the limit is {_MAX_LENGTH}")
    bare = _CHARACTER_CLASS.sub("x", _ESCAPE.sub("x", key))
    many_choices = len(_CHOICE.findall(bare)) > _MAX_CHOICES or bare.count("|") > _MAX_ALTERNATIVES
    if many_choices or _REPEATED_GROUP.search(bare) or _BACK_REFERENCE.search(key):
        raise _error(
            field,
            f"has the expression {key!r}, which may take forever to match: repeated groups, back references and more "
            f"than {_MAX_CHOICES} repetitions, options and groups are refused; write out the module names instead",
        )
    try:
        return re.compile(f"{before}{key}{after}")
    except (re.error, RecursionError, OverflowError) as error:
        raise _error(field, f"has {key!r}, which is not a regular expression: {error}") from error


def _error(field: str, message: str) -> AdapterFormatError:
    return AdapterFormatError(f"adapter_config.json: {field} {message}", reason="BAD_ADAPTER_CONFIG")
