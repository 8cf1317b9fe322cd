"""Reads single experts of a checkpoint: all local ones at start, and those that a new placement brings later."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from compute_worker.checkpoint_files import CheckpointFiles
from compute_worker.checkpoint_keys import CheckpointPlan
from compute_worker.expert_shard import ExpertShard
from compute_worker.quantized_files import Weights, open_weights
from epilora.errors import FailedPreconditionError, InvalidArgumentError
from epilora.model_spec import GateUpLayout

FillExpert = Callable[[str, int, torch.Tensor], None]
"""(name of a 3D expert parameter, logical expert, where its matrix goes)."""

_RANDOM_STD = 0.02


class Role(enum.Enum):
    """What a parameter of an experts module does, which decides how it is split."""

    FIRST = enum.auto()
    """First projection or its bias."""
    DOWN = enum.auto()
    """Second projection."""
    DOWN_BIAS = enum.auto()
    """Its bias, which the first part of an expert has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertParameter:
    """A parameter [E, ...] of an experts module, of which this rank holds some slots, whole or split.

    Attributes:
        role: what it does.
        split_dim: dimension of one expert's tensor that is the expert's width, or gate and up of it.
        layout: of gate and up.
        shard: part that this rank holds.
    """

    layer: int
    owner: nn.Module
    attribute: str
    local_experts: tuple[int, ...]
    full_shape: tuple[int, ...]
    role: Role
    split_dim: int
    layout: GateUpLayout
    shard: ExpertShard

    def local(self) -> nn.Parameter:
        """The parameter as it is now."""
        parameter = getattr(self.owner, self.attribute)
        assert isinstance(parameter, nn.Parameter)
        return parameter

    def slot_shape(self) -> tuple[int, ...]:
        """Shape of one local slot."""
        shape = list(self.full_shape[1:])
        if self.role is not Role.DOWN_BIAS:
            shape[self.split_dim] = self.shard.width(shape[self.split_dim])
        return tuple(shape)

    def fill(self, fill: FillExpert, name: str, expert: int, weight: torch.Tensor) -> None:
        """Puts this rank's part of an expert into weight, of slot_shape."""
        if self.shard.count == 1:
            fill(name, expert, weight)
            return
        whole = torch.empty(self.full_shape[1:], dtype=weight.dtype, device=weight.device)
        fill(name, expert, whole)
        if self.role is Role.FIRST:
            weight.copy_(self.shard.first(whole, self.split_dim, self.layout))
        elif self.role is Role.DOWN:
            weight.copy_(self.shard.second(whole, self.split_dim))
        elif self.shard.index == 0:
            weight.copy_(whole)
        else:
            weight.zero_()


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertReader:
    """Where any expert's weights come from.

    Attributes:
        directory: of the checkpoint.
        quantization: quantization_config of its config.json; None without.
        plan: its keys; None: weights are drawn.
        identity: CheckpointFiles.identity when the model was loaded.
        full_shapes: [E, ...] of each expert parameter, by name.
    """

    directory: Path
    quantization: object
    plan: CheckpointPlan | None
    identity: tuple[tuple[object, ...], ...]
    full_shapes: Mapping[str, tuple[int, ...]]

    @contextmanager
    def open(self) -> Iterator[FillExpert]:
        """Maps the files for the duration of a with block.

        Raises:
            FailedPreconditionError: reason CHECKPOINT_CHANGED; they are not those that the model was loaded from.
        """
        if self.plan is None:
            yield random_expert
            return
        with CheckpointFiles(self.directory) as files:
            if files.identity != self.identity:
                raise FailedPreconditionError(
                    f"The weight files in {self.directory} were changed after this worker read them; restart the"
                    " service to serve the new ones",
                    reason="CHECKPOINT_CHANGED",
                )
            yield fill_from(open_weights(files, self.directory, self.quantization), self.plan, self.full_shapes)


def fill_from(files: Weights, plan: CheckpointPlan, full_shapes: Mapping[str, tuple[int, ...]]) -> FillExpert:
    """A function that copies one expert's matrix from open files."""

    def fill(name: str, expert: int, weight: torch.Tensor) -> None:
        if name in plan.fused_experts:
            key, expected = plan.fused_experts[name], full_shapes[name]
            is_swapped = name in plan.transposed_experts and files.shape(key) != expected
            if is_swapped:
                expected = (expected[0], expected[2], expected[1])
            check_shape(key, files.shape(key), expected, name)
            # Fewer bytes to turn round, and to bring to a device.
            stored = files.expert(key, expert).to(weight.dtype)
            weight.copy_(stored.t() if is_swapped else stored)
            return
        for part in plan.expert_parts[name, expert]:
            rows = weight.chunk(part.num_parts, dim=0)[part.index]
            copy_tensor(files, part.key, rows, f"{name}[{expert}]")

    return fill


def copy_tensor(files: Weights, key: str, target: torch.Tensor, name: str) -> None:
    """Copies one tensor of the checkpoint into its place."""
    check_shape(key, files.shape(key), tuple(target.shape), name)
    target.copy_(files.tensor(key))


def check_shape(key: str, shape: tuple[int, ...], expected: tuple[int, ...], name: str) -> None:
    """Raises InvalidArgumentError, reason WEIGHT_SHAPE_MISMATCH, for another shape."""
    if shape != expected:
        raise InvalidArgumentError(
            f"Checkpoint key {key} has shape {list(shape)}, expected {list(expected)} for {name}",
            reason="WEIGHT_SHAPE_MISMATCH",
            metadata={"key": key},
        )


def random_expert(name: str, expert: int, weight: torch.Tensor) -> None:
    """Draws one expert's matrix; the same values wherever the expert is placed."""
    draw(f"{name}[{expert}]", weight)


def draw(name: str, tensor: torch.Tensor) -> None:
    """Draws a weight; the same values for a name in every process."""
    generator = torch.Generator(device=tensor.device).manual_seed(zlib.crc32(name.encode()))
    tensor.normal_(0.0, _RANDOM_STD, generator=generator)
