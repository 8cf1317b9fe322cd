"""Adapters that this worker's way of computing does not serve, found when they are staged."""

from __future__ import annotations

import torch

from compute_worker.adapter_buffers import AdapterTensors
from compute_worker.slice_reader import AdapterSlice
from epilora.errors import InvalidArgumentError


def check_backend(
    name: str, source: AdapterSlice, *, num_shards: int, has_expert_gains: bool, max_lora_rank: int
) -> None:
    """Checks what the expert backend must be able to do.

    Args:
        name: of the adapter.
        source: its slice.
        num_shards: ranks that share each expert's width.
        has_expert_gains: whether the backend computes DoRA of experts.
        max_lora_rank: largest that it computes; 0: any.

    Raises:
        InvalidArgumentError: DoRA on routed experts, or a lora rank, beyond it.
    """
    why = ""
    if num_shards > 1:
        why = "of which a rank holds parts, so that none knows a row's norm; serve it with EPILORA_EXPERT_TP=1"
    elif not has_expert_gains:
        why = "which the fused kernels do not compute; serve it with EPILORA_EXPERT_BACKEND=grouped"
    if why and any(part.magnitude is not None for part in source.experts):
        raise InvalidArgumentError(
            f"Adapter {name} has DoRA on routed experts, {why}",
            reason="UNSUPPORTED_ADAPTER",
        )
    ranks = [rank for part in source.experts for rank in part.lora_rank]
    largest = max([*ranks, *(part.a.shape[0] for part in source.dense)], default=0)
    if max_lora_rank and largest > max_lora_rank:
        raise InvalidArgumentError(
            f"Adapter {name} has lora rank {largest}, the fused kernels take up to {max_lora_rank}; serve it with"
            " EPILORA_EXPERT_BACKEND=grouped",
            reason="LORA_RANK_TOO_LARGE",
            metadata={"lora_rank": largest, "max_lora_rank": max_lora_rank},
        )


def check_finite(name: str, tensors: AdapterTensors, dtype: torch.dtype) -> None:
    """A cast to a narrower type may overflow; an infinite weight would reach other requests' rows as 0 * inf."""
    if not all(bool(buffer.isfinite().all()) for buffer in tensors.buffers):
        raise InvalidArgumentError(
            f"Adapter {name} has weights beyond the range of {dtype}, the type it would be served in; serve it with"
            " EPILORA_ADAPTER_DTYPE=file, or the model in bfloat16 or float32",
            reason="ADAPTER_OVERFLOWS",
            metadata={"dtype": str(dtype)},
        )
