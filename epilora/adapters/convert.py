"""An adapter in another layout, with the same deltas: one pair per expert, or PEFT's stacked pairs.

E experts, r lora_rank; A [r, in], B [out, r]. Tensors are made one after the other, so that memory holds one layer's.
"""

from __future__ import annotations

import enum
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from epilora.adapters.converted_names import OutputNames, OutputTargets, block_of, patterns
from epilora.adapters.layout_hints import NO_HINTS, LayoutHints
from epilora.adapters.normal_form import LoraPair, NormalForm, Region
from epilora.adapters.open_adapter import CONFIG_NAME, OpenAdapter
from epilora.adapters.tensor_entry import TensorEntry
from epilora.adapters.weights import WEIGHTS_NAME
from epilora.errors import AbortedError, InvalidArgumentError
from epilora.families import GateUpLayout, ModelFamily, Projection, StackedAxes, family_of
from epilora.model_spec import ModelSpec, MoELayerSpec
from epilora.reading import read_fully

Matrix = npt.NDArray[np.float32]
_PREFIX = "base_model.model."
# The first release whose orientation of stacked parameters is that of what is written.
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

    names: OutputNames
    tensors: list[_Tensor] = field(default_factory=list)
    targets: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Module or parameter -> (lora_rank, alpha)."""
    named: OutputTargets = field(default_factory=OutputTargets)

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
        AbortedError: reason SOURCE_CHANGED.
        InvalidArgumentError: BAD_OUTPUT (`out` exists, or cannot be written), UNSUPPORTED_ADAPTER (more than pairs of A
            and B, or a layout that nothing reads for this model).
    """
    form = adapter.resolve(model, hints=hints)
    if form.saved or any(pair.magnitude is not None or pair.bias is not None for pair in form.pairs()):
        raise InvalidArgumentError(
            f"{adapter.path} has DoRA's magnitudes, biases or whole modules, which not both layouts can express; "
            "it cannot be converted",
            reason="UNSUPPORTED_ADAPTER",
        )
    if os.path.lexists(out):
        raise InvalidArgumentError(f"{out} exists; expected the name of a new directory", reason="BAD_OUTPUT")
    family = family_of(model.model_type, model.moe_layers[0].gate_up_layout)
    single_experts = layout is ConvertedLayout.PER_EXPERT
    if single_experts and family.per_expert_form is None and form.experts:
        raise InvalidArgumentError(
            f"no checkpoint of {model.model_type} holds a linear map for each expert, so that no tool would read pairs "
            "of single experts for it; use --layout fused",
            reason="UNSUPPORTED_ADAPTER",
        )
    reader = _Reader(adapter)
    draft = _Draft(names=OutputNames.make(model, family, form, single_experts=single_experts))
    _add_dense(draft, form, model, family, reader)
    for moe in model.moe_layers:
        present = {p: form.experts[moe.layer, p] for p in Projection if (moe.layer, p) in form.experts}
        if single_experts:
            _add_per_expert(draft, moe, present, reader)
        else:
            _add_fused(draft, moe, present, family, reader)
    _write(out, draft.tensors, _config(draft, adapter, model))
    return len(draft.tensors)


