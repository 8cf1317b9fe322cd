"""Workers and a loader whose timing and failures a test controls, on real grpc.aio servers.

For what cannot be arranged with the real ones: a race at an exact point, a failure at each stage.
The real ones are used in tests/service.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from epilora.errors import EpiloraError, NotFoundError, StalePlacementError
from epilora.placement import ExpertPlacement
from epilora.rpc import Server, start_server
from epilora.v1 import (
    cluster_service_pb2,
    generation_service_pb2,
    loader_service_pb2,
    loader_service_pb2_grpc,
    types_pb2,
    worker_service_pb2,
    worker_service_pb2_grpc,
)

VOCAB_SIZE = 1000
MAX_SEQUENCE_LENGTH = 64
SLICE_BYTES = 100
MOVED_BYTES = 70


class Script:
    """What the servers should do, and what they were asked."""

    def __init__(self) -> None:
        self.gates: dict[tuple[str, int], asyncio.Event] = {}
        self.faults: dict[tuple[str, int], EpiloraError] = {}
        self.calls: list[tuple[str, int, Any]] = []

    def hold(self, method: str, ep_rank: int = 0) -> asyncio.Event:
        """The method waits until the event is set."""
        return self.gates.setdefault((method, ep_rank), asyncio.Event())

    def fail(self, method: str, error: EpiloraError, ep_rank: int = 0) -> None:
        """The method raises until `faults` is cleared."""
        self.faults[method, ep_rank] = error

    async def enter(self, method: str, ep_rank: int, value: Any) -> None:
        self.calls.append((method, ep_rank, value))
        if (gate := self.gates.get((method, ep_rank))) is not None:
            await gate.wait()
        if (error := self.faults.get((method, ep_rank))) is not None:
            raise error

    def count(self, method: str) -> int:
        return sum(called == method for called, _, _ in self.calls)

    async def called(self, method: str, times: int = 1) -> None:
        """Waits until a method was called."""
        async with asyncio.timeout(10):
            while self.count(method) < times:
                await asyncio.sleep(0.005)


class Ranks:
    """All ranks of one group."""

    def __init__(self, num_ranks: int, run_dir: Path, script: Script) -> None:
        self.num_ranks = num_ranks
        self.script = script
        self.run_dir = run_dir
        self.instance = "incarnation-1"
        self.placement_id = "placement-1"
        self.placement: ExpertPlacement | None = None
        """Where experts are; None: placement_id without tables."""
        self.prepared: list[ExpertPlacement | None] = [None] * num_ranks
        self.moved: list[set[int]] = [set() for _ in range(num_ranks)]
        """Per rank: generations staged for what is prepared."""
        self.slots: list[dict[int, int]] = [{} for _ in range(num_ranks)]
        """Per rank: slot by generation, -1 while staged."""
        self.names: dict[int, str] = {}
        self.active: Counter[int] = Counter()
        """Generations being generated with, now."""
        self.token_pause = 0.0
        self.servers: list[Server | None] = [None] * num_ranks

    async def start(self, ep_rank: int) -> None:
        self.servers[ep_rank] = await start_server(
            f"unix:{self.run_dir}/worker-{ep_rank}.sock",
            register=lambda server: worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(
                ScriptedWorker(self, ep_rank), server
            ),
            service_names=["epilora.v1.WorkerService"],
        )

    async def kill(self, ep_rank: int) -> None:
        server = self.servers[ep_rank]
        assert server is not None
        await server.server.stop(0)
        (self.run_dir / f"worker-{ep_rank}.sock").unlink(missing_ok=True)

    async def restart_all(self, instance: str) -> None:
        """What torchelastic does when one rank dies: all come back, empty."""
        self.instance = instance
        self.prepared = [None] * self.num_ranks
        self.moved = [set() for _ in range(self.num_ranks)]
        self.slots = [{} for _ in range(self.num_ranks)]
        for ep_rank in range(self.num_ranks):
            await self.kill(ep_rank)
            await self.start(ep_rank)

    def place(self, placement: ExpertPlacement) -> None:
        """Changes the placement of all ranks."""
        self.placement, self.placement_id = placement, placement.placement_id

    def placement_message(self) -> cluster_service_pb2.GetPlacementResponse:
        if self.placement is None:
            return cluster_service_pb2.GetPlacementResponse(placement_id=self.placement_id)
        return self.placement.to_proto()

    def generations(self) -> list[dict[int, int]]:
        """What is resident where."""
        return [dict(slots) for slots in self.slots]


class ScriptedWorker(worker_service_pb2_grpc.WorkerServiceServicer):
    def __init__(self, ranks: Ranks, ep_rank: int) -> None:
        self.ranks = ranks
        self.ep_rank = ep_rank

    async def GetWorkerInfo(self, request: Any, context: Any) -> worker_service_pb2.GetWorkerInfoResponse:  # noqa: N802
        if (gate := self.ranks.script.gates.get(("GetWorkerInfo", self.ep_rank))) is not None:
            await gate.wait()
        adapters = [
            cluster_service_pb2.ResidentAdapter(
                name=self.ranks.names[generation],
                generation=generation,
                adapter_slot=slot,
                expert_bytes=SLICE_BYTES,
            )
            for generation, slot in sorted(self.ranks.slots[self.ep_rank].items())
        ]
        return worker_service_pb2.GetWorkerInfoResponse(
            rank=cluster_service_pb2.RankInfo(ep_rank=self.ep_rank, ready=True, pid=self.ep_rank + 1),
            model=cluster_service_pb2.ModelInfo(
                name="m", model_type="qwen3_moe", vocab_size=VOCAB_SIZE, eos_token_ids=[999]
            ),
            load_spec=types_pb2.MoEEPLoadSpec(
                ep_rank=self.ep_rank, num_ep_ranks=self.ranks.num_ranks, placement_id=self.ranks.placement_id
            ),
            placement=self.ranks.placement_message(),
            expert_load=self._expert_load(),
            memory=cluster_service_pb2.RankMemory(ep_rank=self.ep_rank, adapters=adapters),
            max_sequence_length=MAX_SEQUENCE_LENGTH,
            steps=worker_service_pb2.StepStatistics(num_consensus_waits=4, consensus_wait_seconds=0.5),
            group_instance_id=self.ranks.instance,
        )

    def _expert_load(self) -> list[worker_service_pb2.LocalExpertLoad]:
        """Ten rows of expert 0, one of each other."""
        placement = self.ranks.placement
        return [
            worker_service_pb2.LocalExpertLoad(
                layer=layer,
                num_rows=[1 if expert else 10 for expert in placement.local_experts(layer, self.ep_rank)],
            )
            for layer in (placement.layers if placement is not None else ())
        ]

    async def PreparePlacement(  # noqa: N802
        self, request: Any, context: Any
    ) -> worker_service_pb2.PreparePlacementResponse:
        await self.ranks.script.enter("PreparePlacement", self.ep_rank, request)
        placement = ExpertPlacement.from_proto(request.placement)
        self.ranks.prepared[self.ep_rank] = placement
        spec = types_pb2.MoEEPLoadSpec(
            ep_rank=self.ep_rank, num_ep_ranks=self.ranks.num_ranks, placement_id=placement.placement_id
        )
        return worker_service_pb2.PreparePlacementResponse(load_spec=spec, num_experts_read=3)

    async def TakePlacement(self, request: Any, context: Any) -> worker_service_pb2.TakePlacementResponse:  # noqa: N802
        await self.ranks.script.enter("TakePlacement", self.ep_rank, request)
        [placement] = {each.placement_id: each for each in self.ranks.prepared if each is not None}.values()
        assert None not in self.ranks.prepared
        assert self.ranks.moved == [set(slots) for slots in self.ranks.slots]
        self.ranks.place(placement)
        self.ranks.prepared = [None] * self.ranks.num_ranks
        self.ranks.moved = [set() for _ in range(self.ranks.num_ranks)]
        return worker_service_pb2.TakePlacementResponse(step=9)

    async def AbandonPlacement(  # noqa: N802
        self, request: Any, context: Any
    ) -> worker_service_pb2.AbandonPlacementResponse:
        await self.ranks.script.enter("AbandonPlacement", self.ep_rank, request)
        self.ranks.prepared[self.ep_rank] = None
        self.ranks.moved[self.ep_rank] = set()
        return worker_service_pb2.AbandonPlacementResponse()

    async def StageAdapter(self, request: Any, context: Any) -> worker_service_pb2.StageAdapterResponse:  # noqa: N802
        await self.ranks.script.enter("StageAdapter", self.ep_rank, request.generation)
        prepared = self.ranks.prepared[self.ep_rank]
        if prepared is not None and request.slice.placement_id == prepared.placement_id:
            assert request.generation in self.ranks.slots[self.ep_rank]
            self.ranks.moved[self.ep_rank].add(request.generation)
            return worker_service_pb2.StageAdapterResponse(resident_bytes=MOVED_BYTES)
        if request.slice.placement_id != self.ranks.placement_id:
            raise StalePlacementError("another placement", reason="STALE_PLACEMENT")
        self.ranks.names[request.generation] = request.name
        self.ranks.slots[self.ep_rank].setdefault(request.generation, -1)
        return worker_service_pb2.StageAdapterResponse(resident_bytes=SLICE_BYTES)

    async def ActivateAdapter(self, request: Any, context: Any) -> worker_service_pb2.ActivateAdapterResponse:  # noqa: N802
        await self.ranks.script.enter("ActivateAdapter", self.ep_rank, request.generation)
        taken = {slot for slots in self.ranks.slots for slot in slots.values()}
        slot = next(slot for slot in range(100) if slot not in taken)
        for slots in self.ranks.slots:
            assert slots[request.generation] == -1
            slots[request.generation] = slot
        return worker_service_pb2.ActivateAdapterResponse(adapter_slot=slot, step=1)

    async def RetireAdapter(self, request: Any, context: Any) -> worker_service_pb2.RetireAdapterResponse:  # noqa: N802
        await self.ranks.script.enter("RetireAdapter", self.ep_rank, request.generation)
        assert self.ranks.active[request.generation] == 0, "retired while in use"
        if self.ranks.slots[0].get(request.generation, -1) < 0:
            raise NotFoundError("not active", reason="ADAPTER_NOT_ACTIVE")
        for slots, moved in zip(self.ranks.slots, self.ranks.moved, strict=True):
            slots.pop(request.generation, None)
            moved.discard(request.generation)
        return worker_service_pb2.RetireAdapterResponse(step=2)

    async def DiscardAdapter(self, request: Any, context: Any) -> worker_service_pb2.DiscardAdapterResponse:  # noqa: N802
        await self.ranks.script.enter("DiscardAdapter", self.ep_rank, request.generation)
        if self.ranks.slots[self.ep_rank].get(request.generation) == -1:
            del self.ranks.slots[self.ep_rank][request.generation]
        return worker_service_pb2.DiscardAdapterResponse()

    async def GenerateTokens(self, request: Any, context: Any) -> None:  # noqa: N802
        """Tokens first + 1, first + 2, ... plus 100 times the generation."""
        generation = request.adapter_generation
        if generation and self.ranks.slots[self.ep_rank].get(generation, -1) < 0:
            raise NotFoundError(f"generation {generation} is not active", reason="GENERATION_NOT_ACTIVE")
        self.ranks.active[generation] += 1
        try:
            await self.ranks.script.enter("GenerateTokens", self.ep_rank, request)
            for index in range(request.max_tokens):
                await asyncio.sleep(self.ranks.token_pause)
                token = (request.token_ids[0] + index + 1 + 100 * generation) % VOCAB_SIZE
                stopped = token in request.stop_token_ids
                finish = generation_service_pb2.FINISH_REASON_UNSPECIFIED
                if stopped:
                    finish = generation_service_pb2.FINISH_REASON_STOP
                elif index == request.max_tokens - 1:
                    finish = generation_service_pb2.FINISH_REASON_LENGTH
                await context.write(worker_service_pb2.GenerateTokensResponse(token_ids=[token], finish_reason=finish))
                if stopped:
                    return
        finally:
            self.ranks.active[generation] -= 1

    async def ForwardExperts(self, request_iterator: Any, context: Any) -> None:  # noqa: N802
        async for request in request_iterator:
            await self.ranks.script.enter("ForwardExperts", self.ep_rank, list(request.adapter_generations))
            if request.layer == 99:
                raise NotFoundError("no such layer", reason="LAYER_NOT_FOUND", field="layer")
            await context.write(
                worker_service_pb2.ForwardExpertsResponse(
                    request_id=request.request_id, hidden_states=request.hidden_states
                )
            )


class ScriptedLoader(loader_service_pb2_grpc.LoaderServiceServicer):
    """Slices are named after their source; the digest is the source plus `content`."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.leases: set[str] = set()
        self.content = "1"
        self.pinned_source = ""
        self.placement_id = ""
        self._num_leases = 0

    async def BuildSlices(self, request: Any, context: Any) -> None:  # noqa: N802
        total = SLICE_BYTES * len(request.load_specs)
        await context.write(
            loader_service_pb2.BuildSlicesResponse(
                progress=loader_service_pb2.BuildProgress(bytes_done=total // 2, bytes_total=total)
            )
        )
        await self.script.enter("BuildSlices", 0, request)
        self._num_leases += 1
        lease = f"lease-{self._num_leases}"
        self.leases.add(lease)
        slices = [
            loader_service_pb2.Slice(
                ep_rank=spec.ep_rank,
                placement_id=self.placement_id or spec.placement_id,
                path=f"{request.source}/{spec.ep_rank}",
                tensor_bytes=SLICE_BYTES,
            )
            for spec in request.load_specs
        ]
        self.placement_id = ""
        result = loader_service_pb2.BuildResult(
            lease_id=lease,
            adapter_digest=request.source + self.content,
            pinned_source=self.pinned_source,
            slices=slices,
            report=types_pb2.AdapterLoadReport(num_tensors=4, num_tensors_used=4, file_dtype="F32"),
        )
        await context.write(loader_service_pb2.BuildSlicesResponse(result=result))

    async def ReleaseSlices(self, request: Any, context: Any) -> loader_service_pb2.ReleaseSlicesResponse:  # noqa: N802
        await self.script.enter("ReleaseSlices", 0, request.lease_id)
        self.leases.discard(request.lease_id)
        return loader_service_pb2.ReleaseSlicesResponse()

    async def GetCache(self, request: Any, context: Any) -> loader_service_pb2.GetCacheResponse:  # noqa: N802
        return loader_service_pb2.GetCacheResponse(used_bytes=7, num_leases=len(self.leases), budget_bytes=70)


@asynccontextmanager
async def running_loader(run_dir: Path, script: Script) -> Any:
    loader = ScriptedLoader(script)
    server = await start_server(
        f"unix:{run_dir}/loader.sock",
        register=lambda s: loader_service_pb2_grpc.add_LoaderServiceServicer_to_server(loader, s),
        service_names=["epilora.v1.LoaderService"],
    )
    try:
        yield loader, server
    finally:
        await server.server.stop(0)
