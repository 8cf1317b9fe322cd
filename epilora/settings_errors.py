"""Wrong settings, said in one line each."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from typing import TypeVar

from pydantic import ValidationError
from pydantic_settings import SettingsError

from epilora.settings import CommonSettings

EXIT_BAD_SETTINGS = 78
"""sysexits.h's EX_CONFIG: starting the process again will not help."""
REASONS_OF_VARIABLES = ("EXPERT_BACKEND", "EXPERT_TP")
"""Of errors in variables without an option of `epilora serve`, found by what knows the model or the device."""
S = TypeVar("S", bound=CommonSettings)
_UNPARSED_FIELD = re.compile(r'field "(\w+)"')


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One wrong setting."""

    field: str
    """Name in the settings class."""
    value: object
    """None: it is missing."""
    expected: str

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return f"EPILORA_{self.field.upper()}"

    def line(self, name: str = "") -> str:
        """Name, value, and what was expected; name: by default the variable's."""
        name = name or self.variable
        if self.value is None:
            return f"{name} is not set; it has no default"
        return f"{name} is {str(self.value)!r}: {self.expected}"


def problems_of(error: ValidationError | SettingsError) -> list[Problem]:
    """What is wrong, one entry a setting."""
    if isinstance(error, ValidationError):
        return [
            Problem(
                field=str(detail["loc"][0]) if detail["loc"] else "settings",
                value=None if detail["type"] == "missing" else detail["input"],
                expected=detail["msg"].removeprefix("Value error, "),
            )
            for detail in error.errors()
        ]
    # A list that is not JSON: pydantic-settings tells the field in its message only.
    found = _UNPARSED_FIELD.search(str(error))
    field = found.group(1) if found else "settings"
    value = os.environ.get(f"EPILORA_{field.upper()}", "")
    return [Problem(field=field, value=value, expected='expected a JSON list, e.g. ["/adapters"]')]


def settings_or_exit(cls: type[S]) -> S:
    """The settings of a process, from its environment; if any is wrong, one line each on stderr and exit code 78."""
    try:
        return cls()  # type: ignore[call-arg]  # from the environment
    except (ValidationError, SettingsError) as error:
        for problem in problems_of(error):
            print(f"error: {problem.line()}", file=sys.stderr)
        sys.exit(EXIT_BAD_SETTINGS)
