"""RMS norms of a model, replaced by one kernel each where the kernel is shown to compute the same.

Model families write the norm each in a class of their own, alike but for details that change results: where they
round, whether the weight is added to one, what eps is called. So nothing is assumed from names: every candidate runs
beside the kernel on random rows, and only those that agree are replaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch
import triton
from torch import nn

from compute_worker.kernels.rms_norm import rms_norm

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_PROBE_SCALES = (1.0, 1e-3, 30.0)
_PROBE_ROWS = 4
_MAX_UNEQUAL = 0.01
"""At most this part of results of half precision may be the next number: sums are taken in another order."""


def replace_rms_norms(model: nn.Module) -> int:
    """Makes modules that are RMS norms compute with the fused kernel; returns how many.

    A module is replaced if it has a weight [D], an eps and a forward of one argument, and if its results on random rows
    of three magnitudes equal the kernel's but for the last bit of few of them. The weights must be loaded, and on the
    device where the model will run; where kernels cannot run there (a CPU without Triton's interpreter) none is.
    """
    with torch.no_grad():
        chosen = [(module, round_first) for module in model.modules() for round_first in _agreeing(module)]
    for module, round_first in chosen:
        module.forward = _FusedForward(module, round_first)
    return len(chosen)


class _FusedForward:
    """A norm's forward on the kernel; reads the weight at each call, as the module's own forward does."""

    def __init__(self, module: nn.Module, round_first: bool) -> None:
        # Not the module itself, or it would hold itself: its forward is this object.
        self._parameters = module._parameters
        self._eps = _eps(module)
        self._round_first = round_first

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The normalised rows."""
        weight = self._parameters["weight"]
        assert weight is not None
        rows = hidden_states if hidden_states.stride(-1) == 1 else hidden_states.contiguous()
        return rms_norm(rows, weight, self._eps, round_first=self._round_first)


def _eps(module: nn.Module) -> float:
    """0.0 if the module has none."""
    found = (getattr(module, name, None) for name in _EPS_NAMES)
    return next((value for value in found if isinstance(value, float)), 0.0)


def _agreeing(module: nn.Module) -> Iterator[bool]:
    """The first `round_first` with which the kernel computes what the module does; nothing if there is none."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not weight.is_contiguous() or not _eps(module):
        return
    if len(inspect.signature(module.forward).parameters) != 1 or not _kernels_run_on(weight.device):
        return
    # Where weights are fp32, rows of half precision show where the module rounds.
    dtypes = {weight.dtype, torch.float16} if weight.dtype == torch.float32 else {weight.dtype}
    probes = [_probe(weight, scale, dtype) for scale in _PROBE_SCALES for dtype in dtypes]
    for round_first in (True, False):
        if all(_same(module(x), rms_norm(x, weight, _eps(module), round_first=round_first)) for x in probes):
            yield round_first
            return


def _kernels_run_on(device: torch.device) -> bool:
    return device.type == "cuda" or bool(triton.knobs.runtime.interpret)


def _probe(weight: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    return (torch.randn((_PROBE_ROWS, weight.shape[0]), generator=g) * scale).to(weight.device, dtype)


def _same(expected: torch.Tensor, got: torch.Tensor) -> bool:
    """True if both are equal but for sums taken in another order."""
    if expected.dtype != got.dtype or expected.shape != got.shape:
        return False
    # The next number of a dtype is at most eps times the larger one away. fp32 shows the order of sums everywhere.
    eps, single = torch.finfo(got.dtype).eps, got.dtype == torch.float32
    near = (expected.double() - got.double()).abs() <= (8 * eps if single else eps) * expected.double().abs()
    few = single or float((expected != got).float().mean()) <= _MAX_UNEQUAL
    return few and bool(near.all())