def _write(out: Path, tensors: Sequence[_Tensor], config: Mapping[str, Any]) -> None:
    """Writes beside `out`, which appears once it is whole."""
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        _write_tensors(partial / WEIGHTS_NAME, tensors)
        (partial / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
        partial.rename(out)
    except OSError as error:
        raise InvalidArgumentError(f"{out} cannot be written: {error.strerror}", reason="BAD_OUTPUT") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class _Reader:
    """Matrices of the file as float32."""

    def __init__(self, adapter: OpenAdapter) -> None:
        self._descriptors = adapter.weights.descriptors

    def matrix(self, region: Region) -> Matrix:
        """The values of a region."""
        tensor = region.tensor
        raw = self._read(tensor)
        if tensor.dtype == "BF16":
            values = (np.frombuffer(raw, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(raw, dtype={"F32": "<f4", "F16": "<f2"}[tensor.dtype]).astype(np.float32)
        return region.view(values.reshape(tensor.num_rows, tensor.num_columns))

    def _read(self, tensor: TensorEntry) -> bytearray:
        """All bytes of a tensor; one call reads 2 GiB at most."""
        raw = bytearray(tensor.size_bytes)
        if read_fully(self._descriptors[tensor.file], memoryview(raw), tensor.offset) < len(raw):
            raise AbortedError(
                f"{tensor.name} ended before its {len(raw)} bytes were read: the file was changed",
                reason="SOURCE_CHANGED",
            )
        return raw


def _add_dense(draft: _Draft, form: NormalForm, model: ModelSpec, family: ModelFamily, reader: _Reader) -> None:
    routers = {} if draft.names.form is not None else _routers(model)
    for module, pair in form.dense.items():
        path = draft.names.path(module)
        is_embedding = module == family.embedding_path
        for side, region in (("A", pair.a), ("B", pair.b)):
            ending = f"lora_embedding_{side}" if is_embedding else f"lora_{side}.weight"
            draft.add(f"{path}.{ending}", region.shape, _reading(reader, region))
        rank_and_alpha = (pair.lora_rank, pair.scale * pair.lora_rank)
        if module in routers:
            draft.targets[f"{path}.weight"] = rank_and_alpha
            draft.named.add_parameter(routers[module], f"{path}.weight")
        else:
            draft.targets[path] = rank_and_alpha
            draft.named.modules.add(path.rpartition(".")[2])


def _routers(model: ModelSpec) -> Mapping[str, int]:
    """Path -> layer. Most are no linear map of the module tree: PEFT adapts them as parameters only."""
    blocks = {block_of(moe.module): moe for moe in model.moe_layers}
    found = {}
    for dense in model.dense_modules:
        moe = blocks.get(block_of(dense.module))
        if moe is not None and (dense.in_features, dense.out_features) == (moe.hidden_size, moe.num_experts):
            found[dense.module] = moe.layer
    return found


def _reading(reader: _Reader, region: Region, rows: slice = slice(None)) -> Callable[[], Matrix]:
    return lambda: reader.matrix(region)[rows]


def _add_per_expert(
    draft: _Draft, moe: MoELayerSpec, present: Mapping[Projection, Mapping[int, LoraPair]], reader: _Reader
) -> None:
    form = draft.names.form
    assert form is not None
    experts = draft.names.path(moe.module)
    for projection, by_expert in present.items():
        parts = (Projection.GATE, Projection.UP) if projection is Projection.GATE_UP else (projection,)
        for expert, pair in by_expert.items():
            for part in parts:
                rows = _rows_of(moe, part) if projection is Projection.GATE_UP else slice(None)
                module = f"{experts}.{expert}.{form.projections[part]}"
                out_features = pair.b.shape[0] // len(parts)
                draft.add(f"{module}.lora_A.weight", pair.a.shape, _reading(reader, pair.a))
                shape = (out_features, pair.lora_rank)
                draft.add(f"{module}.lora_B.weight", shape, _reading(reader, pair.b, rows))
                draft.targets[module] = (pair.lora_rank, pair.scale * pair.lora_rank)
                draft.named.modules.add(form.projections[part])


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
    path = draft.names.path(moe.module)
    for depth, parameter in enumerate(reversed(blocks)):
        by_expert = blocks[parameter]
        lora_rank = max(sum(block.pair.lora_rank for block in parts) for parts in by_expert.values())
        # The most frequent one; not zero, since others are multiples of it.
        scales = Counter(block.pair.scale for parts in by_expert.values() for block in parts if block.pair.scale)
        scale = scales.most_common(1)[0][0] if scales else 0.0
        in_features, out_features = _features(moe, family.stacked_parameters[parameter])
        stack = _Stack(reader, moe.num_experts, by_expert, lora_rank, scale, in_features, out_features)
        sides = (
            ("A", (moe.num_experts * lora_rank, in_features), stack.a),
            ("B", (out_features, moe.num_experts * lora_rank), stack.b),
        )
        if family.stacked_axes is StackedAxes.IN_OUT_UNMARKED:
            # What PEFT has for A is what we call B, for each expert transposed, and the reverse.
            sides = (
                ("A", (moe.num_experts * lora_rank, out_features), stack.b_swapped),
                ("B", (in_features, moe.num_experts * lora_rank), stack.a_swapped),
            )
        for side, shape, make in sides:
            draft.add(f"{path}{'.base_layer' * depth}.lora_{side}.weight", shape, make)
        draft.targets[f"{path}.{parameter}"] = (lora_rank, scale * lora_rank)
        draft.named.add_parameter(moe.layer, f"{path}.{parameter}")


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
        return self._stacked_a().reshape(-1, self.in_features)

    def a_swapped(self) -> Matrix:
        """[in, r*E], the expert fastest."""
        return self._stacked_a().transpose(2, 1, 0).reshape(self.in_features, -1)

    def b(self) -> Matrix:
        """[out, r*E], the expert fastest; a pair of another scale than the common one is multiplied by the quotient."""
        return self._stacked_b().reshape(self.out_features, -1)

    def b_swapped(self) -> Matrix:
        """[E*r, out], the expert slowest; scaled as in `b`."""
        return self._stacked_b().transpose(2, 1, 0).reshape(-1, self.out_features)

    def _stacked_a(self) -> Matrix:
        a_erI = np.zeros((self.num_experts, self.lora_rank, self.in_features), np.float32)
        for expert, parts in self.by_expert.items():
            first = 0
            for block in parts:
                a_erI[expert, first : first + block.pair.lora_rank] = self.reader.matrix(block.pair.a)
                first += block.pair.lora_rank
        return a_erI

    def _stacked_b(self) -> Matrix:
        b_Ore = np.zeros((self.out_features, self.lora_rank, self.num_experts), np.float32)
        for expert, parts in self.by_expert.items():
            first = 0
            for block in parts:
                matrix = self.reader.matrix(block.pair.b)
                if block.pair.scale != self.scale:
                    matrix = matrix * np.float32(block.pair.scale / self.scale)
                b_Ore[block.rows, first : first + block.pair.lora_rank, expert] = matrix
                first += block.pair.lora_rank
        return b_Ore


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


def _config(draft: _Draft, adapter: OpenAdapter, model: ModelSpec) -> dict[str, Any]:
    """adapter_config.json: the most frequent rank and alpha as defaults, patterns for all others."""
    given = json.loads(adapter.config_bytes)
    (lora_rank, alpha), _ = Counter(draft.targets.values()).most_common(1)[0]
    others = {pattern: own for pattern, own in patterns(draft.targets).items() if own != (lora_rank, alpha)}
    parameters = draft.named.target_parameters(frozenset(moe.layer for moe in model.moe_layers))
    return {
        "peft_type": "LORA",
        "task_type": given.get("task_type"),
        "base_model_name_or_path": given.get("base_model_name_or_path"),
        "inference_mode": True,
        "r": lora_rank,
        "lora_alpha": _number(alpha),
        "rank_pattern": {name: rank for name, (rank, _) in others.items() if rank != lora_rank},
        "alpha_pattern": {name: _number(own) for name, (_, own) in others.items() if own != alpha},
        "target_modules": draft.named.target_modules(draft.names.text_path),
        "target_parameters": parameters or None,
        "use_rslora": False,
        "bias": "none",
        "peft_version": _STACKED_VERSION if parameters else given.get("peft_version"),
    }


def _number(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value
