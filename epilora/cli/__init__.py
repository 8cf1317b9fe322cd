"""The `epilora` command: serve, a client of the services, and commands that look at files."""

from __future__ import annotations

import gc
import sys

_OFFLINE = ("inspect", "convert")


def main() -> None:
    """Entry point. Exit codes: 0 done; 1 refused; 2 wrong usage; 3 not available now, a retry may succeed."""
    # Looking at a file takes as long as the imports of all other commands: these two are started without them.
    if sys.argv[1:2] and sys.argv[1] in _OFFLINE:
        # Modules, and objects for tens of thousands of tensors, all of which live to the end: nothing to collect.
        gc.disable()
        from epilora.cli.offline import app
    else:
        from epilora.cli.app import app
    app()
