"""Adapters in this rank's memory: staged by RPC threads, made active and retired by the step thread.

An adapter's matrices are views of one flat buffer, its scales of a second one, so that loading and unloading are two
allocations and their bytes are exact.

Legend: e local slots, r lora rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import structlog
import torch

from compute_worker.adapter_buffers import AdapterTensors
from compute_worker.adapter_checks import check_backend, check_finite
from compute_worker.adapter_copy import AdapterCopier
from compute_worker.dora import WeightSource
from compute_worker.expert_shard import WHOLE, ExpertShard
from compute_worker.registered_slices import RegisteredSlices
from compute_worker.slice_memo import SliceMemo
from compute_worker.slice_reader import read_slice
from compute_worker.slice_upload import SliceUploader
from epilora.errors import (
    FailedPreconditionError,
    ResourceExhaustedError,
    StalePlacementError,
    UnavailableError,
)
from epilora.load_spec import MoEEPLoadSpec
from epilora.model_spec import ModelSpec

_STAGE_WAIT_SECONDS = 60.0
_INACTIVE = -1

_log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True, slots=True)
class Resident:
    """An adapter in this rank's memory.

    Attributes:
        name: public name.
        generation: unique number of this load.
        adapter_slot: -1 while only staged.
        expert_bytes: bytes of its pairs and scales for the local experts.
        dense_bytes: bytes of its pairs for dense modules.
    """

    name: str
    generation: int
    adapter_slot: int
    expert_bytes: int
    dense_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    resident: Resident
    tensors: AdapterTensors


@dataclass(frozen=True, kw_only=True, slots=True)
class _Move:
    """The next placement, and the resident adapters' slices for it."""

    load_spec: MoEEPLoadSpec
    entries: dict[int, _Entry] = field(default_factory=dict)


class AdapterListener(Protocol):
    """Told, in the step thread and between steps, which adapter each slot has."""

    def set_adapter(self, adapter_slot: int, adapter: AdapterTensors) -> None:
        """The slot has this adapter, or these slices of its adapter, from now on."""
        ...

    def clear_adapter(self, adapter_slot: int) -> None:
        """The slot has none any more; its memory goes once the device has done what is queued."""
        ...


