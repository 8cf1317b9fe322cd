"""`python -m gateway`: runs until SIGTERM or SIGINT, then stops gracefully.

Exit codes: 0 after a stop; 2 if it cannot start as it is configured (the last log line says why); 78 if
settings are wrong (one line each on stderr).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import structlog

from epilora.errors import EpiloraError
from epilora.last_error import GATEWAY, leave_last_error
from epilora.logs import setup_logs
from epilora.settings import GatewaySettings
from epilora.settings_errors import settings_or_exit
from gateway.app import Gateway

log = structlog.get_logger(__name__)

EXIT_MISCONFIGURED = 2


async def _run(settings: GatewaySettings) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    gateway = Gateway(settings)
    try:
        await gateway.start()
        await stopping.wait()
    except BaseException:
        await gateway.stop()
        raise
    await gateway.drain()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by way of the interpreter's end, which stops the server: see `Gateway.stop`.
    os._exit(0)


def main() -> int:
    """Entry point."""
    # The tokenizer's library would import torch, for models that are not here: seconds at every start, and 200 MB.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    # Else transformers warns of that at every start.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    settings = settings_or_exit(GatewaySettings)
    setup_logs("gateway", level=settings.log_level)
    try:
        asyncio.run(_run(settings))
    except (EpiloraError, OSError) as error:
        log.error("cannot start", why=str(error))
        leave_last_error(settings.run_dir, GATEWAY, error)
        return EXIT_MISCONFIGURED
    return 0


if __name__ == "__main__":
    sys.exit(main())
