"""Memory that ranks on CPUs share, for the one-sided kernels in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from compute_worker.dispatch.peer_memory import PeerMemory
from compute_worker.ep_group import EPGroup


def shared_memory(group: EPGroup, directory: Path, num_bytes: int) -> PeerMemory:
    """A file for each rank of the group, which all of them map. All ranks call it together."""
    from compute_worker.kernels.one_sided import MAX_PROGRAMS

    paths = [directory / f"peers-{group.num_ranks}-{rank}" for rank in range(group.num_ranks)]
    with paths[group.ep_rank].open("wb") as file:
        file.truncate(num_bytes)
    dist.barrier(group=group.data_group)
    regions = [torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8) for path in paths]
    return PeerMemory(
        local=regions[group.ep_rank],
        table_G=torch.tensor([region.data_ptr() for region in regions]),
        turn_P=torch.zeros(MAX_PROGRAMS, dtype=torch.int32),
        # Few, since each waits for its like on every other rank, which may not have a processor now.
        max_programs=2,
        handle=regions,
    )
