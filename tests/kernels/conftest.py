"""Kernels run on the GPU where there is one, and in Triton's interpreter otherwise."""

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    import triton

    if not triton.knobs.runtime.interpret:
        raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before triton is first imported (tests/conftest.py does)")


@pytest.fixture(autouse=True)
def _poisoned_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty returns NaN (or large integers), so that a value nothing wrote shows."""
    real = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        out = real(*args, **kwargs)  # type: ignore[call-overload]
        return out.fill_(float("nan") if out.is_floating_point() else 2**30)

    monkeypatch.setattr(torch, "empty", poisoned)
