"""The collector of cycles rests while objects are made, and comes back whatever happens."""

from __future__ import annotations

import gc
import weakref

import pytest

from loader_service.collection import PausedCollection


class _Node:
    """Part of a cycle."""

    def __init__(self) -> None:
        self.itself = self


def _fail_in_a_pause(paused: PausedCollection) -> None:
    with paused:
        with paused:
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ValueError("broken")


def test_pauses_nest_and_end_with_an_error() -> None:
    paused = PausedCollection()
    with pytest.raises(ValueError, match="broken"):
        _fail_in_a_pause(paused)
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0, "what was made is left out"
    paused.thaw()
    assert gc.get_freeze_count() == 0


def test_cycles_made_meanwhile_are_collected_later() -> None:
    paused = PausedCollection()
    with paused:
        node = weakref.ref(_Node())
    gc.collect()
    assert node() is not None
    with paused:
        paused.thaw()
        assert gc.get_freeze_count() > 0, "another build still makes its own"
    paused.thaw()
    gc.collect()
    assert node() is None
