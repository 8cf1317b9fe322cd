"""Builds transformers' model with this rank's experts only, and fills it from a checkpoint or with random weights.

The model is built without memory (meta device). The experts' parameters, all [E, ...], are replaced by the local slots'
[e, ...]; then everything gets memory once, and each weight is copied from the mapped file straight into its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from compute_worker.checkpoint_experts import (
    ExpertParameter,
    ExpertReader,
    FillExpert,
    Role,
    check_shape,
    copy_tensor,
    draw,
    fill_from,
    random_expert,
)
from compute_worker.checkpoint_files import CheckpointFiles
from compute_worker.checkpoint_keys import CheckpointPlan, plan_checkpoint
from compute_worker.expert_shard import WHOLE, ExpertShard
from compute_worker.experts_modules import ExpertsTraits, shape_of
from compute_worker.model_description import build_without_memory
from compute_worker.process_memory import used_bytes
from compute_worker.quantized_files import open_weights
from epilora.errors import InvalidArgumentError
from epilora.load_spec import MoEEPLoadSpec
from epilora.model_spec import MoELayerSpec
from epilora.settings import WorkerSettings

ATTENTION_IMPLEMENTATION = "epilora_paged"
EXPERTS_IMPLEMENTATION = "epilora"

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model that is ready to run, but for the attention and experts functions.

    Attributes:
        model: transformers' causal language model, in evaluation mode.
        dtype: of its weights.
        base_expert_bytes: of the local slots' weights.
        base_dense_bytes: of all other weights and tables.
        base_expert_growth_bytes: growth of the process's memory (CPU) or of live device memory (GPU) while the
            experts were read.
        experts: the experts' parameters, by name.
        reader: for experts that come here later.
    """

    model: PreTrainedModel
    dtype: torch.dtype
    base_expert_bytes: int
    base_dense_bytes: int
    base_expert_growth_bytes: int
    experts: Mapping[str, ExpertParameter]
    reader: ExpertReader


_ROLES = {"down_proj": Role.DOWN, "down_proj_bias": Role.DOWN_BIAS}
_FillDense = Callable[[set[str], torch.Tensor], None]


def load_model(
    settings: WorkerSettings, load_spec: MoEEPLoadSpec, device: torch.device, shard: ExpertShard = WHOLE
) -> LoadedModel:
    """Builds and fills the model, with this rank's part of the local experts.

    Raises:
        NotFoundError: no config.json or weight files.
        InvalidArgumentError: the weights do not fit config.json, some are missing, or they are broken.
    """
    config = AutoConfig.from_pretrained(settings.model)
    dtype = _dtype_of(settings.dtype, config)
    model = build_without_memory(
        settings.model,
        attn_implementation=ATTENTION_IMPLEMENTATION,
        experts_implementation=EXPERTS_IMPLEMENTATION,
        dtype=dtype,
    )
    _keep_in_float32(model, dtype)
    model.tie_weights()
    model.requires_grad_(False).eval()
    experts = _expert_parameters(model, load_spec, shard)
    if settings.load_format == "random":
        growth = _fill(model, experts, device, random_dense, random_expert)
        shapes = {name: parameter.full_shape for name, parameter in experts.items()}
        reader = ExpertReader(directory=settings.model, quantization=None, plan=None, identity=(), full_shapes=shapes)
    else:
        quantization = getattr(config, "quantization_config", None)
        growth, reader = _fill_from_files(settings.model, quantization, model, experts, device)
    expert_bytes = sum(parameter.local().nbytes for parameter in experts.values())
    expected = sum(
        torch.Size(parameter.slot_shape()).numel() * len(parameter.local_experts) * dtype.itemsize
        for parameter in experts.values()
    )
    assert expert_bytes == expected, (expert_bytes, expected)
    loaded = LoadedModel(
        model=model,
        dtype=dtype,
        base_expert_bytes=expert_bytes,
        base_dense_bytes=_unique_bytes(model) - expert_bytes,
        base_expert_growth_bytes=growth,
        experts=experts,
        reader=reader,
    )
    _log.info(
        "weights loaded",
        dtype=str(dtype),
        expert_bytes=loaded.base_expert_bytes,
        dense_bytes=loaded.base_dense_bytes,
        expert_growth_bytes=growth,
    )
    return loaded


