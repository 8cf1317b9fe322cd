"""Weights of a checkpoint as the model computes with them: those stored in 8 or 4 bits become float32 when read.

Legend: E experts, B blocks of 32 weights along a row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from compute_worker.checkpoint_files import CheckpointFiles
from epilora.errors import InvalidArgumentError

_FP8_SCALE = "_scale_inv"
_MXFP4_BLOCKS, _MXFP4_SCALES = "_blocks", "_scales"
_MXFP4_EXPONENT_BIAS = 127
_FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_VALUES = (*_FP4_MAGNITUDES, *(-value for value in _FP4_MAGNITUDES))
_MATRIX_DIMS = 2


class Weights(Protocol):
    """Tensors of a checkpoint by key."""

    def keys(self) -> list[str]:
        """All keys that a model may have parameters for."""
        ...

    def tensor(self, key: str) -> torch.Tensor:
        """A tensor; do not write to it."""
        ...

    def shape(self, key: str) -> tuple[int, ...]:
        """That of a tensor, without reading it."""
        ...

    def expert(self, key: str, expert: int) -> torch.Tensor:
        """One expert's part of a tensor [E, ...]."""
        ...


def open_weights(files: CheckpointFiles, directory: Path, quantization: Any) -> Weights:
    """The weights of a checkpoint's files.

    Args:
        files: of the checkpoint.
        directory: for messages.
        quantization: quantization_config of its config.json; None without.

    Raises:
        InvalidArgumentError: reason UNSUPPORTED_CHECKPOINT; a way of quantizing that is not read.
    """
    if not quantization:
        return files
    options = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = options.get("quant_method")
    if method == "mxfp4":
        return Mxfp4Weights(files)
    if method == "fp8" and options.get("activation_scheme", "dynamic") == "dynamic":
        return Fp8Weights(files, options.get("weight_block_size"))
    raise InvalidArgumentError(
        f"{directory} holds quantized weights ({method}, activations {options.get('activation_scheme')}); mxfp4 and fp8"
        " with dynamic activations are read, others not: save it dequantized with transformers and use that",
        reason="UNSUPPORTED_CHECKPOINT",
    )


class Fp8Weights:
    """Matrices in float8, each with float32 factors for its blocks under its key plus "_scale_inv".

    Args:
        files: of the checkpoint.
        block: rows and columns of a block; None: one factor for a whole matrix.
    """

    def __init__(self, files: CheckpointFiles, block: tuple[int, int] | list[int] | None) -> None:
        self._files = files
        self._block = None if block is None else (int(block[0]), int(block[1]))
        self._stored = files.keys()
        self._all = set(self._stored)

    def keys(self) -> list[str]:
        """See Weights."""
        return [key for key in self._stored if not self._is_scale(key)]

    def tensor(self, key: str) -> torch.Tensor:
        """See Weights."""
        weight = self._files.tensor(key)
        return (
            self._scaled(key, weight, self._files.tensor(key + _FP8_SCALE)) if key + _FP8_SCALE in self._all else weight
        )

    def shape(self, key: str) -> tuple[int, ...]:
        """See Weights."""
        return self._files.shape(key)

    def expert(self, key: str, expert: int) -> torch.Tensor:
        """See Weights."""
        weight = self._files.tensor(key)[expert]
        if key + _FP8_SCALE not in self._all:
            return weight
        return self._scaled(key, weight, self._files.tensor(key + _FP8_SCALE)[expert])

    def _is_scale(self, key: str) -> bool:
        return key.endswith(_FP8_SCALE) and key.removesuffix(_FP8_SCALE) in self._all

    def _scaled(self, key: str, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """weight[i, j] * scale[i // block rows, j // block columns]; the last blocks may be cut off."""
        if scale.numel() == 1:
            return weight.float() * scale.float().reshape(())
        rows, columns = weight.shape[-2:] if weight.dim() >= _MATRIX_DIMS else (0, 0)
        block = self._block or (0, 0)
        expected = tuple(-(-size // part) if part else 1 for size, part in zip((rows, columns), block, strict=True))
        if tuple(scale.shape[-2:]) != expected:
            raise InvalidArgumentError(
                f"Checkpoint key {key}{_FP8_SCALE} has shape {list(scale.shape)}, expected {list(expected)} for blocks"
                f" {list(block)} of {list(weight.shape)}",
                reason="WEIGHT_SHAPE_MISMATCH",
                metadata={"key": key},
            )
        factors = scale.float().repeat_interleave(block[0], dim=-2).repeat_interleave(block[1], dim=-1)
        return weight.float() * factors[..., :rows, :columns]


class Mxfp4Weights:
    """Experts' matrices in 4 bits: "_blocks" uint8 [E, out, B, 16], two weights a byte; "_scales" uint8 [E, out, B].

    As a tensor of the checkpoint such a pair is [E, in, out] under the key without the endings.
    """

    def __init__(self, files: CheckpointFiles) -> None:
        self._files = files
        # The lower half of a byte is the weight that comes first.
        self._of_byte = torch.tensor([(_FP4_VALUES[byte & 0xF], _FP4_VALUES[byte >> 4]) for byte in range(256)])
        self._stored = files.keys()
        keys = set(self._stored)
        self._packed = {
            key.removesuffix(_MXFP4_BLOCKS)
            for key in keys
            if key.endswith(_MXFP4_BLOCKS) and key.removesuffix(_MXFP4_BLOCKS) + _MXFP4_SCALES in keys
        }

    def keys(self) -> list[str]:
        """See Weights."""
        parts = {key + ending for key in self._packed for ending in (_MXFP4_BLOCKS, _MXFP4_SCALES)}
        return [*(key for key in self._stored if key not in parts), *sorted(self._packed)]

    def tensor(self, key: str) -> torch.Tensor:
        """See Weights."""
        if key not in self._packed:
            return self._files.tensor(key)
        return torch.stack([self.expert(key, expert) for expert in range(self.shape(key)[0])])

    def shape(self, key: str) -> tuple[int, ...]:
        """See Weights."""
        if key not in self._packed:
            return self._files.shape(key)
        experts, rows, blocks, width = self._files.shape(key + _MXFP4_BLOCKS)
        return experts, blocks * width * 2, rows

    def expert(self, key: str, expert: int) -> torch.Tensor:
        """See Weights."""
        if key not in self._packed:
            return self._files.tensor(key)[expert]
        packed = self._files.tensor(key + _MXFP4_BLOCKS)[expert]
        exponent = self._files.tensor(key + _MXFP4_SCALES)[expert].to(torch.int32) - _MXFP4_EXPONENT_BIAS
        weights = self._of_byte.index_select(0, packed.flatten().to(torch.int32)).view(*packed.shape[:-1], -1)
        return torch.ldexp(weights, exponent.unsqueeze(-1)).flatten(-2).t()
