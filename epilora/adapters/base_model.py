"""Whether an adapter says that it was trained on another model than the one that is served.

Shapes do not tell: a model and its fine-tuned variants have the same ones, and an adapter for one of them loads into
the others and answers wrong. Names do not tell for sure either, so this is a warning.
"""

from __future__ import annotations

from collections.abc import Sequence

_CACHE_PREFIX = "models--"


def base_model_warnings(recorded: str, served: str) -> Sequence[str]:
    """A warning, or none.

    Args:
        recorded: base_model_name_or_path of adapter_config.json; may be empty.
        served: name or path of the model that is served.

    Example: "Qwen/Qwen3-30B-A3B" and "/models/qwen3-30b-a3b" are the same name; "Qwen/Qwen3-30B-A3B-Base" is another.
    """
    if not recorded or not served or _short(recorded) == _short(served):
        return []
    return [
        f"base_model_name_or_path is {recorded!r}, and the model that is served is {served!r}: the shapes fit, but if "
        "these are different models, the adapter's answers are wrong"
    ]


def _short(name: str) -> str:
    """The last part of a name or path, as it is compared; of a download cache, the repository's."""
    parts = [part for part in name.replace("\\", "/").split("/") if part]
    cached = [part for part in parts if part.startswith(_CACHE_PREFIX)]
    last = cached[-1].rpartition("--")[2] if cached else (parts[-1] if parts else "")
    return last.lower()
