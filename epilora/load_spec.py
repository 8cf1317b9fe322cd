"""What one worker needs of any adapter: its local experts, and the shapes to check against.

Computed from the model's config and the placement alone, so it exists whether or not an adapter touches the experts.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

from epilora.errors import InvalidArgumentError
from epilora.families import GateUpLayout
from epilora.model_spec import ModelSpec, MoELayerSpec
from epilora.placement import ExpertPlacement
from epilora.v1 import types_pb2


@dataclass(frozen=True, kw_only=True, slots=True)
class MoELayerLoadSpec:
    """One MoE layer of a load spec."""

    moe: MoELayerSpec
    local_experts: tuple[int, ...]
    """Logical expert in each local slot, in slot order; empty if the rank holds none."""


@dataclass(frozen=True, kw_only=True)
class MoEEPLoadSpec:
    """What the worker (ep_rank, expert_tp_rank) needs of any adapter."""

    model_digest: str
    placement_id: str
    ep_rank: int
    num_ep_ranks: int
    expert_tp_rank: int = 0
    num_expert_tp_ranks: int = 1
    layers: tuple[MoELayerLoadSpec, ...]
    """In order of layer."""

    @classmethod
    def make(cls, model: ModelSpec, placement: ExpertPlacement, ep_rank: int) -> MoEEPLoadSpec:
        """The load spec of one rank."""
        assert 0 <= ep_rank < placement.num_ranks, (ep_rank, placement.num_ranks)
        return cls(
            model_digest=model.digest,
            placement_id=placement.placement_id,
            ep_rank=ep_rank,
            num_ep_ranks=placement.num_ranks,
            layers=tuple(
                MoELayerLoadSpec(moe=moe, local_experts=placement.local_experts(moe.layer, ep_rank))
                for moe in model.moe_layers
            ),
        )

    @cached_property
    def digest(self) -> str:
        """Identity of everything in it, 32 hex digits. Equal specs have equal digests in every process."""
        layers = [
            [
                spec.moe.layer,
                spec.moe.module,
                spec.moe.num_experts,
                spec.moe.hidden_size,
                spec.moe.intermediate_size,
                int(spec.moe.gate_up_layout),
                spec.local_experts,
            ]
            for spec in self.layers
        ]
        ranks = [self.ep_rank, self.num_ep_ranks, self.expert_tp_rank, self.num_expert_tp_ranks]
        canonical = json.dumps([self.model_digest, self.placement_id, ranks, layers], separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:32]

    def to_proto(self) -> types_pb2.MoEEPLoadSpec:
        """The message of this spec."""
        return types_pb2.MoEEPLoadSpec(
            model_digest=self.model_digest,
            placement_id=self.placement_id,
            ep_rank=self.ep_rank,
            num_ep_ranks=self.num_ep_ranks,
            expert_tp_rank=self.expert_tp_rank,
            num_expert_tp_ranks=self.num_expert_tp_ranks,
            layers=[
                types_pb2.MoELayerLoadSpec(
                    layer=spec.moe.layer,
                    local_experts=spec.local_experts,
                    num_experts=spec.moe.num_experts,
                    hidden_size=spec.moe.hidden_size,
                    intermediate_size=spec.moe.intermediate_size,
                    gate_up_layout=types_pb2.GateUpLayout.Name(spec.moe.gate_up_layout),
                    module=spec.moe.module,
                )
                for spec in self.layers
            ],
        )

    @classmethod
    def from_proto(cls, message: types_pb2.MoEEPLoadSpec) -> MoEEPLoadSpec:
        """The spec of a message.

        Raises:
            InvalidArgumentError: reason BAD_LOAD_SPEC; a value is missing or out of range.
        """
        _check(message)
        return cls(
            model_digest=message.model_digest,
            placement_id=message.placement_id,
            ep_rank=message.ep_rank,
            num_ep_ranks=message.num_ep_ranks,
            expert_tp_rank=message.expert_tp_rank,
            num_expert_tp_ranks=message.num_expert_tp_ranks,
            layers=tuple(
                MoELayerLoadSpec(
                    moe=MoELayerSpec(
                        layer=layer.layer,
                        module=layer.module,
                        num_experts=layer.num_experts,
                        hidden_size=layer.hidden_size,
                        intermediate_size=layer.intermediate_size,
                        gate_up_layout=GateUpLayout(layer.gate_up_layout),
                    ),
                    local_experts=tuple(layer.local_experts),
                )
                for layer in message.layers
            ),
        )


def _check(message: types_pb2.MoEEPLoadSpec) -> None:
    def error(text: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"load spec of ep_rank {message.ep_rank}: {text}", reason="BAD_LOAD_SPEC")

    if not message.model_digest or not message.placement_id:
        raise error("model_digest and placement_id must be set")
    if not 0 <= message.ep_rank < message.num_ep_ranks:
        raise error(f"ep_rank must be below num_ep_ranks, which is {message.num_ep_ranks}")
    if (message.expert_tp_rank, message.num_expert_tp_ranks) != (0, 1):
        raise error(
            f"expert_tp_rank {message.expert_tp_rank} of {message.num_expert_tp_ranks}: experts split inside F are "
            "not supported, expected 0 of 1"
        )
    numbers = [layer.layer for layer in message.layers]
    if not numbers or numbers != sorted(set(numbers)):
        raise error(f"layers must be in ascending order, got {numbers[:16]}")
    for layer in message.layers:
        if min(layer.num_experts, layer.hidden_size, layer.intermediate_size) < 1 or not layer.module:
            raise error(f"layer {layer.layer} lacks a module or a positive size")
        if int(layer.gate_up_layout) not in {int(layout) for layout in GateUpLayout}:
            raise error(f"layer {layer.layer} has gate_up_layout {layer.gate_up_layout}")
        outside = [expert for expert in layer.local_experts if not 0 <= expert < layer.num_experts]
        if outside:
            raise error(f"layer {layer.layer} has local experts {outside[:8]} of {layer.num_experts}")
