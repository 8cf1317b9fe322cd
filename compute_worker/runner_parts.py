"""Chooses and builds the parts of a model runner from the settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import structlog
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from compute_worker.checkpoint import ATTENTION_IMPLEMENTATION, EXPERTS_IMPLEMENTATION
from compute_worker.dispatch.base import Dispatcher
from compute_worker.dispatch.packed_rows import HAS_TRITON
from compute_worker.expert_layer import ExpertLayer, PhysicalExperts, experts_function
from compute_worker.expert_load import ExpertLoad
from compute_worker.experts_base import ExpertWeights, LayerExperts
from compute_worker.experts_grouped import RANK_MULTIPLE, GroupedBackend
from compute_worker.experts_loop import LoopBackend
from compute_worker.experts_modules import ExpertsTraits, gated_by_silu
from compute_worker.experts_torch import TorchLayerExperts
from compute_worker.kv_cache import KVCache, KVShape
from compute_worker.paged_attention import paged_attention
from compute_worker.registered_slices import CudaRegistrar, RegisteredSlices
from compute_worker.state_cache import StateCache, StateShape
from compute_worker.step_context import CurrentStep
from epilora.errors import InvalidArgumentError
from epilora.model_spec import ModelSpec
from epilora.placement import ExpertPlacement
from epilora.settings import WorkerSettings

MAX_KERNEL_RANK = 512
"""Largest lora rank that the Triton kernels compute."""
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


def make_registered(settings: WorkerSettings, device: torch.device) -> RegisteredSlices | None:
    """Keeps slice files of the cache registered with a GPU; None where that is turned off, or on a CPU."""
    if device.type != "cuda" or not settings.pinned_cache_bytes:
        return None
    return RegisteredSlices(CudaRegistrar(device), max_bytes=settings.pinned_cache_bytes)


def compute_exactly() -> None:
    """Products on a GPU accumulate in float32, and float32 ones take float32 inputs."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def check_backend(settings: WorkerSettings, device: torch.device) -> None:
    """What can be said of the expert backend before weights are read.

    Raises:
        InvalidArgumentError: triton was asked for, and the kernels cannot run here.
    """
    settings.check_expert_backend(_why_no_kernels(settings, device))


def choose_backend(settings: WorkerSettings, model: PreTrainedModel, spec: ModelSpec, device: torch.device) -> str:
    """Name of the expert backend; auto: on a GPU triton, or grouped where the kernels do not fit, and loop on a CPU.

    Raises:
        InvalidArgumentError: triton was asked for, and the kernels do not fit the model.
    """
    name = settings.expert_backend
    if name == "auto" and device.type != "cuda":
        name = "loop"
    if name in ("auto", "triton"):
        layers = [weights_of(model.get_submodule(moe.module)) for moe in spec.moe_layers]
        why_not = _why_no_kernels(settings, device) or _why_not_triton(layers)
        settings.check_expert_backend(why_not)
        if why_not:
            _log.warning("the fused expert kernels cannot be used; expert steps are slower", why=why_not)
        name = "grouped" if why_not else "triton"
    _log.info("expert backend chosen", backend=name, device=str(device))
    return name


def _why_no_kernels(settings: WorkerSettings, device: torch.device) -> str:
    if not HAS_TRITON:
        return "triton is not installed"
    return settings.why_no_kernels(on_gpu=device.type == "cuda")


def _why_not_triton(layers: list[ExpertWeights]) -> str:
    from compute_worker.experts_triton import activation_of, why_not

    return next((why for weights in layers if (why := why_not(weights, activation_of(weights)))), "")


MakeExperts = Callable[[nn.Module, int], LayerExperts]
"""(one of transformers' experts modules, experts that its router chooses among) -> the local experts of the layer."""


def make_experts(name: str, settings: WorkerSettings) -> MakeExperts:
    """Makes the local experts of a layer from what the module holds, for a backend by name."""
    if name == "triton":
        from compute_worker.experts_triton import TritonLayerExperts, activation_of

        def make(module: nn.Module, num_routed_experts: int) -> LayerExperts:
            _lay_out_by_rows(module)
            weights = weights_of(module, num_routed_experts)
            activation = activation_of(weights)
            assert activation is not None
            return TritonLayerExperts(weights, activation, settings.num_adapter_slots)

        return make
    backend = GroupedBackend() if name == "grouped" else LoopBackend()
    return lambda module, num_routed_experts: TorchLayerExperts(weights_of(module, num_routed_experts), backend)


def use_fused_ops(model: PreTrainedModel, backend: str, device: torch.device) -> None:
    """Norms and rotary embeddings by one kernel each, on a GPU with the triton backend, where they compute the same."""
    if backend != "triton" or device.type != "cuda":
        return
    from compute_worker.fused_norms import replace_rms_norms
    from compute_worker.fused_rotary import replace_rotary

    _log.info("fused operations", norms=replace_rms_norms(model), rotary=replace_rotary(model))


def rank_multiple_of(backend: str, dtype: torch.dtype) -> int:
    """See AdapterPool: what the backend needs of lora ranks."""
    if backend != "grouped":
        return 0
    return RANK_MULTIPLE if dtype == torch.bfloat16 else 1


def attach_expert_layers(
    model: PreTrainedModel,
    spec: ModelSpec,
    placement: ExpertPlacement,
    *,
    placement_rank: int,
    dispatcher: Dispatcher,
    make: MakeExperts,
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
            experts=make(module, moe.num_experts),
            scales_input=_traits_of(module).scales_input,
            physical=PhysicalExperts.make(placement, moe.layer, device, ep_rank=placement_rank),
            dispatcher=dispatcher,
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
        # One place more than there are sequences is spare.
        num_places = min(num_places, available // place_bytes - 1)
        if num_places < 1:
            raise InvalidArgumentError(
                f"{available} bytes are left for the states of recurrent layers on {device}, but those of one sequence,"
                f" and as much to spare, take {2 * place_bytes}; lower EPILORA_MAX_ADAPTER_BYTES, or raise"
                " EPILORA_STATE_CACHE_BYTES",
                reason="STATE_CACHE_TOO_SMALL",
                metadata={"available_bytes": available, "needed_bytes": 2 * place_bytes},
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
    # Two slots more than the blocks hold: padding, and the spare one.
    num_blocks = (available - 2 * block_bytes // settings.kv_block_size) // block_bytes
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


def weights_of(module: nn.Module, num_routed_experts: int = 0) -> ExpertWeights:
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
        num_routed_experts=num_routed_experts,
        clamp=_clamp_of(module),
    )


def _clamp_of(module: nn.Module) -> tuple[float, float] | None:
    alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
    if isinstance(alpha, int | float) and isinstance(limit, int | float):
        return float(alpha), float(limit)
    return None


def _lay_out_by_rows(module: nn.Module) -> None:
    """Stores transposed expert weights [e, in, out] by output row, as kernels read them; their shape stays.

    Needs memory for one parameter more while it runs.
    """
    traits = _traits_of(module)
    if traits.is_transposed:
        for name in (traits.first_name, "down_proj"):
            parameter = getattr(module, name)
            parameter.data = parameter.data.transpose(1, 2).contiguous().transpose(1, 2)
