"""What all launches of one call of the expert layer share: inputs, route, and the sizes that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from compute_worker.kernels.adapter_table import AdapterTable, KernelTable
from compute_worker.kernels.config import MoEConfig
from compute_worker.kernels.delta_columns import max_groups
from compute_worker.kernels.first_tiles import num_first_tiles
from compute_worker.kernels.layout import MoEWeights
from compute_worker.kernels.lora import NARROW_COLUMNS
from compute_worker.kernels.route import Route

_SHRINK_STAGE_BYTES = 24 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What all launches of one call share."""

    x_TD: torch.Tensor
    topk_expert_TK: torch.Tensor
    topk_weight_TK: torch.Tensor
    adapter_slot_T: torch.Tensor
    weights: MoEWeights
    table: AdapterTable | None
    config: MoEConfig
    route: Route
    num_rows: int
    base_tiles: int
    pair_tiles: int
    direct: int
    """Rows of a step of one token, which needs no sort; 0 where `route` holds a sorted order."""
    extra_m: int
    """Rows that an expert's last base tile may have over block_m."""
    pdl: bool

    @property
    def slots_1(self) -> int:
        return (self.table.num_slots if self.table else 0) + 1

    @property
    def pointers(self) -> Any:
        """The table's tensors; the route stands in where no kernel reads them."""
        return self.table.for_kernels if self.table else KernelTable(*([self.route.header] * 5))

    @property
    def block_r(self) -> int:
        """Lora ranks per step of a rank loop: from the table's limit, which outlives the adapters in it."""
        return min(64, max(16, triton.next_power_of_2(self.table.max_lora_rank))) if self.table else 16

    @property
    def s_stride(self) -> int:
        return triton.cdiv(self.table.max_lora_rank, 16) * 16 if self.table else 16

    @property
    def first_tiles(self) -> int:
        """Base tiles that the down GEMM may begin on while the last gate and up tiles run; 0 where it may not."""
        c = self.config
        if self.table or self.direct or not (c.fused and c.base_pdl and c.gate_up.n_fastest and c.down.n_fastest):
            return 0
        n_blocks = triton.cdiv(self.weights.hidden_size, c.down.block_n)
        return min(num_first_tiles(n_blocks, c.down.num_warps), self.base_tiles)

    @property
    def gate_up_blocks(self) -> int:
        """Programs a base tile of the fused gate and up GEMM."""
        return int(triton.cdiv(self.weights.intermediate_size, self.config.gate_up.block_n))

    @property
    def launch(self) -> dict[str, bool]:
        return {"PDL": self.pdl, "launch_pdl": self.pdl}

    def shrink_blocks(self, num_proj: int, splits: int = 1) -> dict[str, int]:
        """Blocks of a shrink of num_proj projections: about as many bytes a stage whatever the ranks, so that wide
        adapters do not take the GEMM's programs their room beside each other."""
        all_columns = num_proj * self.block_r
        columns = all_columns if splits > 1 else min(all_columns, max(16, self.config.shrink_columns))

        def block_k(columns: int) -> int:
            row_bytes = self.x_TD.element_size() * (self.config.pair_block_m + columns)
            largest = 1 << (_SHRINK_STAGE_BYTES // row_bytes).bit_length() - 1
            return max(32, min(self.config.shrink_block_k, largest))

        narrow = block_k(min(columns, NARROW_COLUMNS.value))
        stages = self.config.shrink_stages
        return {"columns": columns, "block_k": block_k(columns), "narrow_block_k": narrow, "stages": stages}

    @property
    def max_groups(self) -> int:
        """Groups of columns that a base tile may have; 0 without a table."""
        if self.table is None:
            return 0
        return max_groups(self.config.block_m + self.extra_m, self.table.num_slots, self.table.max_lora_rank)

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.x_TD.dtype, device=self.x_TD.device)

    def shrunk(self, num_proj: int) -> torch.Tensor:
        return self.empty(num_proj, self.num_rows, self.s_stride) if self.table else self.x_TD
