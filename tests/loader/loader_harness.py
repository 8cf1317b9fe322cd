"""A loader in this process, on a Unix socket, and calls to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from epilora.errors import EpiloraError
from epilora.load_spec import MoEEPLoadSpec
from epilora.model_spec import ModelSpec
from epilora.placement import ExpertPlacement
from epilora.rpc import error_from, make_channel
from epilora.settings import LoaderSettings
from epilora.v1 import loader_service_pb2 as pb
from epilora.v1 import loader_service_pb2_grpc as pb_grpc
from epilora.v1 import types_pb2
from loader_service.server import LoaderServer
from tests.unit.epilora_adapters import write_adapter
from tests.unit.epilora_models import model_spec

TIMEOUT_SECONDS = 60.0
WIDE = 4096


def wide_model(path: Path) -> ModelSpec:
    """Wide enough that a build takes a moment."""
    return model_spec(path, hidden_size=WIDE, head_dim=64, num_experts=16)


def big_adapter(path: Path, *, lora_rank: int = 32, seed: int = 0) -> Path:
    """For `wide_model`; about 50 MB at lora_rank 32."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(2):
        for expert in range(16):
            for name, out, width in (("gate_proj", 6, WIDE), ("up_proj", 6, WIDE), ("down_proj", WIDE, 6)):
                module = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}"
                tensors[f"{module}.lora_A.weight"] = rng.random((lora_rank, width), dtype=np.float32)
                tensors[f"{module}.lora_B.weight"] = rng.random((out, lora_rank), dtype=np.float32)
    return write_adapter(path, tensors, r=lora_rank)


def loader_settings(path: Path, roots: Sequence[Path], **changes: Any) -> LoaderSettings:
    """Settings with everything under `path`."""
    options = {
        "model": path,
        "run_dir": path / "run",
        "cache_dir": path / "cache",
        "adapter_roots": list(roots),
        **changes,
    }
    return LoaderSettings(**options)


class LoaderClient:
    """Calls with a deadline; errors come as the exceptions that the loader raised."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = pb_grpc.LoaderServiceStub(channel)

    async def build(self, request: pb.BuildSlicesRequest) -> pb.BuildResult:
        """The result of a build, the stream read to its end."""
        result = None
        async for response in self.stream(request):
            if response.WhichOneof("event") == "result":
                result = response.result
        assert result is not None
        return result

    async def stream(self, request: pb.BuildSlicesRequest) -> AsyncIterator[pb.BuildSlicesResponse]:
        """All messages of a build."""
        try:
            async for response in self._stub.BuildSlices(request, timeout=TIMEOUT_SECONDS):
                yield response
        except grpc.aio.AioRpcError as error:
            raise error_from(error) from error

    def start(self, request: pb.BuildSlicesRequest) -> Any:
        """The call itself, for cancelling."""
        return self._stub.BuildSlices(request, timeout=TIMEOUT_SECONDS)

    async def error(self, request: pb.BuildSlicesRequest) -> EpiloraError:
        """The error that a build ends with."""
        try:
            await self.build(request)
        except EpiloraError as error:
            return error
        raise AssertionError("the build succeeded")

    async def release(self, lease_id: str) -> int:
        """Bytes freed."""
        reply = await self._stub.ReleaseSlices(pb.ReleaseSlicesRequest(lease_id=lease_id), timeout=TIMEOUT_SECONDS)
        return reply.freed_bytes

    async def verify(self) -> pb.VerifyCacheResponse:
        """Reads back the cache."""
        return await self._stub.VerifyCache(pb.VerifyCacheRequest(), timeout=TIMEOUT_SECONDS)

    async def cache(self) -> pb.GetCacheResponse:
        """Numbers of the cache."""
        return await self._stub.GetCache(pb.GetCacheRequest(), timeout=TIMEOUT_SECONDS)


@asynccontextmanager
async def running_loader(settings: LoaderSettings) -> AsyncIterator[LoaderClient]:
    """A started loader and its client; stopped at the end."""
    server = LoaderServer(settings)
    await server.start()
    try:
        async with make_channel(settings.loader_address_resolved()) as channel:
            yield LoaderClient(channel)
    finally:
        await server.stop()


def build_request(
    source: Path | str,
    model: ModelSpec,
    placement: ExpertPlacement,
    *,
    ep_ranks: Sequence[int] | None = None,
    allow_partial: bool = False,
) -> pb.BuildSlicesRequest:
    """A request for some ranks, or all."""
    ranks = range(placement.num_ranks) if ep_ranks is None else ep_ranks
    return pb.BuildSlicesRequest(
        source=str(source),
        load_specs=[MoEEPLoadSpec.make(model, placement, rank).to_proto() for rank in ranks],
        dense_modules=[
            types_pb2.DenseModule(module=dense.module, in_features=dense.in_features, out_features=dense.out_features)
            for dense in model.dense_modules
        ],
        allow_partial=allow_partial,
        model_type=model.model_type,
    )
