"""Kills a loader with SIGKILL before each change it makes to its cache, and looks at what the next one finds.

    python -m tests.loader.killed_steps DIRECTORY

DIRECTORY holds `model/` and `adapters/a`. One loader's life, from taking the directory to giving back the only lease,
is done once to list its steps: every system call that changes the cache. Then it is done again for each step, in a
process of its own that is killed just before it. Prints one JSON object a step. All processes are forks of this one,
which starts no thread itself, so that a step costs a few milliseconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from epilora.model_spec import ModelSpec
from epilora.placement import ExpertPlacement
from loader_service.build import AdapterBuilder
from loader_service.cache import SliceCache
from loader_service.request import BuildRequest
from loader_service.writer import BuildProgress
from tests.loader.loader_harness import build_request, loader_settings

_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")


class Steps:
    """Names the steps of this process, and kills it before one of them."""

    def __init__(self, cache: Path, kill_before: int) -> None:
        self.names: list[str] = []
        self._cache = str(cache)
        self._kill_before = kill_before
        sys.addaudithook(self._on_event)
        pwrite = os.pwrite

        def counted(fd: int, data: Any, offset: int) -> int:
            self._step("pwrite")
            return pwrite(fd, data, offset)

        os.pwrite = counted  # not audited by Python

    def _on_event(self, event: str, args: tuple[Any, ...]) -> None:
        if event in _CHANGES or (event == "open" and str(args[0]).startswith(self._cache)):
            self._step(f"{event} {Path(os.fsdecode(args[0])).suffix}".strip())

    def _step(self, name: str) -> None:
        if len(self.names) == self._kill_before:
            os.kill(os.getpid(), signal.SIGKILL)
        self.names.append(name)


def in_child(work: Callable[[], object]) -> tuple[int, Any]:
    """(exit status as of waitpid, what `work` returned) of a fork that does it."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(write_end, json.dumps(work()).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as stream:
        answer = stream.read()
    _, status = os.waitpid(pid, 0)
    return status, json.loads(answer) if answer else None


def live(directory: Path, kill_before: int) -> list[str]:
    """One loader's life; the names of its steps."""
    settings = loader_settings(directory, [directory / "adapters"])
    steps = Steps(settings.cache_dir, kill_before)
    cache = SliceCache(settings.cache_dir, settings.cache_budget_bytes)
    cache.open()
    _build(directory, cache)
    cache.release("lease")
    return steps.names


def restart(directory: Path) -> dict[str, Any]:
    """What the next loader finds, and what it builds."""
    settings = loader_settings(directory, [directory / "adapters"])
    cache = SliceCache(settings.cache_dir, settings.cache_budget_bytes)
    cache.open()
    found = sorted(path.name for path in settings.cache_dir.iterdir())
    digests = _build(directory, cache)
    cache.close()
    return {"found": found, "digests": digests}


def torn(cache: Path) -> list[str]:
    """Published files whose bytes are not those that their names say."""
    return [
        path.name
        for path in cache.glob("*.safetensors")
        if xxhash.xxh3_128_hexdigest(path.read_bytes()) != path.name[:32]
    ]


def _build(directory: Path, cache: SliceCache) -> list[str]:
    settings = loader_settings(directory, [directory / "adapters"])
    model = ModelSpec.from_directory(directory / "model")
    request = BuildRequest.from_proto(
        build_request(directory / "adapters" / "a", model, ExpertPlacement.make("linear", model, 2))
    )
    builder = AdapterBuilder(settings, cache)
    built = builder.build(request, builder.identify(request.source), BuildProgress(), lease="lease")
    return [xxhash.xxh3_128_hexdigest(path.read_bytes()) for path in built.paths]


def main() -> None:
    """Command line."""
    directory = Path(sys.argv[1])
    cache = directory / "cache"
    status, names = in_child(lambda: live(directory, -1))
    assert status == 0, status
    for step, name in enumerate(names):
        status, _ = in_child(lambda step=step: live(directory, step))
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        left = sorted(path.name for path in cache.iterdir()) if cache.exists() else []
        bad = torn(cache)
        status, after = in_child(lambda: restart(directory))
        print(json.dumps({"name": name, "killed": killed, "left": left, "torn": bad, "status": status, "after": after}))


if __name__ == "__main__":
    main()
