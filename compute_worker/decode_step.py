"""Decode steps of fixed shapes: every tensor has its place, so that a GPU can replay the whole step as one graph.

A step of at most `max_tokens` tokens a rank, one for each sequence, is padded to a bucket that all ranks know. What
differs from step to step (tokens, positions, slots, block tables, how many rows are real) is copied into buffers that
stay where they are; the kernels read the adapters' addresses from tables that change in place. So a graph serves any
tokens and any adapters. It is captured anew only when adapters need launches that it does not have: the first pair of a
module, or a lora rank beyond all before.

The first step of each kind runs as it is, and is captured after; on a CPU (tests) every step does.

Legend: M rows of the bucket, B blocks of the longest possible sequence, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
import torch

from compute_worker.adapter_tables import LaunchKey
from compute_worker.kv_cache import KVCache
from compute_worker.paged_attention import FixedDecode, SequenceSpan
from compute_worker.step_batch import StepBatch

NO_TOKENS = StepBatch(token_ids=[], positions=[], adapter_slots=[], sequences=[], logits_rows=[])

_log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedInputs:
    """What a step of M rows reads; views of buffers that never move.

    Attributes:
        token_ids: int64 [1, M].
        positions: int64 [1, M].
        adapter_slots: int32 [M], -1 for the base model and for padding.
        num_rows: int64 [1]; rows that are tokens, the others are padding.
        places: int64 [M]; of the rows' sequences, the spare one for padding.
        attention: where the rows' keys and values go and are.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    adapter_slots: torch.Tensor
    num_rows: torch.Tensor
    places: torch.Tensor
    attention: FixedDecode


