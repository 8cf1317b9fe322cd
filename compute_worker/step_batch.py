"""What goes into a step of the model, and what a rank reports of its memory.

Legend: T tokens of this rank's step.
"""

from __future__ import annotations

from dataclasses import dataclass

from compute_worker.paged_attention import SequenceSpan


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """This rank's tokens of one step, those of each sequence next to each other.

    Attributes:
        token_ids: T ids.
        positions: T positions in their sequences.
        adapter_slots: T slots, -1 for the base model.
        sequences: where each sequence's tokens and cache blocks are, in order of query_start.
        logits_rows: tokens whose logits are wanted.
    """

    token_ids: list[int]
    positions: list[int]
    adapter_slots: list[int]
    sequences: list[SequenceSpan]
    logits_rows: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """Memory of this rank, bytes (num_pin_failures: files); fields as of RankMemory in cluster_service.proto."""

    base_expert_bytes: int
    base_dense_bytes: int
    kv_cache_bytes: int
    state_cache_bytes: int
    adapter_bytes: int
    process_anon_bytes: int
    base_expert_growth_bytes: int
    device_free_bytes: int
    device_total_bytes: int
    device_allocated_bytes: int
    pinned_cache_bytes: int
    num_pin_failures: int


def is_decode(batch: StepBatch) -> bool:
    """True if every sequence has one new token."""
    return len(batch.token_ids) == len(batch.sequences)
