"""One part of every expert: what a worker holds where an expert's F is split over several.

Gate and up are split alike, inside each of them: part i of n has rows i * F / n to (i + 1) * F / n of gate and of up,
the same columns of down, and of LoRA pairs the rows of B (gate, up) and columns of A (down) that go with them. Parts
of a result add up to the whole; a bias of the down projection belongs to the first part.

Legend: F expert width, H width of the first projection (2F with a gate), D model width, r lora rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epilora.errors import InvalidArgumentError
from epilora.model_spec import GateUpLayout, ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertShard:
    """Part `index` of `count`; part 0 of 1 is a whole expert."""

    index: int = 0
    count: int = 1

    @classmethod
    def make(cls, index: int, count: int, model: ModelSpec) -> ExpertShard:
        """One part of a model's experts.

        Raises:
            InvalidArgumentError: reason EXPERT_TP; the width of an expert does not split evenly.
        """
        for moe in model.moe_layers:
            if moe.intermediate_size % count:
                raise InvalidArgumentError(
                    f"EPILORA_EXPERT_TP is {count}, which does not divide the experts' width {moe.intermediate_size} in"
                    f" layer {moe.layer}",
                    reason="EXPERT_TP",
                )
        return cls(index=index, count=count)

    def width(self, size: int) -> int:
        """Of F, or of H, what this part has."""
        return size // self.count

    def first(self, tensor: torch.Tensor, dim: int, layout: GateUpLayout) -> torch.Tensor:
        """This part of a tensor whose dim is H, as a view or a copy.

        Example: H 8, count 2, index 1: concatenated -> 2, 3, 6, 7; interleaved -> 4, 5, 6, 7.
        """
        if self.count == 1:
            return tensor
        if layout == GateUpLayout.CONCATENATED:
            return torch.cat([self.second(half, dim) for half in tensor.chunk(2, dim)], dim)
        return self.second(tensor, dim)

    def second(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This part of a tensor whose dim is F, as a view."""
        width = tensor.shape[dim] // self.count
        return tensor.narrow(dim, self.index * width, width)

    def pair(
        self, projection: str, layout: GateUpLayout, a: torch.Tensor, b: torch.Tensor, lora_rank: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This part of a LoRA pair of all local slots.

        Args:
            projection: "gate_up", "gate", "up" or "down".
            layout: of the first projection.
            a: [sum of lora_rank, in].
            b: flat; block of slot s is [out, lora_rank[s]] row-major.
            lora_rank: per slot.
        """
        if self.count == 1:
            return a, b
        if projection == "down":
            return self.second(a, 1), b
        total = sum(lora_rank)
        blocks, start = [], 0
        for rank in lora_rank:
            size = b.numel() // total * rank if total else 0
            block = b[start : start + size].view(-1, rank) if rank else b[:0].view(0, 1)
            split = projection == "gate_up" and layout != GateUpLayout.NOT_GATED
            blocks.append((self.first(block, 0, layout) if split else self.second(block, 0)).flatten())
            start += size
        # Without slots, where a rank has no expert of a layer, there is nothing to split.
        return a, torch.cat(blocks) if blocks else b


WHOLE = ExpertShard()
"""Not split."""
