"""What a BuildSlices call asks for, checked."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from epilora.adapters.layout_hints import LayoutHints
from epilora.adapters.normal_form import AdapterTarget
from epilora.errors import InvalidArgumentError
from epilora.families import GateUpLayout, family_of
from epilora.load_spec import MoEEPLoadSpec
from epilora.model_spec import DenseModuleSpec
from epilora.slices import LAYOUT_VERSION
from epilora.v1 import loader_service_pb2, types_pb2
from loader_service.source import SourceIdentity


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildRequest:
    """Slices of one adapter for some ranks of one model and placement."""

    source: str
    load_specs: tuple[MoEEPLoadSpec, ...]
    target: AdapterTarget
    allow_partial: bool
    hints: LayoutHints

    @classmethod
    def from_proto(cls, message: loader_service_pb2.BuildSlicesRequest) -> BuildRequest:
        """Decodes a request.

        Raises:
            InvalidArgumentError: BAD_LOAD_SPEC, BAD_DENSE_MODULE, BAD_LAYOUT_HINTS.
        """
        load_specs = tuple(MoEEPLoadSpec.from_proto(spec) for spec in message.load_specs)
        _check_together(load_specs)
        target = AdapterTarget.make(
            family_of(message.model_type, _layout_of(load_specs[0])),
            [layer.moe for layer in load_specs[0].layers],
            _dense_modules(message.dense_modules),
        )
        return cls(
            source=message.source,
            load_specs=load_specs,
            target=target,
            allow_partial=message.allow_partial,
            hints=LayoutHints.from_proto(message.layout_hints),
        )

    def entry_id(self, source: SourceIdentity) -> str:
        """Identity of the slices that this request makes of a source, 32 hex digits."""
        return self._id_of(source.digest)

    def shared_key(self, source: SourceIdentity) -> str:
        """The same between nodes that mount the source, 32 hex digits."""
        return self._id_of(source.shared_digest)

    def _id_of(self, source_digest: str) -> str:
        dense = [
            [module.module, module.in_features, module.out_features] for module in self.target.dense_modules.values()
        ]
        parts = [
            source_digest,
            LAYOUT_VERSION,
            [spec.digest for spec in self.load_specs],
            self.target.family.model_type,
            dense,
            self.allow_partial,
            dataclasses.astuple(self.hints),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _check_together(load_specs: Sequence[MoEEPLoadSpec]) -> None:
    if not load_specs:
        raise InvalidArgumentError("load_specs is empty", reason="BAD_LOAD_SPEC", field="load_specs")
    first = load_specs[0]
    layers = [layer.moe for layer in first.layers]
    for spec in load_specs[1:]:
        same_model = spec.model_digest == first.model_digest and [layer.moe for layer in spec.layers] == layers
        if not same_model or spec.placement_id != first.placement_id or spec.num_ep_ranks != first.num_ep_ranks:
            raise InvalidArgumentError(
                f"load specs of ep_rank {first.ep_rank} and {spec.ep_rank} are of different models or placements: "
                f"{first.model_digest[:12]} and {spec.model_digest[:12]}, {first.placement_id} and {spec.placement_id}",
                reason="BAD_LOAD_SPEC",
                field="load_specs",
            )
    ranks = [spec.ep_rank for spec in load_specs]
    if len(set(ranks)) != len(ranks):
        raise InvalidArgumentError(
            f"two load specs of one ep_rank: {ranks}", reason="BAD_LOAD_SPEC", field="load_specs"
        )


def _layout_of(spec: MoEEPLoadSpec) -> GateUpLayout:
    layouts = {layer.moe.gate_up_layout for layer in spec.layers}
    if len(layouts) != 1:
        raise InvalidArgumentError(
            f"the MoE layers have {len(layouts)} gate_up layouts, expected one",
            reason="BAD_LOAD_SPEC",
            field="load_specs",
        )
    return next(iter(layouts))


def _dense_modules(messages: Sequence[types_pb2.DenseModule]) -> list[DenseModuleSpec]:
    for message in messages:
        if not message.module or min(message.in_features, message.out_features) < 1:
            raise InvalidArgumentError(
                f"dense module {message.module!r} of {message.in_features} x {message.out_features}: expected a name "
                "and positive sizes",
                reason="BAD_DENSE_MODULE",
                field="dense_modules",
            )
    return [
        DenseModuleSpec(module=message.module, in_features=message.in_features, out_features=message.out_features)
        for message in messages
    ]
