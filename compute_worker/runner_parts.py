"""Chooses and builds the parts of a model runner from the settings."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import structlog
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from compute_worker.checkpoint import ATTENTION_IMPLEMENTATION, EXPERTS_IMPLEMENTATION
from compute_worker.dispatch.all_to_all import AllToAllDispatcher
from compute_worker.dispatch.allgather_reducescatter import AllGatherDispatcher
from compute_worker.dispatch.base import Dispatcher
from compute_worker.dispatch.local import LocalDispatcher
from compute_worker.ep_group import EPGroup
from compute_worker.expert_layer import ExpertLayer, PhysicalExperts, experts_function
from compute_worker.expert_load import ExpertLoad
from compute_worker.experts_base import ExpertBackend, ExpertWeights
from compute_worker.experts_grouped import RANK_MULTIPLE, GroupedBackend
from compute_worker.experts_loop import LoopBackend
from compute_worker.experts_modules import ExpertsTraits, gated_by_silu
from compute_worker.paged_attention import KVCache, KVShape, paged_attention
from compute_worker.state_cache import StateCache, StateShape
from compute_worker.step_context import CurrentStep
from epilora.errors import InvalidArgumentError
from epilora.model_spec import ModelSpec
from epilora.placement import ExpertPlacement
from epilora.settings import WorkerSettings

_CPU_ADAPTER_BYTES = 4 << 30
_CPU_KV_CACHE_BYTES = 256 << 20
_CPU_STATE_CACHE_BYTES = 256 << 20
_GPU_ADAPTER_SHARE = 8
_GPU_KV_CACHE_FRACTION = 0.7
_GPU_STATE_CACHE_FRACTION = 0.35

_log = structlog.get_logger()


def register_functions() -> None:
    """Makes our attention and experts known to transformers, under the names that models are built with."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_IMPLEMENTATION, paged_attention)
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, experts_function)


def make_backend(settings: WorkerSettings, device: torch.device) -> ExpertBackend:
    """The expert backend: grouped on a GPU, the loop on a CPU, unless the settings name one."""
    name = settings.expert_backend
    if name == "auto":
        name = "grouped" if device.type == "cuda" else "loop"
    _log.info("expert backend chosen", backend=name, device=str(device))
    return GroupedBackend() if name == "grouped" else LoopBackend()


def make_dispatcher(settings: WorkerSettings, group: EPGroup) -> Dispatcher:
    """The dispatch backend: local for one rank, allgather_reducescatter for several, unless the settings name one.

    Raises:
        InvalidArgumentError: local dispatch for several ranks.
    """
    name = settings.dispatch_backend
    if name == "auto":
        name = "local" if group.num_ranks == 1 else "allgather_reducescatter"
    if name == "local":
        if group.num_ranks > 1:
            raise InvalidArgumentError(
                f"EPILORA_DISPATCH_BACKEND is local, but there are {group.num_ranks} ranks; use"
                " allgather_reducescatter or all_to_all",
                reason="DISPATCH_BACKEND",
            )
        return LocalDispatcher()
    _log.info("dispatch backend chosen", backend=name, num_ranks=group.num_ranks)
    return AllToAllDispatcher(group) if name == "all_to_all" else AllGatherDispatcher(group)


def rank_multiple_of(backend: ExpertBackend, dtype: torch.dtype) -> int:
    """See AdapterPool: what the backend needs of lora ranks."""
    if not isinstance(backend, GroupedBackend):
        return 0
    return RANK_MULTIPLE if dtype == torch.bfloat16 else 1


def attach_expert_layers(
    model: PreTrainedModel,
    spec: ModelSpec,
    placement: ExpertPlacement,
    *,
    ep_rank: int,
    dispatcher: Dispatcher,
    backend: ExpertBackend,
    current: CurrentStep,
    load: ExpertLoad,
    device: torch.device,
) -> dict[int, ExpertLayer]:
    """Gives each experts module its ExpertLayer; returns them by layer, in the order the model runs them."""
    layers = {}
    for moe in spec.moe_layers:
        module = model.get_submodule(moe.module)
        layers[moe.layer] = ExpertLayer(
            layer=moe.layer,
            weights=weights_of(module),
            scales_input=_traits_of(module).scales_input,
            physical=PhysicalExperts.make(placement, moe.layer, device, ep_rank=ep_rank),
            dispatcher=dispatcher,
            backend=backend,
            current=current,
            counter=load.counter(moe.layer),
        )
        module.epilora_layer = layers[moe.layer]
    return layers


