"""What callers are told while the gateway stops."""

from __future__ import annotations

from epilora.errors import UnavailableError
from gateway.ranks import RETRY_AFTER_SECONDS


def stopping_error(details: str = "") -> UnavailableError:
    """The error of calls that the stop ends or refuses.

    Args:
        details: continues the message.
    """
    return UnavailableError(
        f"the gateway is stopping{details}", reason="SHUTTING_DOWN", retry_after_seconds=RETRY_AFTER_SECONDS
    )
