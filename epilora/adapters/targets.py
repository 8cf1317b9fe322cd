"""Which modules a config says have a pair, so that a file which says otherwise is noticed.

What counts is the file; but PEFT ignores tensors of modules that the config leaves out, so whoever trained such an
adapter may have seen other answers. Matched as PEFT's `check_target_module_exists` does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from epilora.adapters.keys import named
from epilora.adapters.patterns import compile_expression
from epilora.errors import AdapterFormatError

_Modules = tuple[str, ...] | re.Pattern[str] | None
_ANY_LIST = r"[^.]*"
_PLAIN_NAME = re.compile(r"\w+")


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetModules:
    """target_modules, exclude_modules, layers_to_transform and layers_pattern; what is not understood says nothing."""

    targets: _Modules
    """Names or ends of paths, or an expression of whole paths; None if the config does not say."""
    excluded: _Modules
    layers: frozenset[int] | None
    layer_lists: tuple[str, ...]
    """Names of the lists that the layers' numbers count in; any if empty."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> TargetModules:
        """From the values of adapter_config.json."""
        layers = values.get("layers_to_transform")
        numbers: list[Any] = layers if isinstance(layers, list) else [layers]
        lists = values.get("layers_pattern") or []
        lists = lists if isinstance(lists, list) else [lists]
        plain = all(isinstance(name, str) and _PLAIN_NAME.fullmatch(name) for name in lists)
        known = numbers and all(type(number) is int for number in numbers)
        return cls(
            targets=_modules(values, "target_modules"),
            excluded=_modules(values, "exclude_modules"),
            layers=frozenset(numbers) if known and plain else None,
            layer_lists=tuple(lists) if plain else (),
        )

    def leaves_out(self, module: str) -> str:
        """The field of the config by which a module would have no pair; empty if it has one.

        Args:
            module: its path, as the file has it.
        """
        if _is_among(module, self.excluded):
            return "exclude_modules"
        if self.targets is not None and not _is_among(module, self.targets):
            return "target_modules"
        # A whole path in the list counts whatever its layer.
        is_named = isinstance(self.targets, tuple) and module in self.targets
        if self.layers is not None and not is_named and self._layer_of(module) not in self.layers:
            return "layers_to_transform"
        return ""

    def _layer_of(self, module: str) -> int | None:
        found = (re.match(rf".*\.{name}\.(\d+)\.", module) for name in self.layer_lists or (_ANY_LIST,))
        return next((int(match.group(1)) for match in found if match), None)


def contradiction_warnings(left_out_by: Mapping[str, str]) -> list[str]:
    """What to say of modules that have a pair in the file though a field of the config leaves them out."""
    if not left_out_by:
        return []
    fields = ", ".join(sorted(set(left_out_by.values())))
    return [
        f"{fields} of adapter_config.json leaves out {len(left_out_by)} modules that have a pair in the file: "
        f"{named(list(left_out_by))}; the pairs count here, PEFT would ignore them"
    ]


def _modules(values: Mapping[str, Any], field: str) -> _Modules:
    value = values.get(field)
    if isinstance(value, str) and value and value != "all-linear":
        try:
            return compile_expression(field, value)
        except AdapterFormatError:
            return None
    if isinstance(value, list) and value and all(isinstance(name, str) for name in value):
        return None if value == ["all-linear"] else tuple(value)
    return None


def _is_among(module: str, modules: _Modules) -> bool:
    if modules is None:
        return False
    if isinstance(modules, re.Pattern):
        return modules.fullmatch(module) is not None
    return any(module == name or module.endswith(f".{name}") for name in modules)
