"""What transformers' experts modules are like: how they store weights, and whether they go through our function.

E experts, D model width, F expert width, H width of the first projection.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from epilora.errors import InvalidArgumentError
from epilora.model_spec import GateUpLayout

_ATTRIBUTES = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
# Llama 4 multiplies the chosen expert's input, not its output, by the router's weight, and calls no experts function.
_SCALES_INPUT = "Llama4TextExperts"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsTraits:
    """How an experts module stores its weights.

    Attributes:
        has_gate: the first projection holds gate and up.
        is_transposed: weights are stored [E, in, out], not [E, out, in].
        layout: how gate and up share the first projection.
        scales_input: the router's weight multiplies the expert's input instead of its output.
    """

    has_gate: bool
    is_transposed: bool
    layout: GateUpLayout
    scales_input: bool = False

    @classmethod
    def of(cls, module: nn.Module) -> ExpertsTraits | None:
        """The traits of an experts module; None for any other module."""
        if type(module).__name__ == _SCALES_INPUT:
            return cls(has_gate=True, is_transposed=True, layout=GateUpLayout.CONCATENATED, scales_input=True)
        if not all(isinstance(getattr(module, name, None), bool) for name in _ATTRIBUTES):
            return None
        layout = GateUpLayout.CONCATENATED if module.is_concatenated else GateUpLayout.INTERLEAVED
        return cls(
            has_gate=bool(module.has_gate),
            is_transposed=bool(module.is_transposed),
            layout=layout if module.has_gate else GateUpLayout.NOT_GATED,
        )

    @property
    def first_name(self) -> str:
        """Of the parameter of the first projection."""
        return "gate_up_proj" if self.has_gate else "up_proj"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsShape:
    """E, D and F of an experts module."""

    num_experts: int
    hidden_size: int
    intermediate_size: int


def experts_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, ExpertsTraits]]:
    """All experts modules with their paths, in the order of the module tree."""
    for path, module in model.named_modules():
        traits = ExpertsTraits.of(module)
        if traits is not None:
            yield path, module, traits


def shape_of(path: str, module: nn.Module, traits: ExpertsTraits) -> ExpertsShape:
    """The sizes of an experts module that holds all experts.

    Raises:
        InvalidArgumentError: reason UNSUPPORTED_EXPERTS; it has other parameters than two projections and their biases.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    down = shapes.get("down_proj", ())
    if len(down) == 3:
        shape = ExpertsShape(
            num_experts=down[0],
            hidden_size=down[2] if traits.is_transposed else down[1],
            intermediate_size=down[1] if traits.is_transposed else down[2],
        )
        expected = expected_shapes(shape, traits)
        if all(shapes.get(name) == expected[name] for name in (traits.first_name, "down_proj")) and all(
            expected.get(name) == found for name, found in shapes.items()
        ):
            return shape
    raise InvalidArgumentError(
        f"{path} of {type(module).__name__} has the parameters {shapes}, expected {traits.first_name} and down_proj;"
        " this family's experts cannot be served",
        reason="UNSUPPORTED_EXPERTS",
    )


def expected_shapes(shape: ExpertsShape, traits: ExpertsTraits) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter that such a module may have; the biases may be missing."""
    experts, hidden, inner = shape.num_experts, shape.hidden_size, shape.intermediate_size
    first = 2 * inner if traits.has_gate else inner
    matrices = {traits.first_name: (experts, first, hidden), "down_proj": (experts, hidden, inner)}
    if traits.is_transposed:
        matrices = {name: (size[0], size[2], size[1]) for name, size in matrices.items()}
    return {**matrices, f"{traits.first_name}_bias": (experts, first), "down_proj_bias": (experts, hidden)}


def gated_by_silu(module: nn.Module, gate_up_nH: torch.Tensor) -> torch.Tensor:
    """act(gate) * up of modules that have no function for it; [n, H] -> [n, F]."""
    gate_nF, up_nF = gate_up_nH.chunk(2, dim=-1)
    result: torch.Tensor = up_nF * module.act_fn(gate_nF)  # type: ignore[operator]
    return result
