"""What a caller says of an adapter where its file leaves something open."""

from __future__ import annotations

from dataclasses import dataclass

from epilora.errors import InvalidArgumentError
from epilora.v1 import types_pb2

_ORIENTATIONS = {
    types_pb2.PARAMETER_ORIENTATION_UNSPECIFIED: None,
    types_pb2.PARAMETER_ORIENTATION_PLAIN: False,
    types_pb2.PARAMETER_ORIENTATION_SWAPPED: True,
}
_MAX_NAMES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutHints:
    """See the proto message of the same name. A hint settles what the file leaves open, and never overrides it."""

    swapped: bool | None = None
    """In and out of stacked expert parameters are swapped; None: not said."""
    expert_rank_from_shape: bool = False
    """Stacked tensors hold one block for each expert of the model, whatever rank the config has."""
    stacked_parameters: tuple[str, ...] = ()
    """Names of the stacked parameters that have a pair; empty: those of the config."""

    @classmethod
    def from_proto(cls, message: types_pb2.LayoutHints) -> LayoutHints:
        """Decodes a message; the default one is no hint.

        Raises:
            InvalidArgumentError: reason BAD_LAYOUT_HINTS.
        """
        if message.orientation not in _ORIENTATIONS:
            raise _error(f"orientation is {message.orientation}, expected a value of ParameterOrientation")
        names = tuple(message.stacked_parameters)
        if len(names) > _MAX_NAMES or not all(0 < len(name) <= 64 for name in names):
            raise _error(
                f"stacked_parameters has {len(names)} names, expected up to {_MAX_NAMES} of 1 to 64 characters"
            )
        return cls(
            swapped=_ORIENTATIONS[message.orientation],
            expert_rank_from_shape=message.expert_rank_from_shape,
            stacked_parameters=names,
        )

    def to_proto(self) -> types_pb2.LayoutHints:
        """Reverse of from_proto."""
        orientation = next(value for value, swapped in _ORIENTATIONS.items() if swapped is self.swapped)
        return types_pb2.LayoutHints(
            orientation=orientation,
            expert_rank_from_shape=self.expert_rank_from_shape,
            stacked_parameters=self.stacked_parameters,
        )


NO_HINTS = LayoutHints()
"""For adapters that leave nothing open."""


def _error(message: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"layout_hints: {message}", reason="BAD_LAYOUT_HINTS", field="layout_hints")
