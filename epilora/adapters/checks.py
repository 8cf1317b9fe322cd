"""Checks of a pair's shapes that every layout shares."""

from __future__ import annotations

from epilora.adapters.keys import Pair
from epilora.adapters.peft_config import PeftConfig
from epilora.errors import AdapterFormatError

DEFAULT_MAX_LORA_RANK = 512
"""Largest lora_rank that a service accepts unless it is told otherwise."""


def shape_error(pair: Pair, expected: str, config: PeftConfig) -> AdapterFormatError:
    """The error of a pair that does not fit the model."""
    base = f" The adapter was trained on {config.base_model!r}." if config.base_model else ""
    return AdapterFormatError(
        f"{pair.a.name} has shape {list(pair.a.shape)} and {pair.b.name} {list(pair.b.shape)}, expected {expected} "
        f"for the model that is served.{base}",
        reason="SHAPE_MISMATCH",
        metadata={"module": pair.module, "a_shape": list(pair.a.shape), "b_shape": list(pair.b.shape)},
    )


def check_matrices(pair: Pair, config: PeftConfig) -> None:
    """A and B are 2D, and their ranks agree.

    Raises:
        AdapterFormatError: SHAPE_MISMATCH, RANK_MISMATCH.
    """
    if len(pair.a.shape) != 2 or len(pair.b.shape) != 2:
        raise shape_error(pair, "two dimensions in each", config)
    if pair.a.shape[0] != pair.b.shape[1]:
        raise AdapterFormatError(
            f"{pair.a.name} has {pair.a.shape[0]} rows and {pair.b.name} {pair.b.shape[1]} columns, expected the same "
            "number, the lora_rank",
            reason="RANK_MISMATCH",
            metadata={"module": pair.module},
        )


def check_linear(pair: Pair, in_features: int, out_features: int, config: PeftConfig) -> int:
    """A is [r, in] and B [out, r].

    Returns:
        r.

    Raises:
        AdapterFormatError: SHAPE_MISMATCH, RANK_MISMATCH.
    """
    check_matrices(pair, config)
    if pair.a.shape[1] != in_features or pair.b.shape[0] != out_features:
        raise shape_error(pair, f"[r, {in_features}] and [{out_features}, r]", config)
    return pair.a.shape[0]
