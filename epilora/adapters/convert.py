"""An adapter in another layout, with the same deltas: one pair per expert, or PEFT's stacked pairs.

E experts, r lora_rank; A [r, in], B [out, r]. Tensors are made one after the other, so that memory holds one layer's.
"""

from __future__ import annotations

import enum
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from epilora.adapters.layout_hints import NO_HINTS, LayoutHints
from epilora.adapters.normal_form import LoraPair, NormalForm, Region
from epilora.adapters.open_adapter import CONFIG_NAME, OpenAdapter
from epilora.adapters.weights import WEIGHTS_NAME
from epilora.errors import InvalidArgumentError
from epilora.families import GateUpLayout, ModelFamily, Projection, family_of
from epilora.model_spec import ModelSpec, MoELayerSpec

Matrix = npt.NDArray[np.float32]
_PREFIX = "base_model.model."
# The first release that does not swap in and out of stacked parameters.
_STACKED_VERSION = "0.19.1"


class ConvertedLayout(enum.StrEnum):
    """What to write."""

    PER_EXPERT = "per-expert"
    FUSED = "fused"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tensor:
    """A tensor to write, and how to make it; all are float32."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], Matrix]


@dataclass(kw_only=True, slots=True)
class _Draft:
    """What a converted adapter consists of."""

    tensors: list[_Tensor] = field(default_factory=list)
    targets: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Module or parameter -> (lora_rank, alpha)."""
    modules: set[str] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)

    def add(self, name: str, shape: tuple[int, ...], make: Callable[[], Matrix]) -> None:
        """One more tensor."""
        self.tensors.append(_Tensor(name=f"{_PREFIX}{name}", shape=shape, make=make))


def convert_adapter(
    adapter: OpenAdapter, model: ModelSpec, out: Path, layout: ConvertedLayout, *, hints: LayoutHints = NO_HINTS
) -> int:
    """Writes an adapter anew; float32, so that nothing is rounded.

    Args:
        adapter: open.
        model: what it is for.
        out: new directory.
        layout: what to write.
        hints: as in LoadAdapterRequest.

    Returns:
        The number of tensors written.

    Raises:
        AdapterFormatError: the adapter does not fit the model.
        InvalidArgumentError: BAD_OUTPUT (`out` exists), UNSUPPORTED_ADAPTER (more than pairs of A and B).
    """
    form = adapter.resolve(model, hints=hints)
    if form.saved or any(pair.magnitude is not None or pair.bias is not None for pair in form.pairs()):
        raise InvalidArgumentError(
            f"{adapter.path} has DoRA's magnitudes, biases or whole modules, which not both layouts can express; "
            "it cannot be converted",
            reason="UNSUPPORTED_ADAPTER",
        )
    if out.exists():
        raise InvalidArgumentError(f"{out} exists; expected the name of a new directory", reason="BAD_OUTPUT")
    family = family_of(model.model_type, model.moe_layers[0].gate_up_layout)
    reader = _Reader(adapter)
    draft = _Draft()
    _add_dense(draft, form, family, reader)
    for moe in model.moe_layers:
        present = {p: form.experts[moe.layer, p] for p in Projection if (moe.layer, p) in form.experts}
        if layout is ConvertedLayout.PER_EXPERT:
            _add_per_expert(draft, moe, present, reader)
        else:
            _add_fused(draft, moe, present, family, reader)
    out.mkdir(parents=True)
    _write_tensors(out / WEIGHTS_NAME, draft.tensors)
    (out / CONFIG_NAME).write_text(json.dumps(_config(draft, adapter), indent=2) + "\n")
    return len(draft.tensors)


