"""Log lines of several processes in one file."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

WRITER = """
import threading
import structlog
log = structlog.get_logger("bound before the setup")
from epilora.logs import setup_logs
setup_logs("worker", ep_rank=3)
log.info("main")
thread = threading.Thread(target=log.info, args=("thread",), kwargs={"long": "x" * 20_000, "ep_rank": 5})
thread.start()
thread.join()
structlog.get_logger().warning("after")
"""
LARGEST = 1 << 16


def test_each_line_is_one_write_and_names_its_process() -> None:
    """A datagram socket as stderr shows the calls of write(2) one by one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        subprocess.run([sys.executable, "-c", WRITER], stderr=theirs, check=True, timeout=60)
        ours.setblocking(False)
        written = [ours.recv(LARGEST).decode() for _ in range(3)]
        assert all(text.endswith("}\n") and text.count("\n") == 1 for text in written), written
    lines = [json.loads(text) for text in written]
    assert [line["event"] for line in lines] == ["main", "thread", "after"]
    assert [line["process"] for line in lines] == ["worker"] * 3
    assert [line["ep_rank"] for line in lines] == [3, 5, 3], "what a line says itself counts"


def test_a_closed_stderr_ends_nothing() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.close()
        subprocess.run([sys.executable, "-c", WRITER], stderr=theirs, check=True, timeout=60)
