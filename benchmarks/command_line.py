"""What the benchmarks' command lines share: what they refuse, and that they leave nothing behind."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar

from epilora.errors import EpiloraError

_EXIT_REFUSED = 2
_EXIT_SIGNAL = 128
_SHARED_MEMORY = Path("/dev/shm")
Choice = TypeVar("Choice", str, int)


def list_of(choices: Iterable[Choice]) -> Callable[[str], list[Choice]]:
    """For argparse: some of these, with commas between them. Example: list_of((1, 8, 64))("8,64") -> [8, 64]"""
    by_name = {str(choice): choice for choice in choices}

    def parse(text: str) -> list[Choice]:
        names = dict.fromkeys(text.split(","))
        if wrong := [name for name in names if name not in by_name]:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(by_name)}")
        return [by_name[name] for name in names]

    return parse


def at_least(smallest: int) -> Callable[[str], int]:
    """For argparse: a whole number of this size or more."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {smallest}")
        return int(text)

    return parse


def refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Ends the process with one line on stderr and exit status 2: what is wrong is not how the options are used."""
    parser.exit(_EXIT_REFUSED, f"{parser.prog.removesuffix('.py')}: error: {message}\n")


def need_cuda(parser: argparse.ArgumentParser, num_devices: int = 1, *, instead: str = "") -> None:
    """Refuses to go on where there are fewer CUDA devices.

    Args:
        parser: of the command.
        num_devices: that it needs.
        instead: what can be done without them, for the end of the message.
    """
    import torch  # not in the memory of the benchmarks that need no device

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < num_devices:
        needed = "a CUDA device is needed" if num_devices == 1 else f"{num_devices} CUDA devices are needed"
        there = f", {found} {'is' if found == 1 else 'are'} there" if found else ""
        refuse(parser, f"{needed}{there}{instead}")


@contextmanager
def refusing(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Refuses to go on where the block raises an error of the system's own, with its message."""
    try:
        yield
    except EpiloraError as error:
        refuse(parser, error.message)


def end_in_order() -> None:
    """From here on SIGTERM, SIGINT and SIGHUP end the process by a SystemExit: what it made is removed on the way.

    Once: a second one does not cut that short. Signals that are ignored, as SIGHUP is under nohup, stay so.
    """
    is_ending = False

    def end(number: int, _: FrameType | None) -> None:
        nonlocal is_ending
        if not is_ending:
            is_ending = True
            raise SystemExit(_EXIT_SIGNAL + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)


@contextmanager
def shared_directory() -> Iterator[Path]:
    """A directory in shared memory, removed at the end."""
    # Named first: a signal may come at any time.
    path = _SHARED_MEMORY / f"epilora-bench-{os.getpid()}-{uuid.uuid4().hex}"
    try:
        path.mkdir(mode=0o700)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def output_of(command: Sequence[str]) -> str:
    """What a child process prints; it gets a SIGTERM if this process ends meanwhile, so that it cleans up, too.

    Raises:
        subprocess.CalledProcessError: its exit status is not 0.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        output, _ = process.communicate()
    finally:
        process.terminate()
        process.wait()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return output
