"""`python -m compute_worker`: one EP rank. `compute_worker.launch` starts all of a host; torchrun can, too."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time

import structlog
import torch

from compute_worker.ep_group import EPGroup
from compute_worker.servicer import WorkerServicer
from compute_worker.worker import Worker
from epilora.errors import EpiloraError
from epilora.last_error import WORKERS, leave_last_error
from epilora.logs import setup_logs
from epilora.process import name_process
from epilora.rpc import start_server
from epilora.settings import WorkerSettings
from epilora.settings_errors import EXIT_BAD_SETTINGS, settings_or_exit
from epilora.v1 import worker_service_pb2, worker_service_pb2_grpc

log = structlog.get_logger(__name__)

_SERVICE = worker_service_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
_EXIT_GROUP_LOST = 70
_FLUSH_SECONDS = 0.3
_SWITCH_SECONDS = 0.0005
"""Another thread's Python holds the step thread up by so much at most each time it comes back from the device."""


def _set_threads(settings: WorkerSettings) -> None:
    threads = settings.torch_threads or max(1, (os.cpu_count() or 1) // settings.num_ranks)
    torch.set_num_threads(threads)


def _spare_the_steps() -> None:
    """Keeps the interpreter from holding steps up, once everything that stays has been made."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    # To look for cycles among the objects of a model and its libraries takes 50 ms and more, in whatever thread.
    gc.collect()
    gc.freeze()


def _end_on_signal() -> None:
    """SIGTERM and SIGINT end the process at once: the gateway drains before workers are stopped.

    The system's own action, not a handler of ours: a handler would not run while the main thread waits in a
    collective, and then torchelastic would wait for this process before it starts the group anew.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def _watch(worker: Worker, timeout_seconds: float) -> None:
    """Ends the process when a turn outlasts its collectives' timeout: a captured collective has none of its own."""
    while True:
        time.sleep(min(1.0, timeout_seconds / 4))
        age = worker.loop.seconds_since_turn
        if age > 2 * timeout_seconds:
            log.error("the step loop hangs", ep_rank=worker.ep_rank, step=worker.loop.step, seconds=round(age, 1))
            os._exit(_EXIT_GROUP_LOST)


async def _serve(settings: WorkerSettings) -> None:
    aio_loop = asyncio.get_running_loop()
    lost = asyncio.Event()
    group = EPGroup.from_environment(settings)
    name_process(f"worker-{group.ep_rank}")
    setup_logs("worker", level=settings.log_level, ep_rank=group.ep_rank)

    def on_failure(_: BaseException) -> None:
        aio_loop.call_soon_threadsafe(lost.set)

    worker = Worker(settings=settings, group=group, on_failure=on_failure)
    worker.loop.start()
    threading.Thread(
        target=_watch, args=(worker, settings.collective_timeout_seconds), name="watchdog", daemon=True
    ).start()
    address = settings.worker_listen_of(group.ep_rank)
    if address.startswith("unix:"):
        # A socket left by a worker that was killed would make the bind fail.
        path = address.removeprefix("unix:")
        if os.path.exists(path):
            os.unlink(path)
    server = await start_server(
        address,
        register=lambda s: worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerServicer(worker), s),
        service_names=[_SERVICE],
        max_message_bytes=settings.max_message_bytes,
    )
    _spare_the_steps()
    await server.set_serving(["", _SERVICE], True)
    log.info("ready", address=address, device=group.device_name, experts_bytes=worker.runner.memory().base_expert_bytes)
    await lost.wait()
    await server.set_serving(["", _SERVICE], False)
    # Calls in flight have their error by now; let it leave the process.
    await asyncio.sleep(_FLUSH_SECONDS)
    os._exit(_EXIT_GROUP_LOST)


def main() -> None:
    """Runs one rank until it is told to end or loses its group."""
    settings = settings_or_exit(WorkerSettings)
    _end_on_signal()
    _set_threads(settings)
    try:
        asyncio.run(_serve(settings))
    except EpiloraError as error:
        log.error("cannot start", reason=error.reason, message=error.message)
        leave_last_error(settings.run_dir, WORKERS, error)
        sys.exit(EXIT_BAD_SETTINGS)


if __name__ == "__main__":
    main()
