"""What a pair may have beside A and B: DoRA's magnitude, a bias of lora_B.

PEFT writes both for linear maps only. Stacked expert parameters have neither: PEFT refuses to train them so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epilora.adapters.keys import Pair, named
from epilora.adapters.normal_form import Region
from epilora.adapters.peft_config import PeftConfig
from epilora.adapters.tensor_entry import TensorEntry
from epilora.errors import AdapterFormatError


def check_extras(pairs: Sequence[Pair], config: PeftConfig) -> None:
    """Config and file agree: all pairs have a magnitude, or none; all have a bias, or none.

    Raises:
        AdapterFormatError: reason UNSUPPORTED_ADAPTER.
    """
    magnitudes = [pair.magnitude for pair in pairs if pair.magnitude is not None]
    _check(magnitudes, len(pairs), config.uses_dora, _MAGNITUDES)
    biases = [pair.bias for pair in pairs if pair.bias is not None]
    _check(biases, len(pairs), config.has_biases, _BIASES)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """What messages call them."""

    field: str
    plural: str
    name: str


_MAGNITUDES = _Kind(field="use_dora", plural="magnitudes of DoRA", name="lora_magnitude_vector")
_BIASES = _Kind(field="lora_bias", plural="biases of lora_B", name="lora_B.bias")


def _check(found: Sequence[TensorEntry], num_pairs: int, is_set: bool, kind: _Kind) -> None:
    if is_set and len(found) < num_pairs:
        message = f"{kind.field} is set, but {num_pairs - len(found)} of {num_pairs} pairs have no {kind.name}"
    elif found and not is_set:
        names = named([tensor.name for tensor in found])
        message = f"{kind.field} is not set, but the file holds {kind.plural}: {names}"
    else:
        return
    raise AdapterFormatError(
        f"adapter_config.json: {message}; what such an adapter computes is not defined",
        reason="UNSUPPORTED_ADAPTER",
        metadata={"config_field": kind.field},
    )


def refuse_extras(pair: Pair, what: str, why: str) -> None:
    """For modules that cannot have them.

    Args:
        pair: of the module.
        what: the module, for the message.
        why: the reason, for the message.

    Raises:
        AdapterFormatError: reason UNSUPPORTED_ADAPTER.
    """
    for tensor, field in ((pair.magnitude, "use_dora"), (pair.bias, "lora_bias")):
        if tensor is not None:
            raise AdapterFormatError(
                f"{tensor.name}: {field} for {what} is not supported: {why}; train the adapter without",
                reason="UNSUPPORTED_ADAPTER",
                metadata={"tensor": tensor.name, "config_field": field},
            )


def vector(tensor: TensorEntry | None, out_features: int, config: PeftConfig) -> Region | None:
    """A magnitude or bias [out] as a matrix [1, out]; None stays.

    Raises:
        AdapterFormatError: reason SHAPE_MISMATCH.
    """
    if tensor is None:
        return None
    if tensor.shape != (out_features,):
        base = f" The adapter was trained on {config.base_model!r}." if config.base_model else ""
        raise AdapterFormatError(
            f"{tensor.name} has shape {list(tensor.shape)}, expected [{out_features}] for the model that is served."
            f"{base}",
            reason="SHAPE_MISMATCH",
            metadata={"tensor": tensor.name},
        )
    return Region.whole(tensor)
