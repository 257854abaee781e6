"""When a process is parked, and with what: once the ranks of an attempt have imported all they need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from midwatch.supervise.ranks import LocalAttempt
from midwatch.supervise.spawn import NodeSetup
from midwatch.supervise.warm import Parked, is_settled, wanted_modules

_LOOK_NS: Final = 500_000_000
_SETTLED_S: Final = 20.0
"""A script that does not tell when its first step is done has, by then, imported its libraries or waits for something
else; what it imports later is imported by each rank itself."""


class Parking:
    """Looks after the parked process while an attempt runs.

    Args:
        setup: Of this node.
        say: Tells people, with a level.
        spared: Pids that a teardown must not touch.
    """

    def __init__(self, setup: NodeSetup, say: Callable[[str, str], None], spared: set[int]) -> None:
        self._run_dir = Path(setup.run_dir)
        self._looked_ns = 0
        self.parked = Parked(setup.command, say, spared)

    def look(self, attempt: LocalAttempt, now_ns: int) -> None:
        """Park when it is time; cheap, call it in every cycle."""
        if now_ns - self._looked_ns < _LOOK_NS or attempt.is_stopping:
            return
        self._looked_ns = now_ns
        if not self.parked.is_wanted:
            self.parked.look()
            return
        alive = [proc for proc in attempt.ranks if proc.is_alive]
        if len(alive) < len(attempt.ranks) or not self._is_time(attempt):
            return
        modules = wanted_modules(self._run_dir, attempt.setup.node, [proc.pid for proc in alive])
        if modules:
            self.parked.park(modules, attempt.environment(alive[0]))

    def _is_time(self, attempt: LocalAttempt) -> bool:
        slots = [(proc, attempt.slot(proc)) for proc in attempt.ranks]
        if any(slot.is_attached for _, slot in slots):
            return all(slot.steps_done > 0 for _, slot in slots)
        return all(is_settled(proc.pid, _SETTLED_S) for proc, _ in slots)
