"""Module paths of a file -> of the model that is served."""

from __future__ import annotations

from epilora.adapters.normal_form import AdapterTarget

_PREFIX = "base_model.model."
# Paths of a text model inside a multimodal wrapper, over the versions of transformers.
_MULTIMODAL_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.")


def is_in_multimodal(name: str) -> bool:
    """True if a tensor's name goes through the text model of a multimodal one."""
    return name.removeprefix(_PREFIX).startswith(_MULTIMODAL_PREFIXES)


def renamed_path(module: str, target: AdapterTarget) -> str:
    """The path in the module tree of the model that is served."""
    root = target.family.layers_path.partition(".")[0]
    for prefix in _MULTIMODAL_PREFIXES:
        if module.startswith(prefix):
            module = f"{root}.{module.removeprefix(prefix)}"
            break
    for old, new in target.family.module_renames:
        module = f".{module}.".replace(f".{old}.", f".{new}.")[1:-1]
    return module