class AdapterPool:
    """Thread-safe. Every method returns quickly but stage and discard, which wait for a stage under way.

    Args:
        model: the model.
        load_spec: of this rank.
        dtype: element type of the matrices in memory; None keeps the file's.
        device: where they go.
        max_bytes: all adapters together.
        base: the model's weights, which DoRA's magnitudes are measured against.
        rank_multiple: lora ranks of a projection are made equal and padded to a multiple of this, as grouped products
            need; 0 leaves them as they are.
        listeners: told of each activation and retirement.
        max_lora_rank: largest that the backend computes; 0: any.
        shard: part of each local expert that this rank holds.
        has_expert_gains: the backend computes DoRA of experts.
        uploader: brings slice files to the device; None on a CPU.
        registered: slice files that stay registered with the device; None: none do.
        prepare: adds to an adapter that is being copied what the listeners will need of it; on the copy's stream.
    """

    def __init__(
        self,
        *,
        model: ModelSpec,
        load_spec: MoEEPLoadSpec,
        dtype: torch.dtype | None,
        device: torch.device,
        max_bytes: int,
        base: WeightSource,
        rank_multiple: int,
        listeners: Sequence[AdapterListener] = (),
        max_lora_rank: int = 0,
        shard: ExpertShard = WHOLE,
        has_expert_gains: bool = True,
        uploader: SliceUploader | None = None,
        registered: RegisteredSlices | None = None,
        prepare: Callable[[AdapterTensors], AdapterTensors] | None = None,
    ) -> None:
        self._load_spec = load_spec
        self._dense_modules = {spec.module: spec for spec in model.dense_modules}
        self._device = device
        self._max_bytes = max_bytes
        self._copier = AdapterCopier(
            dtype=dtype,
            device=device,
            base=base,
            rank_multiple=rank_multiple,
            shard=shard,
            layouts={moe.layer: moe.gate_up_layout for moe in model.moe_layers},
            uploader=uploader,
            registered=registered,
        )
        self._prepare = prepare or _as_is
        self._listeners = tuple(listeners)
        self._max_lora_rank = max_lora_rank
        self._has_expert_gains = has_expert_gains
        # Where the bytes come over as they are, what was in them is known.
        self._read = read_slice if uploader is None else SliceMemo().read
        self._stage_lock = threading.Lock()
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry] = {}
        self._active: Mapping[int, AdapterTensors] = {}
        self._move: _Move | None = None

    def stage(self, *, name: str, generation: int, path: Path, placement_id: str) -> int:
        """Copies a slice to this rank's memory, of a resident adapter also for the placement to come. Idempotent.

        Returns:
            Bytes it takes.

        Raises:
            StalePlacementError: the slice is for another placement, rank or model.
            FailedPreconditionError: for the placement to come, but the adapter is not resident.
            InvalidArgumentError: a lora rank, a weight or DoRA of experts is beyond what the backend computes, or a
                bias is for a module that has none.
            ResourceExhaustedError: no room.
            UnavailableError: other stages took too long.
            InternalError: the file is broken.
        """
        with self._staging():
            start = time.perf_counter()
            with self._lock:
                move, load_spec, entries = self._target(placement_id)
                if generation in entries:
                    return _bytes_of(entries[generation])
                if move is not None and generation not in self._entries:
                    raise _not_resident(name, generation)
            source = self._read(path, placement_id=placement_id, load_spec=load_spec, dense_modules=self._dense_modules)
            check_backend(
                name,
                source,
                num_shards=self._copier.shard.count,
                has_expert_gains=self._has_expert_gains,
                max_lora_rank=self._max_lora_rank,
            )
            plan = self._copier.plan(source, path)
            self._check_room(name, plan.num_bytes, entries)
            planned = time.perf_counter()
            tensors = self._copier.copy(plan, path, self._prepare if move is None else _as_is)
            copied = time.perf_counter()
            largest = torch.finfo(plan.dtype).max
            matrices = [*(part.a for part in source.experts), *(part.a for part in source.dense)]
            if any(torch.finfo(matrix.dtype).max > largest for matrix in matrices):
                check_finite(name, tensors, plan.dtype)
            resident = Resident(
                name=name,
                generation=generation,
                adapter_slot=_INACTIVE,
                expert_bytes=plan.expert_bytes,
                dense_bytes=plan.dense_bytes,
            )
            entry = _Entry(resident=resident, tensors=tensors)
            assert tensors.storage_bytes() == _bytes_of(entry), (tensors.storage_bytes(), resident)
            with self._lock:
                now = self._target(placement_id)
                if now[1] is not load_spec:
                    raise StalePlacementError(
                        f"The placement changed while the slice {path} was copied; build it for the new one",
                        reason="STALE_PLACEMENT",
                    )
                if move is not None and generation not in self._entries:
                    raise _not_resident(name, generation)
                now[2][generation] = entry
            _log.info(
                "adapter staged",
                adapter=name,
                generation=generation,
                bytes=_bytes_of(entry),
                as_stored=plan.is_as_stored,
                plan_seconds=round(planned - start, 4),
                copy_seconds=round(copied - planned, 4),
            )
            return _bytes_of(entry)

    def is_staged(self, generation: int) -> bool:
        """True from the end of stage until retire or discard."""
        with self._lock:
            return generation in self._entries

    def activate(self, generation: int, adapter_slot: int) -> None:
        """Makes a staged generation the adapter of a slot. Step thread only."""
        with self._lock:
            entry = self._entries[generation]
            assert adapter_slot not in self._active, (adapter_slot, generation)
            assert entry.resident.adapter_slot == _INACTIVE, entry.resident
            resident = replace(entry.resident, adapter_slot=adapter_slot)
            self._entries[generation] = replace(entry, resident=resident)
            self._active = {**self._active, adapter_slot: entry.tensors}
        for listener in self._listeners:
            listener.set_adapter(adapter_slot, entry.tensors)

    def retire(self, generation: int) -> None:
        """Frees a generation, active or not; one that is not there is no error. Step thread only."""
        with self._lock:
            entry = self._entries.pop(generation, None)
            if entry is None:
                return
            if self._move is not None:
                self._move.entries.pop(generation, None)
            slot = entry.resident.adapter_slot
            self._active = {key: value for key, value in self._active.items() if key != slot}
        if slot != _INACTIVE:
            for listener in self._listeners:
                listener.clear_adapter(slot)
        self._release(entry)

    def discard(self, generation: int) -> int:
        """Frees a generation that was staged and never activated; waits for its stage if that is under way.

        Returns:
            Bytes freed; 0 if it was not there.

        Raises:
            FailedPreconditionError: it is active.
            UnavailableError: other stages took too long.
        """
        with self._staging():
            with self._lock:
                entry = self._entries.get(generation)
                if entry is None:
                    return 0
                if entry.resident.adapter_slot != _INACTIVE:
                    raise FailedPreconditionError(
                        f"Generation {generation} of adapter {entry.resident.name} is active in slot"
                        f" {entry.resident.adapter_slot}; retire it on ep_rank 0 instead",
                        reason="ADAPTER_ACTIVE",
                    )
                del self._entries[generation]
                if self._move is not None:
                    self._move.entries.pop(generation, None)
            self._release(entry)
            return _bytes_of(entry)

    def begin_move(self, load_spec: MoEEPLoadSpec) -> None:
        """From now on slices for this load spec may be staged, too, of adapters that are resident."""
        with self._lock:
            self._move = _Move(load_spec=load_spec)

    def is_move_complete(self) -> bool:
        """True if every resident adapter has its slices for the placement to come."""
        with self._lock:
            return self._move is not None and self._move.entries.keys() == self._entries.keys()

    def end_move(self) -> None:
        """Drops the slices for the placement to come."""
        with self._lock:
            self._move = None

    def place(self) -> None:
        """Every adapter's slices become those for the placement to come, which all active ones have. Step thread only.

        An adapter that was staged since is_move_complete said so has none, and is freed: its activation is refused.
        """
        with self._lock:
            move, old = self._move, self._entries
            assert move is not None
            slots = {generation: entry.resident.adapter_slot for generation, entry in old.items()}
            active = {generation for generation, slot in slots.items() if slot != _INACTIVE}
            assert active <= move.entries.keys(), (active, list(move.entries))
            self._entries = {
                generation: replace(entry, resident=replace(entry.resident, adapter_slot=slots[generation]))
                for generation, entry in move.entries.items()
            }
            self._active = {
                entry.resident.adapter_slot: entry.tensors
                for entry in self._entries.values()
                if entry.resident.adapter_slot != _INACTIVE
            }
            self._load_spec, self._move = move.load_spec, None
            active_now = self._active
        for slot, tensors in active_now.items():
            for listener in self._listeners:
                listener.set_adapter(slot, tensors)
        for entry in old.values():
            self._release(entry)

    def residents(self) -> list[Resident]:
        """All adapters in memory, by generation."""
        with self._lock:
            return [entry.resident for _, entry in sorted(self._entries.items())]

    def active(self) -> Mapping[int, AdapterTensors]:
        """Adapters by slot; the mapping never changes, a later call may return another one."""
        with self._lock:
            return self._active

    def num_bytes(self) -> int:
        """Bytes of all storages."""
        with self._lock:
            entries = [*self._entries.values(), *(self._move.entries.values() if self._move is not None else ())]
            return sum(entry.tensors.storage_bytes() for entry in entries)

    def _target(self, placement_id: str) -> tuple[_Move | None, MoEEPLoadSpec, dict[int, _Entry]]:
        """Where slices for a placement go: the move if they are for it, load spec, and the entries of its adapters."""
        move = self._move
        if move is not None and placement_id == move.load_spec.placement_id:
            return move, move.load_spec, move.entries
        return None, self._load_spec, self._entries

    @contextmanager
    def _staging(self) -> Iterator[None]:
        """One stage or discard at a time."""
        if not self._stage_lock.acquire(timeout=_STAGE_WAIT_SECONDS):
            raise UnavailableError(
                f"Another adapter has been copied to this rank for {_STAGE_WAIT_SECONDS:.0f} seconds; try again",
                reason="STAGE_BUSY",
                retry_after_seconds=_STAGE_WAIT_SECONDS,
            )
        try:
            yield
        finally:
            self._stage_lock.release()

    def _check_room(self, name: str, num_bytes: int, entries: Mapping[int, _Entry]) -> None:
        """The adapters of one placement must fit; for the time of a move, those of two are in memory."""
        with self._lock:
            used = sum(entry.tensors.storage_bytes() for entry in entries.values())
        if used + num_bytes > self._max_bytes:
            raise ResourceExhaustedError(
                f"Adapter {name} needs {num_bytes} bytes on ep_rank {self._load_spec.ep_rank}, where {used} of"
                f" {self._max_bytes} are taken; unload an adapter, or raise EPILORA_MAX_ADAPTER_BYTES",
                reason="ADAPTER_MEMORY_EXHAUSTED",
                metadata={"needed_bytes": num_bytes, "used_bytes": used, "max_adapter_bytes": self._max_bytes},
            )

    def _release(self, entry: _Entry) -> None:
        """Lets the memory go once the work queued on the device now has read it."""
        if self._device.type == "cuda":
            rows = entry.tensors.rows
            for tensor in (*entry.tensors.buffers, *(rows.tensors() if rows is not None else ())):
                tensor.record_stream(torch.cuda.current_stream(self._device))
        _log.info("adapter freed", adapter=entry.resident.name, generation=entry.resident.generation)


def _as_is(adapter: AdapterTensors) -> AdapterTensors:
    return adapter


def _not_resident(name: str, generation: int) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"Generation {generation} of adapter {name} is not resident here; only resident adapters move",
        reason="ADAPTER_NOT_RESIDENT",
    )


def _bytes_of(entry: _Entry) -> int:
    return entry.resident.expert_bytes + entry.resident.dense_bytes
