"""Stops a worker at each step of taking a slice, gives the slice's lease back, and lets the worker go on or kills it.

    python -m tests.soak.killed_worker DIRECTORY

DIRECTORY holds `model/` and `adapters/a`. This process is the loader; workers are forks of it that stage one slice
with the worker's own adapter pool, and stop themselves before one of the system calls of doing so. Prints one JSON
object for each step and ending.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.no_weights import NoWeights
from compute_worker.adapter_pool import AdapterPool
from epilora.errors import UnavailableError
from epilora.load_spec import MoEEPLoadSpec
from epilora.model_spec import ModelSpec
from epilora.placement import ExpertPlacement
from loader_service.build import AdapterBuilder
from loader_service.cache import BuiltSlices, SliceCache
from loader_service.request import BuildRequest
from loader_service.writer import BuildProgress
from tests.loader.loader_harness import build_request, loader_settings


class Loader:
    """A cache, and the slices of one adapter for one rank of two."""

    def __init__(self, directory: Path) -> None:
        self.model = ModelSpec.from_directory(directory / "model")
        placement = ExpertPlacement.make("linear", self.model, 2)
        self.load_spec = MoEEPLoadSpec.make(self.model, placement, 0)
        settings = loader_settings(directory, [directory / "adapters"])
        self.cache = SliceCache(settings.cache_dir, settings.cache_budget_bytes)
        self.cache.open()
        self._builder = AdapterBuilder(settings, self.cache)
        self._request = BuildRequest.from_proto(
            build_request(directory / "adapters" / "a", self.model, placement, ep_ranks=[0])
        )

    def build(self) -> BuiltSlices:
        """Under the lease "lease"."""
        identity = self._builder.identify(self._request.source)
        return self._builder.build(self._request, identity, BuildProgress(), lease="lease")


def stage(loader: Loader, path: Path, stop_before: int) -> dict[str, Any]:
    """A worker's part: what it took, and in which steps."""
    steps: list[str] = []

    def on_event(event: str, args: tuple[Any, ...]) -> None:
        if event in ("fcntl.flock", "mmap.__new__") or (event == "open" and str(args[0]) == str(path)):
            if len(steps) == stop_before:
                os.kill(os.getpid(), signal.SIGSTOP)
            steps.append(event)

    sys.addaudithook(on_event)
    pool = AdapterPool(
        model=loader.model,
        load_spec=loader.load_spec,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_bytes=1 << 30,
        rank_multiple=0,
        base=NoWeights(),
    )
    try:
        pool.stage(name="a", generation=1, path=path, placement_id=loader.load_spec.placement_id)
    except UnavailableError as error:
        return {"reason": error.reason}
    pool.activate(1, 0)
    digest = hashlib.sha256()
    for buffer in pool.active()[0].buffers:
        digest.update(buffer.numpy().tobytes())
    return {"steps": steps, "digest": digest.hexdigest()}


def start(loader: Loader, path: Path, stop_before: int) -> tuple[int, int]:
    """(pid, descriptor of its answer) of a worker."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write_end, json.dumps(stage(loader, path, stop_before)).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(write_end)
    return pid, read_end


def answer_of(read_end: int) -> Any:
    """What a worker answered; None if it died before."""
    with os.fdopen(read_end, "rb") as stream:
        content = stream.read()
    return json.loads(content) if content else None


def main() -> None:
    """Command line."""
    loader = Loader(Path(sys.argv[1]))
    pid, read_end = start(loader, loader.build().paths[0], -1)
    whole = answer_of(read_end)
    os.waitpid(pid, 0)
    loader.cache.release("lease")
    for step, name in enumerate(whole["steps"]):
        for ending in (signal.SIGKILL, signal.SIGCONT):
            path = loader.build().paths[0]
            pid, read_end = start(loader, path, step)
            _, status = os.waitpid(pid, os.WUNTRACED)
            stopped = os.WIFSTOPPED(status)
            freed = loader.cache.release("lease")
            os.kill(pid, ending)
            answer = answer_of(read_end)
            os.waitpid(pid, 0)
            result = {"name": name, "ending": ending.name, "stopped": stopped, "freed": freed, "answer": answer}
            result |= {"used": loader.cache.state().used_bytes, "exists": path.exists(), "digest": whole["digest"]}
            print(json.dumps(result))
    loader.cache.close()


if __name__ == "__main__":
    main()
