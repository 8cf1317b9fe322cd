"""The `epilora` command: serve, and a client of the services."""

from epilora.cli.app import main

__all__ = ["main"]
