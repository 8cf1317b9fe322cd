"""Memory of each GPU of a host that all ranks' kernels can write to (torch's symmetric memory, without multicast)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from compute_worker.dispatch.packed_rows import HAS_TRITON
from compute_worker.ep_group import EPGroup
from epilora.errors import InvalidArgumentError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROGRAMS_OF_A_PROCESSOR = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerMemory:
    """A region of the same size on every rank, zeros at first.

    Attributes:
        local: uint8; this rank's region.
        table_G: int64, on this device; address of every rank's region, as this process sees it.
        turn_P: int32 [MAX_PROGRAMS] zeros, on this device, of this rank alone: see kernels.one_sided.
        max_programs: that may wait for each other: so many run at once on every rank's device.
        handle: keeps the other ranks' regions mapped.
    """

    local: torch.Tensor
    table_G: torch.Tensor
    turn_P: torch.Tensor
    max_programs: int
    handle: object = None

    @classmethod
    def open(cls, group: EPGroup, num_bytes: int) -> PeerMemory:
        """Makes the regions. All ranks call it together, where `why_no_peer_memory` has nothing to say.

        Raises:
            InvalidArgumentError: reason NO_PEER_MEMORY; the driver refuses.
        """
        # Nothing here needs it, and it takes resources of the switch that other programs share.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        from torch.distributed import _symmetric_memory

        from compute_worker.kernels.one_sided import MAX_PROGRAMS

        try:
            local = _symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=group.device)
            handle = _symmetric_memory.rendezvous(local, group.data_group)
        except RuntimeError as error:
            raise InvalidArgumentError(
                f"rank {group.ep_rank}: {num_bytes} bytes of memory that other GPUs can write to cannot be made:"
                f" {error}; set EPILORA_DISPATCH_BACKEND=allgather_reducescatter",
                reason="NO_PEER_MEMORY",
                metadata={"ep_rank": group.ep_rank, "num_bytes": num_bytes},
            ) from error
        assert handle.rank == group.ep_rank, (handle.rank, group.ep_rank)
        # A region may begin inside of the block that was shared, at the same place on every rank.
        offset = local.data_ptr() - handle.buffer_ptrs[group.ep_rank]
        processors = torch.cuda.get_device_properties(group.device).multi_processor_count
        facts = [(offset, processors)] * group.num_ranks
        dist.all_gather_object(facts, facts[0], group=group.control_group)
        assert {theirs for theirs, _ in facts} == {offset}, facts
        table_G = torch.tensor([base + offset for base in handle.buffer_ptrs], device=group.device)
        turn_P = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=group.device)
        local.zero_()
        torch.cuda.synchronize(group.device)
        # Nobody writes before all regions are zeros.
        dist.barrier(group=group.control_group)
        max_programs = min(MAX_PROGRAMS, _PROGRAMS_OF_A_PROCESSOR * min(theirs for _, theirs in facts))
        return cls(local=local, table_G=table_G, turn_P=turn_P, max_programs=max_programs, handle=handle)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seat:
    """Where a rank runs."""

    host: str
    device: torch.device
    has_triton: bool


def why_no_peer_memory(group: EPGroup) -> str:
    """Why the ranks cannot write into each other's memory; empty if they can. All ranks call it, and get the same."""
    if group.num_ranks == 1:
        return "there is one rank only"
    if group.device.type != "cuda":
        # The others' data group has no GPUs either.
        return f"rank {group.ep_rank} runs on a {group.device.type.upper()}"
    seats = [_Seat(host=_host(), device=group.device, has_triton=HAS_TRITON)] * group.num_ranks
    dist.all_gather_object(seats, seats[0], group=group.control_group)
    for rank, seat in enumerate(seats):
        if not seat.has_triton:
            return f"rank {rank} has no triton"
        if seat.host != seats[0].host:
            return f"rank {rank} is not on the host, or not in the container, of rank 0"
    answers = [_why_not_reached(group, seats)] * group.num_ranks
    dist.all_gather_object(answers, answers[0], group=group.control_group)
    return next((answer for answer in answers if answer), "")


def _why_not_reached(group: EPGroup, seats: list[_Seat]) -> str:
    mine = group.device.index
    for rank, seat in enumerate(seats):
        if rank == group.ep_rank:
            continue
        if seat.device.index == mine:
            return f"ranks {group.ep_rank} and {rank} share GPU {mine}"
        if seat.device.index >= torch.cuda.device_count():
            return f"rank {group.ep_rank} does not see GPU {seat.device.index} of rank {rank}"
        if not torch.cuda.can_device_access_peer(mine, seat.device.index):
            return f"GPU {mine} of rank {group.ep_rank} cannot reach the memory of GPU {seat.device.index}"
    return ""


def _host() -> str:
    """Tells hosts, and containers that do not see each other's processes, apart."""
    return f"{_BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
