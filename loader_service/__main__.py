"""`python -m loader_service`: the loader of one node."""

from __future__ import annotations

import asyncio
import signal
import sys

import structlog

from epilora.errors import EpiloraError
from epilora.last_error import LOADER, leave_last_error
from epilora.logs import setup_logs
from epilora.settings import LoaderSettings
from epilora.settings_errors import settings_or_exit
from loader_service.server import LoaderServer

log = structlog.get_logger(__name__)


async def _serve(settings: LoaderSettings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = LoaderServer(settings)
    await server.start()
    await stop.wait()
    log.info("stopping")
    await server.stop()


def main() -> int:
    """Serves until SIGTERM or SIGINT."""
    settings = settings_or_exit(LoaderSettings)
    setup_logs("loader", level=settings.log_level)
    try:
        asyncio.run(_serve(settings))
    except (EpiloraError, OSError) as error:
        log.error("cannot serve", error=str(error))
        leave_last_error(settings.run_dir, LOADER, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
