"""The rotary embedding of a model's attention, replaced by one kernel where the kernel is shown to compute the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import nn

from compute_worker.kernels.rotary import rotary

_NAME = "apply_rotary_pos_emb"
Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def replace_rotary(model: nn.Module) -> bool:
    """Makes the model's family compute apply_rotary_pos_emb with the fused kernel; returns whether it does.

    The function belongs to the module of the family's code, so every model of that family in the process changes;
    calls that the kernel does not cover (dtypes that differ, another device) still run the original. It is replaced
    only if its results on random heads equal the kernel's to the last bit, which other rotations (interleaved pairs,
    sections) do not. False where there is no such function, too.
    """
    code = sys.modules[type(model).__module__]
    original = getattr(code, _NAME, None)
    if original is None or isinstance(original, _FusedRotary):
        return original is not None
    parameter = next(model.parameters())
    if not _agrees(original, parameter.device, parameter.dtype):
        return False
    setattr(code, _NAME, _FusedRotary(original, parameter.device.type))
    return True


class _FusedRotary:
    """Stands for a family's function."""

    def __init__(self, original: Rotary, device_type: str) -> None:
        self._original = original
        self._device_type = device_type

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See rotary. A fifth argument by place means different things in different families."""
        one_dtype = q.dtype == k.dtype == cos.dtype == sin.dtype
        contiguous = all(x.stride(-1) == 1 for x in (q, k, cos, sin))
        plain = not args and kwargs.keys() <= {"unsqueeze_dim"} and (q.dim(), cos.dim()) == (4, 3)
        if q.device.type == self._device_type and one_dtype and contiguous and plain:
            return rotary(q, k, cos, sin, **kwargs)
        return self._original(q, k, cos, sin, *args, **kwargs)


def _agrees(original: Rotary, device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        return False
    g = torch.Generator().manual_seed(0)

    def heads(number: int) -> torch.Tensor:
        return torch.randn((1, 5, number, 32), generator=g).to(device, dtype).transpose(1, 2)

    q, k = heads(3), heads(2)
    cos, sin = (torch.rand((1, 5, 32), generator=g).to(device, dtype) * 2 - 1 for _ in range(2))
    try:
        expected = original(q, k, cos, sin)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False  # another signature, or other shapes of cos and sin
    got = rotary(q, k, cos, sin)
    return len(expected) == 2 and all(
        isinstance(theirs, torch.Tensor) and theirs.dtype == ours.dtype and torch.equal(theirs, ours)
        for theirs, ours in zip(expected, got, strict=True)
    )
