"""Where the time of a step goes, as the training thread sees it: data, peers, saves; the rest is computing.

A GPU works behind the host: what it does while the host does something else is not seen here, and counts where the host
waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Final, Literal

from midwatch.pulse import NullPulse, PulseWriter

Part = Literal["data_wait", "communication", "checkpoint", "eval", "other"]

_OF_PHASE: Final[dict[str, Part | None]] = {
    "data_wait": "data_wait",
    "collective": "communication",
    "checkpoint_save": "checkpoint",
    "checkpoint_load": "checkpoint",
    "eval": "eval",
    "forward_backward": None,
    "optimizer": None,
    "init": None,
    "step": None,
}
"""None: computing, like what nobody named."""


class StepTime:
    """Adds up the parts of the steps since the last ``take``. Calls from other threads are passed over."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._thread = threading.get_ident()
        self._stack: list[Part] = []
        self._since = 0.0
        self._spent: dict[Part, float] = {}
        self._steps = 0
        self._step_began = self._window_began = clock()

    def begin(self) -> None:
        """The loop begins now; what went before belongs to no step."""
        self._thread = threading.get_ident()
        self._spent = {}
        self._steps = 0
        self._step_began = self._window_began = self._clock()

    def enter(self, part: Part) -> bool:
        """A part begins. False: nothing changes, and there must be no ``leave``.

        What an evaluation or a save reads and waits for is theirs. Only work of another kind (a phase of the script's
        own, which may be anything) is divided further.
        """
        stack = self._stack
        if (stack and stack[-1] != "other") or threading.get_ident() != self._thread:
            return False
        now = self._clock()
        if stack:
            self._spend(now)
        stack.append(part)
        self._since = now
        return True

    def leave(self) -> None:
        """The part begun last is over."""
        now = self._clock()
        self._spend(now)
        self._stack.pop()
        self._since = now

    def own_s(self) -> float:
        """Of a step, so far in this window: what this rank did not spend in waiting for others."""
        waited = self._spent.get("communication", 0.0)
        return (self._clock() - self._window_began - waited) / (self._steps + 1)

    def part_s(self, part: Part) -> float | None:
        """Of a step, so far in this window; None for what was not seen."""
        return self._spent[part] / (self._steps + 1) if part in self._spent else None

    def end_step(self) -> float:
        """A step is done; the seconds since the end of the one before."""
        now = self._clock()
        step_s, self._step_began = now - self._step_began, now
        self._steps += 1
        return step_s

    def take(self) -> dict[str, float]:
        """Means of the steps since the last call, in seconds; together they are the whole time. Begins anew.

        To be called right behind ``end_step``. A part that was never seen is left out, for nobody knows that it is 0.
        """
        steps, whole = max(1, self._steps), self._step_began - self._window_began
        parts = {f"{part}_s": round(spent / steps, 6) for part, spent in self._spent.items()}
        parts["compute_s"] = round(max(0.0, whole - sum(self._spent.values())) / steps, 6)
        self._spent = dict.fromkeys(self._spent, 0.0)
        self._steps = 0
        self._window_began = self._step_began
        return parts

    def _spend(self, now: float) -> None:
        part = self._stack[-1]
        self._spent[part] = self._spent.get(part, 0.0) + now - self._since


class Phases:
    """What the pulse is told of long work, timed on the way."""

    def __init__(self, pulse: PulseWriter | NullPulse, times: StepTime) -> None:
        self._pulse = pulse
        self._times = times
        self.checkpoint_verified = pulse.checkpoint_verified

    def phase(self, name: str) -> AbstractContextManager[None]:
        """As of the pulse."""
        part = _OF_PHASE.get(name.partition(":")[0], "other")
        return self._pulse.phase(name) if part is None else self._timed(name, part)

    @contextmanager
    def _timed(self, name: str, part: Part) -> Generator[None]:
        is_counted = self._times.enter(part)
        try:
            with self._pulse.phase(name):
                yield
        finally:
            if is_counted:
                self._times.leave()
