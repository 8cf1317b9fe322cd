"""Which way tokens travel: by the settings, or by measuring at start."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import structlog
import torch
import torch.distributed as dist

from compute_worker.dispatch.all_to_all import AllToAllDispatcher
from compute_worker.dispatch.allgather_reducescatter import AllGatherDispatcher
from compute_worker.dispatch.base import Dispatcher
from compute_worker.dispatch.local import LocalDispatcher
from compute_worker.dispatch.peer_memory import PeerMemory, why_no_peer_memory
from compute_worker.ep_group import EPGroup
from epilora.errors import InvalidArgumentError
from epilora.model_spec import ModelSpec
from epilora.settings import WorkerSettings

_DECODE_ROWS = 64
_CALLS, _REPLAYS, _WARM_UP = 10, 10, 3
_NUM_EXTRAS = 1

_log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSizes:
    """What a model's rows are.

    Attributes:
        hidden: D, the largest of all layers.
        dtype: of hidden states.
        top_k: K.
        max_rows: rows of one rank in a step, at most; steps with more take another way.
    """

    hidden: int
    dtype: torch.dtype
    top_k: int
    max_rows: int

    @classmethod
    def of(cls, settings: WorkerSettings, model: ModelSpec, dtype: torch.dtype) -> RowSizes:
        """A model's, for the steps that the settings allow."""
        return cls(
            hidden=max(moe.hidden_size for moe in model.moe_layers),
            dtype=dtype,
            top_k=model.num_experts_per_token,
            # Decode steps are padded to a power of two.
            max_rows=max(settings.max_num_batched_tokens, 1 << (settings.max_num_sequences - 1).bit_length()),
        )


def make_dispatcher(settings: WorkerSettings, group: EPGroup, sizes: RowSizes) -> Dispatcher:
    """The dispatch backend that the settings name. All ranks call it together.

    auto: local for one rank; for several, one_sided where the ranks can write into each other's memory and it is the
    faster one there, else allgather_reducescatter.

    Raises:
        InvalidArgumentError: local dispatch for several ranks, or one_sided where it cannot be.
    """
    name = settings.dispatch_backend
    if name == "local" and group.num_ranks > 1:
        raise InvalidArgumentError(
            f"EPILORA_DISPATCH_BACKEND is local, but there are {group.num_ranks} ranks; use auto, one_sided,"
            " allgather_reducescatter or all_to_all",
            reason="DISPATCH_BACKEND",
        )
    if name == "local" or (name == "auto" and group.num_ranks == 1):
        return LocalDispatcher()
    if name == "all_to_all":
        chosen: Dispatcher = AllToAllDispatcher(group)
    elif name == "allgather_reducescatter":
        chosen = AllGatherDispatcher(group)
    else:
        chosen = _one_sided_if(settings, group, sizes)
    _log.info("dispatch backend chosen", backend=type(chosen).__name__, num_ranks=group.num_ranks)
    return chosen


def _one_sided_if(settings: WorkerSettings, group: EPGroup, sizes: RowSizes) -> Dispatcher:
    """For one_sided and auto."""
    asked = settings.dispatch_backend == "one_sided"
    all_gather = AllGatherDispatcher(group)
    problem = why_no_peer_memory(group)
    if problem and asked:
        raise InvalidArgumentError(
            f"EPILORA_DISPATCH_BACKEND is one_sided, which needs GPUs of one host that reach each other's memory, but"
            f" {problem}; use auto, allgather_reducescatter or all_to_all",
            reason="NO_PEER_MEMORY",
        )
    if problem:
        _log.info("one-sided dispatch is not possible", why=problem)
        return all_gather
    one_sided = _open_one_sided(group, sizes, overflow=all_gather)
    if asked:
        return one_sided
    times_us = {
        name: decode_us(group, dispatcher, sizes)
        for name, dispatcher in (("one_sided", one_sided), ("allgather_reducescatter", all_gather))
    }
    _log.info("dispatch backends measured", **{name: round(us, 1) for name, us in times_us.items()})
    return one_sided if times_us["one_sided"] < times_us["allgather_reducescatter"] else all_gather


def _open_one_sided(group: EPGroup, sizes: RowSizes, *, overflow: Dispatcher) -> Dispatcher:
    # Its kernels are there only where triton is.
    from compute_worker.dispatch.one_sided import OneSidedDispatcher

    num_bytes = OneSidedDispatcher.num_bytes(
        num_ranks=group.num_ranks,
        num_rows=sizes.max_rows,
        hidden=sizes.hidden,
        element_bytes=sizes.dtype.itemsize,
        top_k=sizes.top_k,
        num_extras=_NUM_EXTRAS,
    )
    return OneSidedDispatcher(group, PeerMemory.open(group, num_bytes), overflow=overflow)


@torch.inference_mode()
def decode_us(group: EPGroup, dispatcher: Dispatcher, sizes: RowSizes) -> float:
    """Microseconds of one layer's dispatch and combine in a replayed decode step, of the slowest rank, on all ranks."""
    num_rows = min(_DECODE_ROWS, sizes.max_rows)
    rank_offsets = [rank * sizes.top_k for rank in range(group.num_ranks // group.expert_tp + 1)]
    generator = torch.Generator().manual_seed(group.ep_rank)
    x_TD = torch.randn((num_rows, sizes.hidden), generator=generator).to(group.device, sizes.dtype)
    chosen_TK = torch.rand((num_rows, rank_offsets[-1]), generator=generator).argsort(dim=1)[:, : sizes.top_k]
    expert_TK = chosen_TK.contiguous().to(group.device)
    weight_TK = torch.rand((num_rows, sizes.top_k), generator=generator).to(group.device)
    extras = {"adapter_slot": torch.zeros(num_rows, dtype=torch.int32, device=group.device)}

    def layer() -> None:
        arrived, handle = dispatcher.dispatch(
            x_TD,
            expert_TK,
            weight_TK,
            extras,
            rank_offsets=rank_offsets,
            num_tokens_per_rank=[num_rows] * group.num_ranks,
        )
        dispatcher.combine(arrived.x_ND, handle)

    for _ in range(_WARM_UP):
        layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_CALLS):
            layer()
    times = []
    for _ in range(_WARM_UP + _REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / _CALLS)
    slowest = torch.tensor(statistics.median(times[_WARM_UP:]))
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group.control_group)
    return float(slowest)
