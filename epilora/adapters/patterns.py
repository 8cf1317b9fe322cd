"""rank_pattern and alpha_pattern, matched as PEFT matches them, without letting a hostile expression hang us."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Generic, TypeVar

from epilora.errors import AdapterFormatError

Value = TypeVar("Value")

_MAX_LENGTH = 512
_MAX_PATTERNS = 100_000
# Each unbounded repetition multiplies the time that a failing match may take by the length of the name.
_MAX_REPETITIONS = 3
_REPETITION = re.compile(r"(?<!\\)(?:[*+]|\{\d*,\d*\}|\{\d+\})")
_DANGEROUS = re.compile(r"(?<!\\)\)(?:[*+]|\{)|\\\d|\(\?P=")


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
        self._default = default
        self._compiled = [(_compile(field, key), key, value) for key, value in table.items()]
        self._unused = set(table)

    def value_of(self, module: str) -> Value:
        """The value of a module (or of a parameter, for target_parameters), by the path the adapter has for it."""
        for pattern, key, value in self._compiled:
            if pattern.match(module):
                self._unused.discard(key)
                return value
        return self._default

    @property
    def unused(self) -> list[str]:
        """Expressions that no module asked for has matched, sorted."""
        return sorted(self._unused)


def _compile(field: str, key: str) -> re.Pattern[str]:
    if len(key) > _MAX_LENGTH:
        raise _error(field, f"has an expression of {len(key)} characters, the limit is {_MAX_LENGTH}")
    if _DANGEROUS.search(key) or len(_REPETITION.findall(key)) > _MAX_REPETITIONS:
        raise _error(
            field,
            f"has the expression {key!r}, which may take forever to match: repeated groups, back references and more "
            f"than {_MAX_REPETITIONS} repetitions are refused; write out the module names instead",
        )
    try:
        return re.compile(rf"(.*\.)?({key})$")
    except (re.error, RecursionError, OverflowError) as error:
        raise _error(field, f"has {key!r}, which is not a regular expression: {error}") from error


def _error(field: str, message: str) -> AdapterFormatError:
    return AdapterFormatError(f"adapter_config.json: {field} {message}", reason="BAD_ADAPTER_CONFIG")
