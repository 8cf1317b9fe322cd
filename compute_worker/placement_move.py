"""Moves this rank's experts to another placement while it serves: prepared beside traffic, taken up at one step.

Prepared is what the rank lacks: base weights of experts new to it, read from the checkpoint, and slices of the resident
adapters for the new load spec (`AdapterPool`). At the step that all ranks agree on, the experts that stay are copied to
their new slots layer by layer, so that beside the incoming experts one layer at most is in memory twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import structlog
import torch
from torch import nn

from compute_worker.adapter_pool import AdapterPool
from compute_worker.checkpoint import LoadedModel
from compute_worker.checkpoint_experts import ExpertParameter
from compute_worker.expert_layer import ExpertLayer, PhysicalExperts
from compute_worker.expert_load import ExpertLoad
from compute_worker.runner_parts import MakeExperts
from epilora.errors import (
    AbortedError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    StalePlacementError,
    UnavailableError,
)
from epilora.load_spec import MoEEPLoadSpec
from epilora.model_spec import ModelSpec
from epilora.placement import ExpertPlacement, check_table

_ABANDON_WAIT_SECONDS = 60.0

_log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A placement on this rank.

    There is a new object after each move: whoever keeps pointers to the layers' tensors drops them then.
    """

    placement: ExpertPlacement
    load_spec: MoEEPLoadSpec
    expert_load: ExpertLoad

    @classmethod
    def make(
        cls,
        model: ModelSpec,
        placement: ExpertPlacement,
        ep_rank: int,
        *,
        num_adapter_slots: int,
        device: torch.device,
    ) -> Placed:
        """A placement whose rows nobody has counted yet."""
        load_spec = MoEEPLoadSpec.make(model, placement, ep_rank)
        num_slots = {spec.moe.layer: len(spec.local_experts) for spec in load_spec.layers}
        return cls(
            placement=placement, load_spec=load_spec, expert_load=ExpertLoad(num_slots, num_adapter_slots, device)
        )

    def local_experts(self, layer: int) -> tuple[int, ...]:
        """Logical expert in each local slot of a layer."""
        return self.placement.local_experts(layer, self.load_spec.ep_rank)


@dataclass(kw_only=True, slots=True)
class _Move:
    """One move, from prepare to place or abandon.

    Attributes:
        number: chosen by who asked for it, the same on all ranks.
        incoming: experts new to this rank: parameter name -> logical expert -> weights.
        reserve: memory kept free for the layer that is in memory twice during the flip (GPU).
        is_ready: everything incoming has been read.
        is_promised: this rank told the others that it can flip.
        is_given_up: to be dropped.
    """

    number: int
    placed: Placed
    physical: Mapping[int, PhysicalExperts]
    incoming: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)
    reserve: torch.Tensor | None = None
    is_ready: bool = False
    is_promised: bool = False
    is_given_up: bool = False