def max_adapter_bytes(settings: WorkerSettings, device: torch.device) -> int:
    """Bytes for adapters."""
    if settings.max_adapter_bytes:
        return settings.max_adapter_bytes
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1] // _GPU_ADAPTER_SHARE
    return _CPU_ADAPTER_BYTES


def make_state_cache(
    settings: WorkerSettings, shapes: Mapping[int, StateShape], *, device: torch.device, adapter_bytes: int
) -> StateCache:
    """Room for the states of as many sequences as may run at once; call it when the weights are there.

    Args:
        shapes: by recurrent layer; without any, no memory is needed.
        adapter_bytes: kept free for adapters (GPU, when the settings leave the size open).

    Raises:
        InvalidArgumentError: not room for one sequence.
    """
    place_bytes = StateCache.place_bytes(shapes)
    num_places = settings.max_num_sequences
    if place_bytes:
        available = settings.state_cache_bytes
        if available == 0 and device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            available = int((free - adapter_bytes) * _GPU_STATE_CACHE_FRACTION)
        elif available == 0:
            available = _CPU_STATE_CACHE_BYTES
        num_places = min(num_places, available // place_bytes)
        if num_places < 1:
            raise InvalidArgumentError(
                f"{available} bytes are left for the states of recurrent layers on {device}, but those of one sequence"
                f" take {place_bytes}; lower EPILORA_MAX_ADAPTER_BYTES, or raise EPILORA_STATE_CACHE_BYTES",
                reason="STATE_CACHE_TOO_SMALL",
                metadata={"available_bytes": available, "sequence_bytes": place_bytes},
            )
        if num_places < settings.max_num_sequences:
            _log.warning(
                "fewer sequences run at once than EPILORA_MAX_NUM_SEQUENCES allows: their states need the room",
                max_num_sequences=num_places,
                wanted=settings.max_num_sequences,
                sequence_bytes=place_bytes,
                available_bytes=available,
            )
    return StateCache(shapes=shapes, num_places=num_places, device=device)


def make_kv_cache(
    settings: WorkerSettings,
    shapes: Mapping[int, KVShape],
    *,
    dtype: torch.dtype,
    device: torch.device,
    adapter_bytes: int,
) -> KVCache:
    """The key/value cache; call it when the weights are there.

    Args:
        shapes: by layer, see KVCache.
        adapter_bytes: kept free for adapters (GPU, when the settings leave the size open).

    Raises:
        InvalidArgumentError: not room for one block.
    """
    block_bytes = KVCache.block_bytes(shapes=shapes, block_size=settings.kv_block_size, dtype=dtype)
    available = settings.kv_cache_bytes
    if available == 0 and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        available = int((free - adapter_bytes) * _GPU_KV_CACHE_FRACTION)
    elif available == 0:
        available = _CPU_KV_CACHE_BYTES
    # One slot more than the blocks hold stands for padding.
    num_blocks = (available - block_bytes // settings.kv_block_size) // block_bytes
    if num_blocks < 1:
        raise InvalidArgumentError(
            f"{available} bytes are left for the key/value cache on {device}, but one block takes {block_bytes}; lower"
            " EPILORA_MAX_ADAPTER_BYTES, or raise EPILORA_KV_CACHE_BYTES",
            reason="KV_CACHE_TOO_SMALL",
            metadata={"available_bytes": available, "block_bytes": block_bytes},
        )
    return KVCache(shapes=shapes, num_blocks=num_blocks, block_size=settings.kv_block_size, dtype=dtype, device=device)


def _traits_of(module: nn.Module) -> ExpertsTraits:
    traits = ExpertsTraits.of(module)
    assert traits is not None, type(module)
    return traits


def weights_of(module: nn.Module) -> ExpertWeights:
    """The local slots' weights and activation of one of transformers' experts modules."""
    traits = _traits_of(module)
    parameters = {name: parameter.data for name, parameter in module.named_parameters()}
    first, down = parameters[traits.first_name], parameters["down_proj"]
    if traits.is_transposed:
        first, down = first.transpose(1, 2), down.transpose(1, 2)
    gate = module._apply_gate if hasattr(module, "_apply_gate") else partial(gated_by_silu, module)
    if not traits.has_gate:
        gate = module.act_fn
    assert callable(gate)
    return ExpertWeights(
        gate_up_eHD=first,
        down_eDF=down,
        gate=gate,
        layout=traits.layout,
        gate_up_bias_eH=parameters.get(f"{traits.first_name}_bias"),
        down_bias_eD=parameters.get("down_proj_bias"),
    )
