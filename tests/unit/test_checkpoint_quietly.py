"""Proving a checkpoint must not take turns with training, nor drag the writer down with it."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from midwatch.checkpoint.quietly import LAST, quietly


def _priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_what_can_wait_does_and_the_caller_keeps_its_priority() -> None:
    before = _priority()
    assert quietly(_priority) == LAST
    assert _priority() == before


def test_a_helper_of_quiet_work_is_quiet_too() -> None:
    def ask_a_helper() -> int:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(_priority).result()

    assert quietly(ask_a_helper) == LAST


def test_what_goes_wrong_quietly_is_heard() -> None:
    def fail() -> None:
        raise OSError("the medium is ill")

    with pytest.raises(OSError, match="ill"):
        quietly(fail)
