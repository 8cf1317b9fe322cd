"""Structured logs to stderr: one line an event, JSON unless stderr is a terminal."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any

import structlog


class _WholeLines:
    """Writes each text by one write(2): several processes share the file, and a text stream may write a line and its
    newline apart, between which another process's line can come.

    Args:
        descriptor: an open file descriptor.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, text: str) -> int:
        """Writes it; more than one call is needed only where the system takes a part, as pipes may of long lines."""
        data = text.encode("utf-8", "backslashreplace")
        # The terminal may be closed, the disk full: no reason to end what the line tells of.
        with suppress(OSError):
            while data:
                data = data[os.write(self._descriptor, data) :]
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""


def setup_logs(process: str, *, level: str = "INFO", **context: object) -> None:
    """Configures structlog once, at process start, with the process's name and `context` in every line."""
    fields = {"process": process, **context}

    # Not by structlog's context variables, which a thread does not take over from the one that starts it.
    def add_fields(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        for name, value in fields.items():
            event.setdefault(name, value)
        return event

    renderer = structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            add_fields,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=_WholeLines(sys.stderr.fileno())),  # type: ignore[arg-type]
    )