def _dtype_of(wanted: str, config: object) -> torch.dtype:
    if wanted != "auto":
        return _DTYPES[wanted]
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _keep_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """What transformers' own loading keeps in float32 whatever the model's dtype is, such as biases of routers."""
    patterns = list(model._get_dtype_plan(dtype))
    if not patterns:
        return
    expression, _, _ = build_glob_alternation(patterns)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if expression.search(name) and tensor.is_floating_point():
            tensor.data = tensor.data.float()


def _expert_parameters(
    model: PreTrainedModel, load_spec: MoEEPLoadSpec, shard: ExpertShard
) -> dict[str, ExpertParameter]:
    """The 3D expert parameters by name, checked against the load spec."""
    found = {}
    for layer in load_spec.layers:
        moe = layer.moe
        module = model.get_submodule(moe.module)
        traits = ExpertsTraits.of(module)
        if traits is None or traits.layout is not moe.gate_up_layout:
            raise _unsupported_experts(model, moe, f"is {type(module).__name__}, stored as {traits}")
        shape = shape_of(moe.module, module, traits)
        if (shape.num_experts, shape.hidden_size, shape.intermediate_size) != (
            moe.num_experts,
            moe.hidden_size,
            moe.intermediate_size,
        ):
            raise _unsupported_experts(model, moe, f"has the sizes {shape}")
        for name, parameter in module.named_parameters():
            found[f"{moe.module}.{name}"] = ExpertParameter(
                layer=moe.layer,
                owner=module,
                attribute=name,
                local_experts=layer.local_experts,
                full_shape=tuple(parameter.shape),
                role=_ROLES.get(name, Role.FIRST),
                split_dim=_split_dim(name, is_matrix=parameter.dim() == 3, is_transposed=traits.is_transposed),
                layout=traits.layout,
                shard=shard,
            )
    return found


def _split_dim(name: str, *, is_matrix: bool, is_transposed: bool) -> int:
    """See ExpertParameter.split_dim: down is [D, F], the first projection [H, D], or both the other way round."""
    return int(is_matrix and (name == "down_proj") != is_transposed)


def _unsupported_experts(model: nn.Module, moe: MoELayerSpec, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{moe.module} of {type(model).__name__} {what}, expected {moe}; this family's experts cannot be served",
        reason="UNSUPPORTED_EXPERTS",
    )


def _fill_from_files(
    directory: Path,
    quantization: object,
    model: PreTrainedModel,
    experts: dict[str, ExpertParameter],
    device: torch.device,
) -> tuple[int, ExpertReader]:
    """Fills everything from the files; returns the growth of memory while experts were read, bytes, and a reader."""
    full_shapes = {name: parameter.full_shape for name, parameter in experts.items()}
    with CheckpointFiles(directory) as mapped:
        files = open_weights(mapped, directory, quantization)
        plan = plan_checkpoint(model, files.keys(), full_shapes)
        _check_complete(plan, model, experts)

        def fill_dense(names: set[str], parameter: torch.Tensor) -> None:
            # Of tied names, a checkpoint may hold one only.
            name = min(names & plan.dense.keys())
            keys = plan.dense[name]
            if len(keys) == 1:
                copy_tensor(files, keys[0], parameter, name)
                return
            whole = torch.cat([files.tensor(key) for key in keys])
            check_shape(" and ".join(keys), tuple(whole.shape), tuple(parameter.shape), name)
            parameter.copy_(whole)

        growth = _fill(model, experts, device, fill_dense, fill_from(files, plan, full_shapes))
        reader = ExpertReader(
            directory=directory,
            quantization=quantization,
            plan=plan,
            identity=mapped.identity,
            full_shapes=full_shapes,
        )
        return growth, reader