class PlacementMover:
    """See the module. prepare and abandon are for RPC threads; promise, withdraw and place for the step thread.

    Args:
        model: the model.
        placed: the placement at start.
        loaded: holds the experts' parameters.
        layers: by number.
        make_experts: the local experts of a layer from its experts module.
        pool: the adapters in memory.
        device: where everything is.

    Attributes:
        placed: what runs.
        on_placed: called once another placement has been taken up.
    """

    def __init__(
        self,
        *,
        model: ModelSpec,
        placed: Placed,
        loaded: LoadedModel,
        layers: Mapping[int, ExpertLayer],
        make_experts: MakeExperts,
        pool: AdapterPool,
        device: torch.device,
    ) -> None:
        self.placed = placed
        self._model = model
        self._loaded = loaded
        self._layers = layers
        self._make_experts = make_experts
        self._num_experts = {moe.layer: moe.num_experts for moe in model.moe_layers}
        self.on_placed: Callable[[], None] = lambda: None
        self._pool = pool
        self._device = device
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._move: _Move | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def prepare(self, number: int, placement: ExpertPlacement) -> int:
        """Reads what the placement brings to this rank, beside the running steps; slices may be staged from then on.

        Returns:
            Experts read, those of each layer counted.

        Raises:
            InvalidArgumentError: the placement is not one of this model and group (BAD_PLACEMENT).
            FailedPreconditionError: it is the one that runs (ALREADY_PLACED), another one is prepared
                (PLACEMENT_PREPARED), or the checkpoint was changed (CHECKPOINT_CHANGED).
            ResourceExhaustedError: no memory for it.
            AbortedError: it was given up meanwhile.
        """
        self._check(placement)
        device, ep_rank = self._device, self.placed.load_spec.ep_rank
        move = _Move(
            number=number,
            placed=Placed.make(
                self._model,
                placement,
                ep_rank,
                num_adapter_slots=self.placed.expert_load.num_adapter_slots,
                device=device,
            ),
            physical={
                layer: PhysicalExperts.make(placement, layer, device, ep_rank=ep_rank) for layer in placement.layers
            },
        )
        with self._lock:
            self._check_free(placement)
            self._move = move
        start = time.monotonic()
        try:
            with self._reading:
                self._read(move)
                with self._lock:
                    if move.is_given_up:
                        raise _given_up(number)
                    self._pool.begin_move(move.placed.load_spec)
                    move.is_ready = True
        except torch.OutOfMemoryError as error:
            self._drop(move)
            raise ResourceExhaustedError(
                f"ep_rank {move.placed.load_spec.ep_rank} has no memory for the experts that the placement brings to it"
                " beside those that it serves; move fewer at once, or lower EPILORA_KV_CACHE_BYTES",
                reason="PLACEMENT_MEMORY_EXHAUSTED",
            ) from error
        except BaseException:
            self._drop(move)
            raise
        num_read = sum(len(weights) for name, weights in move.incoming.items() if name in self._first_parameters())
        _log.info("placement prepared", move=number, num_experts_read=num_read, seconds=time.monotonic() - start)
        return num_read

    def abandon(self, number: int | None = None) -> None:
        """Drops what is prepared, also while it is being read; nothing prepared is no error.

        Args:
            number: only a move of this number; None: any.

        Raises:
            FailedPreconditionError: reason PLACEMENT_PROMISED; the ranks are about to take it up.
            UnavailableError: the reading did not end in time.
        """
        with self._lock:
            move = self._move
            if move is None or number not in (None, move.number):
                return
            if move.is_promised:
                raise FailedPreconditionError(
                    f"move {move.number} is being taken up by all ranks; ask for the placement afterwards",
                    reason="PLACEMENT_PROMISED",
                )
            move.is_given_up = True
        if not self._reading.acquire(timeout=_ABANDON_WAIT_SECONDS):
            raise UnavailableError(
                f"The reading of move {move.number} did not end within {_ABANDON_WAIT_SECONDS:.0f} seconds",
                reason="MOVE_BUSY",
                retry_after_seconds=_ABANDON_WAIT_SECONDS,
            )
        self._reading.release()
        self._drop(move)
        _log.info("placement abandoned", move=move.number)

    def promise(self, number: int) -> bool:
        """True if this rank can take a move up at the next step; it will then not be abandoned. Step thread only."""
        with self._lock:
            move = self._move
            if move is None or move.number != number or not move.is_ready or move.is_given_up:
                return False
            move.is_promised = self._pool.is_move_complete()
            return move.is_promised

    def withdraw(self, number: int) -> None:
        """Takes a promise back: another rank could not. Step thread only."""
        with self._lock:
            if self._move is not None and self._move.number == number:
                self._move.is_promised = False

    def place(self, number: int) -> None:
        """Takes the promised move up. Step thread only, all ranks before the same step."""
        start = time.monotonic()
        with self._lock:
            move = self._move
            assert move is not None and move.number == number and move.is_promised, number  # noqa: PT018
            self._move = None
        move.reserve = None
        for layer in self._layers:
            self._place_layer(layer, move)
        if self._stream is not None:
            # Incoming memory belongs to the other stream, which might use it again before the copies are done.
            torch.cuda.synchronize(self._device)
        self._pool.place()
        self.placed = move.placed
        self.on_placed()
        _log.info(
            "placement taken up",
            move=number,
            placement_id=move.placed.placement.placement_id,
            seconds=round(time.monotonic() - start, 4),
        )

    def matrix_of(self, layer: int, attribute: str, expert: int) -> torch.Tensor:
        """An expert's matrix as its parameter stores it: here now, or coming with the prepared move. Any thread.

        Raises:
            StalePlacementError: it is neither.
        """
        with self._lock:
            incoming = {} if self._move is None else self._move.incoming
        name, parameter = next(
            (name, parameter)
            for name, parameter in self._loaded.experts.items()
            if parameter.layer == layer and parameter.attribute == attribute
        )
        held, weights = self.placed.local_experts(layer), parameter.local()
        # While a move is taken up, the table may be that of the placement before.
        if expert in held and held.index(expert) < weights.shape[0]:
            return weights[held.index(expert)]
        found = incoming.get(name, {}).get(expert)
        if found is None:
            raise StalePlacementError(
                f"expert {expert} of layer {layer} is not on this rank any more; build the slice for the new placement",
                reason="STALE_PLACEMENT",
            )
        return found

    def num_bytes(self) -> int:
        """Bytes of the local experts' base weights, those of a prepared move included."""
        with self._lock:
            incoming = list(self._move.incoming.values()) if self._move is not None else []
        own = sum(parameter.local().nbytes for parameter in self._loaded.experts.values())
        return own + sum(weight.nbytes for weights in incoming for weight in list(weights.values()))

    def _check(self, placement: ExpertPlacement) -> None:
        running, num_experts = self.placed.placement, {moe.layer: moe.num_experts for moe in self._model.moe_layers}
        if placement.num_ranks != running.num_ranks or placement.layers != running.layers:
            raise InvalidArgumentError(
                f"The placement is for {placement.num_ranks} ranks and layers {list(placement.layers)}, expected"
                f" {running.num_ranks} ranks and layers {list(running.layers)}",
                reason="BAD_PLACEMENT",
            )
        for layer, count in num_experts.items():
            table = [placement.local_experts(layer, ep_rank) for ep_rank in range(placement.num_ranks)]
            check_table(table, count, placement.num_ranks, where=f"layer {layer}")

    def _check_free(self, placement: ExpertPlacement) -> None:
        if self._move is not None:
            raise FailedPreconditionError(
                f"move {self._move.number} is prepared already; abandon it first", reason="PLACEMENT_PREPARED"
            )
        if placement.placement_id == self.placed.placement.placement_id:
            raise FailedPreconditionError(
                f"placement {placement.placement_id} is the one that runs", reason="ALREADY_PLACED"
            )

    def _read(self, move: _Move) -> None:
        """Reads the experts that this rank lacks, parameter by parameter."""
        with self._on_stream(), self._loaded.reader.open() as fill:
            for name, parameter in self._loaded.experts.items():
                current = self.placed.local_experts(parameter.layer)
                move.incoming[name] = {}
                for expert in move.placed.local_experts(parameter.layer):
                    if move.is_given_up:
                        raise _given_up(move.number)
                    if expert not in current:
                        local = parameter.local()
                        weight = torch.empty(parameter.slot_shape(), dtype=local.dtype, device=self._device)
                        parameter.fill(fill, name, expert, weight)
                        move.incoming[name][expert] = weight
        if self._stream is not None:
            self._stream.synchronize()
            move.reserve = torch.empty(self._largest_layer(move), dtype=torch.uint8, device=self._device)

    def _largest_layer(self, move: _Move) -> int:
        """Bytes of the layer that will have most here."""
        sizes: dict[int, int] = {}
        for parameter in self._loaded.experts.values():
            count = len(move.placed.local_experts(parameter.layer))
            elements = torch.Size(parameter.slot_shape()).numel() * count
            sizes[parameter.layer] = sizes.get(parameter.layer, 0) + elements * parameter.local().dtype.itemsize
        return max(sizes.values(), default=0)

    def _place_layer(self, layer: int, move: _Move) -> None:
        module = None
        for name, parameter in self._loaded.experts.items():
            if parameter.layer == layer:
                module = parameter.owner
                self._place_parameter(parameter, move.placed.local_experts(layer), move.incoming.pop(name))
        assert module is not None, layer
        self._layers[layer].place(
            experts=self._make_experts(module, self._num_experts[layer]),
            physical=move.physical[layer],
            counter=move.placed.expert_load.counter(layer),
        )

    def _place_parameter(
        self, parameter: ExpertParameter, local_experts: tuple[int, ...], incoming: Mapping[int, torch.Tensor]
    ) -> None:
        """Gives a parameter its new slots: those that stay are copied, the others are incoming."""
        old = parameter.local().data
        slot_of = {expert: slot for slot, expert in enumerate(self.placed.local_experts(parameter.layer))}
        new = old.new_empty((len(local_experts), *old.shape[1:]))
        for slot, expert in enumerate(local_experts):
            new[slot].copy_(old[slot_of[expert]] if expert in slot_of else incoming[expert])
        setattr(parameter.owner, parameter.attribute, nn.Parameter(new, requires_grad=False))

    def _first_parameters(self) -> set[str]:
        """One parameter of each layer, to count experts by."""
        return set({parameter.layer: name for name, parameter in self._loaded.experts.items()}.values())

    def _drop(self, move: _Move) -> None:
        with self._lock:
            if self._move is move:
                self._move = None
                self._pool.end_move()
        move.incoming.clear()
        move.reserve = None

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            yield


def _given_up(number: int) -> AbortedError:
    return AbortedError(f"move {number} was given up; the placement before it goes on", reason="MOVE_GIVEN_UP")
