"""The expert-parallel group: which rank this process is, and the process groups it talks through."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from epilora.errors import InvalidArgumentError
from epilora.settings import WorkerSettings

NCCL_CTAS = 32
"""Thread blocks of each NCCL kernel. Nothing else runs beside a layer's collectives, so they may take more of the GPU
than NCCL's own choice, which leaves it to the computing that it expects beside them: up to a tenth less time of a layer
on two H200 (docs/dispatch.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EPGroup:
    """One rank's view of the group of ranks that step together.

    `data_group` carries tensors of the step (NCCL on a GPU, gloo on CPU); `control_group` is always gloo, so that
    control messages never wait behind the device. Both have settings.collective_timeout_seconds as their deadline.

    Where an expert is split over several ranks (expert_tp), ranks expert_tp * i and those after it hold the parts of
    the experts that the placement gives to its rank i.
    """

    ep_rank: int
    num_ranks: int
    device: torch.device
    data_group: dist.ProcessGroup
    control_group: dist.ProcessGroup
    expert_tp: int = 1

    @property
    def placement_rank(self) -> int:
        """Rank of the placement whose experts this one holds, or parts of them."""
        return self.ep_rank // self.expert_tp

    @property
    def expert_tp_rank(self) -> int:
        """Which part of them."""
        return self.ep_rank % self.expert_tp

    @classmethod
    def from_environment(cls, settings: WorkerSettings) -> EPGroup:
        """Joins the group that torchrun's RANK, WORLD_SIZE, LOCAL_RANK and MASTER_* describe; alone without them.

        Raises:
            InvalidArgumentError: torchrun started another number of processes than settings.num_ranks, or the
                device that was asked for is not there.
        """
        ep_rank = int(os.environ.get("RANK", "0"))
        num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if num_ranks != settings.num_ranks:
            raise InvalidArgumentError(
                f"WORLD_SIZE is {num_ranks}, expected EPILORA_NUM_RANKS = {settings.num_ranks}; start torchrun with as"
                " many processes as there are ranks",
                reason="WORLD_SIZE_MISMATCH",
                metadata={"world_size": num_ranks, "num_ranks": settings.num_ranks},
            )
        settings.num_placed(num_ranks)  # raises where expert_tp does not fit
        device = _device(settings.device, local_rank)
        timeout = timedelta(seconds=settings.collective_timeout_seconds)
        if not dist.is_initialized():
            if num_ranks == 1:
                store = dist.HashStore()  # type: ignore[attr-defined]
                dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timeout)
            else:
                store = _group_store(num_ranks, timeout)
                dist.init_process_group("gloo", store=store, rank=ep_rank, world_size=num_ranks, timeout=timeout)
        control_group = dist.group.WORLD
        assert control_group is not None
        if device.type == "cuda":
            torch.cuda.set_device(device)
            # Registering buffers while a graph is captured needs all ranks at once; each captures when it comes to it.
            os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
            data_group = dist.new_group(backend="nccl", timeout=timeout, pg_options=_nccl_options(timeout))
        else:
            data_group = dist.new_group(backend="gloo", timeout=timeout)
        return cls(
            ep_rank=ep_rank,
            num_ranks=num_ranks,
            device=device,
            data_group=data_group,
            control_group=control_group,
            expert_tp=settings.expert_tp,
        )

    @property
    def device_name(self) -> str:
        """For people, e.g. "cpu" or "cuda:0 NVIDIA H200"."""
        if self.device.type != "cuda":
            return self.device.type
        return f"{self.device} {torch.cuda.get_device_name(self.device)}"


def _nccl_options(timeout: timedelta) -> dist.ProcessGroupNCCL.Options:  # type: ignore[name-defined]
    options = dist.ProcessGroupNCCL.Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    # NCCL refuses the one without the other.
    options.config.min_ctas = options.config.max_ctas = NCCL_CTAS
    return options


def _group_store(num_ranks: int, timeout: timedelta) -> dist.PrefixStore:  # type: ignore[name-defined]
    """The agent's store, with keys of this incarnation only.

    torchelastic keeps its store over restarts of the group: without a prefix, a rank could read the address that a
    peer had before it died, and wait for it in vain.
    """
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host_name=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]),
        world_size=num_ranks,
        is_master=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and os.environ["RANK"] == "0",
        timeout=timeout,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"epilora/{attempt}", store)  # type: ignore[attr-defined]


def _device(wanted: str, local_rank: int) -> torch.device:
    """The device of this process: the GPU numbered like its place on the host, or the CPU."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    num_devices = torch.cuda.device_count()
    if local_rank >= num_devices:
        raise InvalidArgumentError(
            f"Local rank {local_rank} needs GPU {local_rank}, but {num_devices} GPUs are visible; start fewer ranks on"
            " this host, or set EPILORA_DEVICE=cpu",
            reason="DEVICE_NOT_FOUND",
            metadata={"local_rank": local_rank, "num_devices": num_devices},
        )
    return torch.device("cuda", local_rank)
