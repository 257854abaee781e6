"""Work that nobody waits for: it takes what is left of the cores when everybody else has had his share."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

LAST = 19
"""The lowest priority there is; Linux keeps one for each thread, and a thread's helpers inherit it."""

Result = TypeVar("Result")


def quietly(work: Callable[[], Result]) -> Result:
    """Do ``work`` at the lowest priority and wait for it; raises what it raises.

    In a thread of its own, because a thread may give up priority but not take it back: proving a checkpoint can wait,
    making the next one durable should not.
    """
    with ThreadPoolExecutor(1, "midwatch-quiet", initializer=_step_back) as thread:
        return thread.submit(work).result()


def _step_back() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LAST)
