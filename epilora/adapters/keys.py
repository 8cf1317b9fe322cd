"""Tensor names -> module paths and sides, and the pairs that they make.

What is read: `<module>.lora_A.weight`, with the adapter's name between (`lora_A.default.weight`) or without `.weight`;
`<module>.lora_embedding_A`; `<module>.lora_magnitude_vector` (DoRA) and `<module>.lora_B.bias`, which belong to a pair;
and `<experts>.lora_gate_and_up_A`, `<experts>.lora_down_A`, which name the parameter in the last segment and are read
as pairs of `<experts>.gate_and_up_projs` and `<experts>.down_projs`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from epilora.adapters.tensor_entry import TensorEntry
from epilora.errors import AdapterFormatError

PREFIX = "base_model.model."
ENDING_A, ENDING_B = ".lora_A.weight", ".lora_B.weight"
# One segment with the name of the adapter may stand between lora_A and weight.
_NAME = re.compile(
    r"(?P<module>.+)\.lora_(?:(?P<grouped>gate_and_up|down)_)?(?P<side>[AB])(?:(?:\.(?P<adapter>[^.]+))?\.weight)?"
)
_EMBEDDING_NAME = re.compile(r"(?P<module>.+)\.lora_embedding_(?P<side>[AB])(?:\.(?P<adapter>[^.]+))?")
_EXTRA_NAME = re.compile(
    r"(?P<module>.+)\.lora_(?:(?P<magnitude>magnitude_vector)(?:\.(?!weight\Z)[^.]+)?(?:\.weight)?|B(?:\.[^.]+)?\.bias)"
)
_ALWAYS_REFUSED = (
    ("lora_magnitude", "a magnitude of DoRA that has no place in a module"),
    (".bias", "a bias that is not lora_B's"),
)
_MAX_NAMED = 5


class Pair(NamedTuple):
    """A and B of one module, as the file names it. A tuple, as TensorEntry is."""

    module: str
    """Path without the prefix of PEFT's wrappers; the name that rank_pattern and alpha_pattern match."""
    a: TensorEntry
    b: TensorEntry
    is_embedding: bool = False
    """True for lora_embedding_A [r, vocabulary] and lora_embedding_B [D, r]."""
    magnitude: TensorEntry | None = None
    """DoRA's, [out]."""
    bias: TensorEntry | None = None
    """Of lora_B, [out]."""

    @property
    def is_empty(self) -> bool:
        """True if neither half has elements: what some trainers write for a projection that the model lacks."""
        return self.a.size_bytes == 0 and self.b.size_bytes == 0

    def tensors(self) -> list[TensorEntry]:
        """All tensors of the module."""
        return [tensor for tensor in (self.a, self.b, self.magnitude, self.bias) if tensor is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedTensors:
    """The tensors of a file by what their names say."""

    pairs: tuple[Pair, ...]
    """In order of the first tensor's offset."""
    others: tuple[TensorEntry, ...]
    """Tensors whose name is not that of half a pair."""


def pair_tensors(tensors: Sequence[TensorEntry], *, is_rest: bool = False) -> PairedTensors:
    """Finds the two halves of each pair.

    Args:
        tensors: of the adapter.
        is_rest: pairs of the adapter are known already, so there need not be more.

    Raises:
        AdapterFormatError: NO_LORA_TENSORS, UNSUPPORTED_ADAPTER, MIXED_ADAPTER_NAMES,
            DUPLICATE_TENSOR (two names of one half), MISSING_PAIR_HALF, EMPTY_TENSOR.
    """
    pairs, rest = _neighbours(tensors)
    halves: dict[str, dict[str, TensorEntry]] = {}
    others: list[TensorEntry] = []
    adapter_names: dict[str, str] = {}
    embeddings: set[str] = set()
    extras: list[TensorEntry] = []
    for tensor in rest:
        if _EXTRA_NAME.fullmatch(tensor.name):
            extras.append(tensor)
            continue
        match = _NAME.fullmatch(tensor.name) or _EMBEDDING_NAME.fullmatch(tensor.name)
        if match is None:
            _refuse_by_name(tensor)
            others.append(tensor)
            continue
        if match["adapter"] is not None:
            adapter_names.setdefault(match["adapter"], tensor.name)
        module = match["module"].removeprefix(PREFIX)
        if match.re is _EMBEDDING_NAME:
            embeddings.add(module)
        elif match["grouped"] is not None:
            module = f"{module}.{match['grouped']}_projs"
        if module in pairs:
            halves[module] = {"A": pairs[module].a, "B": pairs[module].b}
        _add_half(halves, module, match["side"], tensor)
    if not halves and not pairs and not is_rest:
        raise _no_lora_tensors(others)
    if len(adapter_names) > 1:
        raise AdapterFormatError(
            f"the file holds tensors of {len(adapter_names)} adapters, {named(list(adapter_names.values()))}; "
            "save one adapter a file",
            reason="MIXED_ADAPTER_NAMES",
        )
    _check_halves(halves)
    for module, sides in halves.items():
        pairs[module] = Pair(module=module, a=sides["A"], b=sides["B"], is_embedding=module in embeddings)
    _add_extras(pairs, extras)
    ordered = list(pairs.values())
    if halves:
        ordered.sort(key=lambda pair: min(pair.a.index, pair.b.index))
    _check_empty(ordered)
    return PairedTensors(pairs=tuple(ordered), others=tuple(others))


def _neighbours(tensors: Sequence[TensorEntry]) -> tuple[dict[str, Pair], list[TensorEntry]]:
    """Pairs of a `.lora_A.weight` and its `.lora_B.weight` right behind it, and the tensors that are in none.

    Most files are such pairs from end to end, tens of thousands of them. What is taken for a pair is what the
    expressions above would.
    """
    pairs: dict[str, Pair] = {}
    rest: list[TensorEntry] = []
    waiting: TensorEntry | None = None
    module = expected = ""
    for tensor in tensors:
        name = tensor.name
        if waiting is not None:
            if name == expected and module not in pairs:
                pairs[module] = Pair(module, waiting, tensor)
                waiting = None
                continue
            rest.append(waiting)
            waiting = None
        path = name[: -len(ENDING_A)]
        if name.endswith(ENDING_A) and path and ".lora_" not in path and "\n" not in path:
            waiting, expected, module = tensor, path + ENDING_B, path.removeprefix(PREFIX)
        else:
            rest.append(tensor)
    if waiting is not None:
        rest.append(waiting)
    return pairs, rest


def _add_half(halves: dict[str, dict[str, TensorEntry]], module: str, side: str, tensor: TensorEntry) -> None:
    other = halves.setdefault(module, {}).setdefault(side, tensor)
    if other is not tensor:
        raise AdapterFormatError(
            f"{other.name} and {tensor.name} are both lora_{side} of {module}", reason="DUPLICATE_TENSOR"
        )


def named(names: Sequence[str]) -> str:
    """A few names and how many more, for messages."""
    shown = ", ".join(names[:_MAX_NAMED])
    return shown if len(names) <= _MAX_NAMED else f"{shown} and {len(names) - _MAX_NAMED} more"


def _refuse_by_name(tensor: TensorEntry) -> None:
    if "lora_" not in tensor.name:
        return
    for part, meaning in _ALWAYS_REFUSED:
        if part in tensor.name:
            raise AdapterFormatError(
                f"tensor {tensor.name}: {meaning}; such adapters are not supported",
                reason="UNSUPPORTED_ADAPTER",
                metadata={"tensor": tensor.name},
            )


def _no_lora_tensors(others: Sequence[TensorEntry]) -> AdapterFormatError:
    if not others:
        what = "the file holds no tensors; the trainer probably saved from a process that held none (ZeRO-3)"
    elif any(".lora_a." in tensor.name for tensor in others):
        what = "the tensors have the names of torchtune (lora_a, lora_b); convert the adapter to PEFT's"
    else:
        what = f"none of the file's {len(others)} tensors is a lora_A or lora_B, first {others[0].name}"
    return AdapterFormatError(f"{what}; expected an adapter that PEFT saved", reason="NO_LORA_TENSORS")


def _check_halves(halves: dict[str, dict[str, TensorEntry]]) -> None:
    single = [next(iter(sides.values())).name for sides in halves.values() if len(sides) == 1]
    if single:
        raise AdapterFormatError(
            f"{len(single)} tensors lack the other half of their pair: {named(single)}",
            reason="MISSING_PAIR_HALF",
            metadata={"tensor": single[0]},
        )


def _add_extras(pairs: dict[str, Pair], tensors: Sequence[TensorEntry]) -> None:
    """Gives magnitudes and biases to the pairs of their modules."""
    for tensor in tensors:
        match = _EXTRA_NAME.fullmatch(tensor.name)
        assert match is not None, tensor.name
        module, kind = match["module"].removeprefix(PREFIX), "magnitude" if match["magnitude"] else "bias"
        pair = pairs.get(module)
        if pair is None:
            raise AdapterFormatError(
                f"{tensor.name} lacks the pair of its module, lora_A and lora_B of {module}",
                reason="MISSING_PAIR_HALF",
                metadata={"tensor": tensor.name},
            )
        other = getattr(pair, kind)
        if other is not None:
            raise AdapterFormatError(
                f"{other.name} and {tensor.name} are both the {kind} of {module}", reason="DUPLICATE_TENSOR"
            )
        if tensor.size_bytes == 0:
            raise empty_tensors([tensor.name])
        pairs[module] = pair._replace(magnitude=tensor) if kind == "magnitude" else pair._replace(bias=tensor)


def _check_empty(pairs: Sequence[Pair]) -> None:
    """One half without elements is a fault; both are left to who knows the model."""
    halves = [(pair.a, pair.b) for pair in pairs if (pair.a.size_bytes == 0) != (pair.b.size_bytes == 0)]
    if halves:
        raise empty_tensors([tensor.name for pair in halves for tensor in pair if tensor.size_bytes == 0])


def empty_tensors(names: Sequence[str]) -> AdapterFormatError:
    """The error of tensors without elements."""
    return AdapterFormatError(
        f"{len(names)} tensors have no elements: {named(names)}; the trainer did not gather them before saving",
        reason="EMPTY_TENSOR",
        metadata={"tensor": names[0]},
    )