def _check_complete(plan: CheckpointPlan, model: PreTrainedModel, experts: dict[str, ExpertParameter]) -> None:
    """Raises unless the plan has a key for every parameter and stored table, and every part of every local expert."""
    missing = [name for names in _shared_names(model, experts) if not (names & plan.dense.keys()) for name in names]
    for name, parameter in experts.items():
        if name in plan.fused_experts:
            continue
        for expert in sorted(set(parameter.local_experts)):
            parts = plan.expert_parts.get((name, expert), [])
            if not parts or [part.index for part in parts] != list(range(parts[0].num_parts)):
                missing.append(f"{name}[{expert}]")
    if missing:
        raise InvalidArgumentError(
            f"The checkpoint lacks the weights of {len(missing)} parameters: {', '.join(sorted(missing)[:8])}; copy it"
            " again, all files of it",
            reason="MISSING_WEIGHT",
            metadata={"num_missing": len(missing)},
        )


def _shared_names(model: PreTrainedModel, experts: dict[str, ExpertParameter]) -> list[set[str]]:
    """Names of each parameter and stored table that is no expert's; tied ones together."""
    names: dict[int, set[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        if name not in experts:
            names.setdefault(id(tensor), set()).add(name)
    stored = model.state_dict(keep_vars=True)
    for name, tensor in model.named_buffers(remove_duplicate=False):
        if name in stored:
            names.setdefault(id(tensor), set()).add(name)
    return list(names.values())


def _fill(
    model: PreTrainedModel,
    experts: dict[str, ExpertParameter],
    device: torch.device,
    fill_dense: _FillDense,
    fill_expert: FillExpert,
) -> int:
    """Gives every parameter and table its memory and value; returns the experts' growth of memory, bytes."""
    for names in _shared_names(model, experts):
        shared = None
        for name in sorted(names):
            owner, attribute = _owner_of(model, name)
            if shared is None:
                meta = getattr(owner, attribute)
                shared = torch.empty(meta.shape, dtype=meta.dtype, device=device)
                if isinstance(meta, nn.Parameter):
                    shared = nn.Parameter(shared, requires_grad=False)
            setattr(owner, attribute, shared)
        assert shared is not None
        fill_dense(names, shared)
    _compute_tables(model, device)
    before = used_bytes(device)
    for name, parameter in experts.items():
        shape = (len(parameter.local_experts), *parameter.slot_shape())
        weight = torch.empty(shape, dtype=parameter.local().dtype, device=device)
        for slot, expert in enumerate(parameter.local_experts):
            parameter.fill(fill_expert, name, expert, weight[slot])
        setattr(parameter.owner, parameter.attribute, nn.Parameter(weight, requires_grad=False))
    assert not any(parameter.is_meta for parameter in model.parameters())
    return used_bytes(device) - before


def _compute_tables(model: PreTrainedModel, device: torch.device) -> None:
    """Makes the tables that no checkpoint holds (rotary frequencies), by the model's own code."""
    for module in _modules_with_tables(model):
        names = _computed_tables(module)
        for name in names:
            table = module._buffers[name]
            assert table is not None
            module._buffers[name] = torch.zeros(table.shape, dtype=table.dtype, device=device)
        for parameter in module.parameters(recurse=False):
            # What transformers' own loading says of weights that are there already.
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        model._init_weights(module)
        empty = [name for name in names if not module._buffers[name].any()]  # type: ignore[union-attr]
        if empty:
            raise InvalidArgumentError(
                f"Tables {', '.join(empty)} of {type(module).__name__} are stored in no checkpoint, and transformers"
                " does not compute them; this family cannot be served",
                reason="UNSUPPORTED_MODEL",
            )


def _modules_with_tables(model: PreTrainedModel) -> Iterator[nn.Module]:
    for module in model.modules():
        if _computed_tables(module):
            yield module


def _computed_tables(module: nn.Module) -> list[str]:
    """Names of a module's own tables that no checkpoint holds."""
    return [
        name
        for name, buffer in module._buffers.items()
        if buffer is not None and name in module._non_persistent_buffers_set
    ]


def _owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def random_dense(names: set[str], parameter: torch.Tensor) -> None:
    """Draws a weight; the same values for a name in every process. Norms are one, biases zero."""
    name = min(names)
    if parameter.dim() == 1:
        parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    else:
        draw(name, parameter)


def _unique_bytes(model: PreTrainedModel) -> int:
    """Bytes of all parameters and tables, each storage once."""
    storages = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr(), storage.nbytes()] = storage.nbytes()
    return sum(storages.values())