class _Reader:
    """Matrices of the file as float32."""

    def __init__(self, adapter: OpenAdapter) -> None:
        self._descriptors = adapter.weights.descriptors

    def matrix(self, region: Region) -> Matrix:
        """The values of a region."""
        tensor = region.tensor
        raw = os.pread(self._descriptors[tensor.file], tensor.size_bytes, tensor.offset)
        if tensor.dtype == "BF16":
            values = (np.frombuffer(raw, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(raw, dtype={"F32": "<f4", "F16": "<f2"}[tensor.dtype]).astype(np.float32)
        return region.view(values.reshape(tensor.num_rows, tensor.num_columns))


def _add_dense(draft: _Draft, form: NormalForm, family: ModelFamily, reader: _Reader) -> None:
    for module, pair in form.dense.items():
        is_embedding = module == family.embedding_path
        for side, region in (("A", pair.a), ("B", pair.b)):
            ending = f"lora_embedding_{side}" if is_embedding else f"lora_{side}.weight"
            draft.add(f"{module}.{ending}", region.shape, _reading(reader, region))
        draft.targets[module] = (pair.lora_rank, pair.scale * pair.lora_rank)
        draft.modules.add(module.rpartition(".")[2])


def _reading(reader: _Reader, region: Region, rows: slice = slice(None)) -> Callable[[], Matrix]:
    return lambda: reader.matrix(region)[rows]


def _add_per_expert(
    draft: _Draft, moe: MoELayerSpec, present: Mapping[Projection, Mapping[int, LoraPair]], reader: _Reader
) -> None:
    names = {Projection.GATE: "gate_proj", Projection.UP: "up_proj", Projection.DOWN: "down_proj"}
    for projection, by_expert in present.items():
        parts = (Projection.GATE, Projection.UP) if projection is Projection.GATE_UP else (projection,)
        for expert, pair in by_expert.items():
            for part in parts:
                rows = _rows_of(moe, part) if projection is Projection.GATE_UP else slice(None)
                module = f"{moe.module}.{expert}.{names[part]}"
                out_features = pair.b.shape[0] // len(parts)
                draft.add(f"{module}.lora_A.weight", pair.a.shape, _reading(reader, pair.a))
                shape = (out_features, pair.lora_rank)
                draft.add(f"{module}.lora_B.weight", shape, _reading(reader, pair.b, rows))
                draft.targets[module] = (pair.lora_rank, pair.scale * pair.lora_rank)
                draft.modules.add(names[part])


def _rows_of(moe: MoELayerSpec, part: Projection) -> slice:
    """Rows of gate or up in the first projection of a model."""
    second = int(part is Projection.UP)
    if moe.gate_up_layout is GateUpLayout.INTERLEAVED:
        return slice(second, None, 2)
    return slice(second * moe.intermediate_size, (second + 1) * moe.intermediate_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """A part of what one expert gets: a pair, and the rows of the parameter that its B is for."""

    pair: LoraPair
    rows: slice


def _add_fused(
    draft: _Draft,
    moe: MoELayerSpec,
    present: Mapping[Projection, Mapping[int, LoraPair]],
    family: ModelFamily,
    reader: _Reader,
) -> None:
    """Stacked pairs, the first parameter innermost. Gate and up beside each other become one of both ranks."""
    blocks: dict[str, dict[int, list[_Block]]] = {}
    for parameter, projection in family.stacked_parameters.items():
        parts = {projection: slice(None)}
        if projection is Projection.GATE_UP:
            parts |= {part: _rows_of(moe, part) for part in (Projection.GATE, Projection.UP)}
        for part, rows in parts.items():
            for expert, pair in present.get(part, {}).items():
                blocks.setdefault(parameter, {}).setdefault(expert, []).append(_Block(pair=pair, rows=rows))
    path = ".".join(moe.module.split(".layers.", 1)[-1].split(".")[1:])
    for depth, parameter in enumerate(reversed(blocks)):
        by_expert = blocks[parameter]
        lora_rank = max(sum(block.pair.lora_rank for block in parts) for parts in by_expert.values())
        scales = Counter(block.pair.scale for parts in by_expert.values() for block in parts)
        scale = scales.most_common(1)[0][0]
        in_features, out_features = _features(moe, family.stacked_parameters[parameter])
        stack = _Stack(reader, moe.num_experts, by_expert, lora_rank, scale, in_features, out_features)
        module = moe.module + ".base_layer" * depth
        for side, shape, make in (
            ("A", (moe.num_experts * lora_rank, in_features), stack.a),
            ("B", (out_features, moe.num_experts * lora_rank), stack.b),
        ):
            draft.add(f"{module}.lora_{side}.weight", shape, make)
        draft.targets[f"{moe.module}.{parameter}"] = (lora_rank, scale * lora_rank)
        draft.parameters.add(f"{path}.{parameter}")


def _features(moe: MoELayerSpec, projection: Projection) -> tuple[int, int]:
    if projection is Projection.DOWN:
        return moe.intermediate_size, moe.hidden_size
    return moe.hidden_size, moe.intermediate_size * (2 if projection is Projection.GATE_UP else 1)


@dataclass(frozen=True, slots=True)
class _Stack:
    """The stacked pair of one parameter. Ranks that an expert does not use are zeros."""

    reader: _Reader
    num_experts: int
    by_expert: Mapping[int, Sequence[_Block]]
    lora_rank: int
    scale: float
    in_features: int
    out_features: int

    def a(self) -> Matrix:
        """[E*r, in], the expert slowest."""
        a_erI = np.zeros((self.num_experts, self.lora_rank, self.in_features), np.float32)
        for expert, parts in self.by_expert.items():
            first = 0
            for block in parts:
                a_erI[expert, first : first + block.pair.lora_rank] = self.reader.matrix(block.pair.a)
                first += block.pair.lora_rank
        return a_erI.reshape(-1, self.in_features)

    def b(self) -> Matrix:
        """[out, r*E], the expert fastest; a pair of another scale than the common one is multiplied by the quotient."""
        b_Ore = np.zeros((self.out_features, self.lora_rank, self.num_experts), np.float32)
        for expert, parts in self.by_expert.items():
            first = 0
            for block in parts:
                matrix = self.reader.matrix(block.pair.b)
                if block.pair.scale != self.scale:
                    matrix = matrix * np.float32(block.pair.scale / self.scale)
                b_Ore[block.rows, first : first + block.pair.lora_rank, expert] = matrix
                first += block.pair.lora_rank
        return b_Ore.reshape(self.out_features, -1)


def _write_tensors(path: Path, tensors: Sequence[_Tensor]) -> None:
    entries, end = {}, 0
    for tensor in tensors:
        size = 4 * int(np.prod(tensor.shape))
        entries[tensor.name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("xb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors:
            values = np.ascontiguousarray(tensor.make(), dtype="<f4")
            assert values.shape == tensor.shape, (tensor.name, values.shape, tensor.shape)
            stream.write(values.data)


def _config(draft: _Draft, adapter: OpenAdapter) -> dict[str, Any]:
    """adapter_config.json: the most frequent rank and alpha as defaults, patterns for all others."""
    given = json.loads(adapter.config_bytes)
    (lora_rank, alpha), _ = Counter(draft.targets.values()).most_common(1)[0]
    others = {pattern: own for pattern, own in _patterns(draft.targets).items() if own != (lora_rank, alpha)}
    return {
        "peft_type": "LORA",
        "task_type": given.get("task_type"),
        "base_model_name_or_path": given.get("base_model_name_or_path"),
        "inference_mode": True,
        "r": lora_rank,
        "lora_alpha": _number(alpha),
        "rank_pattern": {name: rank for name, (rank, _) in others.items() if rank != lora_rank},
        "alpha_pattern": {name: _number(own) for name, (_, own) in others.items() if own != alpha},
        "target_modules": sorted(draft.modules),
        "target_parameters": sorted(draft.parameters) or None,
        "use_rslora": False,
        "bias": "none",
        "peft_version": _STACKED_VERSION if draft.parameters else given.get("peft_version"),
    }


def _patterns(targets: Mapping[str, tuple[int, float]]) -> Mapping[str, tuple[int, float]]:
    """rank and alpha by pattern: the last name of modules that agree, else each module's whole path."""
    by_leaf: dict[str, set[tuple[int, float]]] = {}
    for name, own in targets.items():
        by_leaf.setdefault(name.rpartition(".")[2], set()).add(own)
    patterns = {}
    for name, own in targets.items():
        leaf = name.rpartition(".")[2]
        patterns[leaf if len(by_leaf[leaf]) == 1 else f"^{name}"] = own
    return patterns


def _number(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value