@dataclass(kw_only=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    logits_MV: torch.Tensor


class DecodeSteps:
    """See the module. Used by the step thread only.

    Args:
        forward: runs the model on fixed inputs; float32 [M, V].
        launch_key: what of the adapters decides on launches.
        cache: whose slots the rows' positions have.
        max_tokens: most tokens of a rank in such a step.
        max_blocks: B.
        spare_place: see StateCache.

    Attributes:
        num_captured: graphs captured so far.
        num_replayed: steps that were one replay.
        num_run: steps that ran as they are.
    """

    def __init__(
        self,
        *,
        forward: Callable[[FixedInputs], torch.Tensor],
        launch_key: LaunchKey,
        cache: KVCache,
        max_tokens: int,
        max_blocks: int,
        spare_place: int,
    ) -> None:
        self._forward = forward
        self._launch_key = launch_key
        self._buckets = _buckets(max_tokens)
        self._inputs = _InputBuffers(cache, self._buckets[-1], max_blocks, spare_place)
        self._captures = cache.device.type == "cuda"
        self._graphs: dict[Hashable, dict[int, _Graph]] = {}
        self._pool: Any = None
        self.num_captured = 0
        self.num_replayed = 0
        self.num_run = 0

    def bucket(self, num_tokens_per_rank: Sequence[int]) -> int:
        """M for a step of these tokens, the same on every rank; 0 if some rank has too many."""
        most = max(num_tokens_per_rank)
        return next((bucket for bucket in self._buckets if bucket >= most), 0)

    def run(self, bucket: int, batch: StepBatch | None, *, as_graph: bool = True) -> torch.Tensor:
        """One step.

        Args:
            bucket: M.
            batch: this rank's tokens, one for each sequence; None if it has none.
            as_graph: False for a step with launches of its own beside those of a graph: it runs as it is.

        Returns:
            float32 [M, V], of which the first rows are the tokens'; the next step overwrites it.
        """
        self._inputs.fill(bucket, batch or NO_TOKENS)
        key = self._launch_key()
        graph = self._graphs.get(key, {}).get(bucket) if as_graph else None
        if graph is not None:
            graph.graph.replay()
            self.num_replayed += 1
            return graph.logits_MV
        inputs = self._inputs.of(bucket)
        logits_MV = self._forward(inputs)
        self.num_run += 1
        if self._captures and as_graph:
            self._capture(key, bucket, inputs)
        return logits_MV

    def forget_graphs(self) -> None:
        """Steps are captured anew: weights that the graphs read have moved."""
        self._graphs.clear()

    def warm_up(self) -> None:
        """Compiles the kernels, those of adapters included, by empty steps; captures the base model's graphs."""
        start = time.perf_counter()
        with self._launch_key.everything_touched():
            for bucket in self._buckets:
                self._run_empty(bucket)
        for bucket in self._buckets:
            inputs = self._run_empty(bucket)
            if self._captures:
                self._capture(None, bucket, inputs)
        _log.info("decode steps warmed up", seconds=round(time.perf_counter() - start, 1))

    def _run_empty(self, bucket: int) -> FixedInputs:
        self._inputs.fill(bucket, NO_TOKENS)
        inputs = self._inputs.of(bucket)
        self._forward(inputs)
        return inputs

    def _capture(self, key: Hashable, bucket: int, inputs: FixedInputs) -> None:
        if key not in self._graphs:
            # An adapter key that is past does not come back: keys grow, until there is no adapter any more.
            self._graphs = {kept: graphs for kept, graphs in self._graphs.items() if kept is None}
            self._graphs[key] = {}
        graph = torch.cuda.CUDAGraph()
        # Other threads copy adapters to the device meanwhile; only this one's calls belong to the graph.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits_MV = self._forward(inputs)
        self._pool = self._pool or graph.pool()
        self._graphs[key][bucket] = _Graph(graph=graph, logits_MV=logits_MV)
        self.num_captured += 1
        _log.info("decode step captured", tokens=bucket, graphs=self.num_captured)


class _InputBuffers:
    """The buffers that steps read, and what of them is on its way."""

    def __init__(self, cache: KVCache, max_rows: int, max_blocks: int, spare_place: int) -> None:
        device = cache.device
        self._cache = cache
        self._spare_place = spare_place
        self._pinned = device.type == "cuda"
        # Rows: token ids, positions, cache slots, adapter slots, positions with this one, how many are real, places.
        self._host = torch.zeros((7, max_rows), dtype=torch.int64, pin_memory=self._pinned)
        self._staged = torch.zeros((7, max_rows), dtype=torch.int64, device=device)
        self._host_table = torch.zeros((max_rows, max_blocks), dtype=torch.int32, pin_memory=self._pinned)
        self._table_of_row: list[tuple[int, ...]] = [()] * max_rows
        self._adapter_slots = torch.full((max_rows,), -1, dtype=torch.int32, device=device)
        self._kv_len = torch.zeros((max_rows,), dtype=torch.int32, device=device)
        self._table = torch.zeros((max_rows, max_blocks), dtype=torch.int32, device=device)
        self._copied = torch.cuda.Event() if self._pinned else None  # type: ignore[no-untyped-call]

    def of(self, bucket: int) -> FixedInputs:
        """The views of M rows."""
        staged = self._staged
        return FixedInputs(
            token_ids=staged[0:1, :bucket],
            positions=staged[1:2, :bucket],
            adapter_slots=self._adapter_slots[:bucket],
            num_rows=staged[5, :1],
            places=staged[6, :bucket],
            attention=FixedDecode(
                write_slot_M=staged[2, :bucket], kv_len_M=self._kv_len[:bucket], block_table_MB=self._table[:bucket]
            ),
        )

    def fill(self, bucket: int, batch: StepBatch) -> None:
        """Sends a step's numbers to the device."""
        if self._copied is not None:
            # The copies of the step before read the same host memory.
            self._copied.synchronize()
        count, size, spans = len(batch.token_ids), self._cache.block_size, batch.sequences
        host = self._host.numpy()
        host[:, :bucket] = [[0], [0], [self._cache.spare_slot], [-1], [0], [count], [self._spare_place]]
        if count:
            host[0, :count], host[1, :count], host[3, :count] = batch.token_ids, batch.positions, batch.adapter_slots
            host[2, :count] = [s.block_table[(s.kv_len - 1) // size] * size + (s.kv_len - 1) % size for s in spans]
            host[4, :count] = [s.kv_len for s in spans]
            host[6, :count] = [s.place for s in spans]
        self._fill_table(spans)
        # Whole rows: a copy of some columns would not be one block, and wait.
        self._staged.copy_(self._host, non_blocking=True)
        self._adapter_slots[:bucket].copy_(self._staged[3, :bucket])
        self._kv_len[:bucket].copy_(self._staged[4, :bucket])
        if self._copied is not None:
            self._copied.record()

    def _fill_table(self, sequences: Sequence[SequenceSpan]) -> None:
        changed = [row for row, s in enumerate(sequences) if self._table_of_row[row] is not s.block_table]
        for row in changed:
            blocks = self._table_of_row[row] = sequences[row].block_table
            self._host_table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        if changed:
            part = slice(changed[0], changed[-1] + 1)
            self._table[part].copy_(self._host_table[part], non_blocking=True)


def _buckets(max_tokens: int) -> list[int]:
    """1, 2, 4, ... up to the first that is enough. Example: 48 -> [1, 2, 4, 8, 16, 32, 64]."""
    buckets = [1]
    while buckets[-1] < max_tokens:
        buckets.append(buckets[-1] * 2)
    return buckets
