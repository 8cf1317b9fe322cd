"""Structured logs to stderr: one line an event, JSON unless stderr is a terminal."""

from __future__ import annotations

import logging
import sys

import structlog


def setup_logs(process: str, *, level: str = "INFO", **context: object) -> None:
    """Configures structlog once, at process start, and binds the process's name to every line."""
    renderer = structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
    )
    structlog.contextvars.bind_contextvars(process=process, **context)
