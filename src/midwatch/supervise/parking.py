"""When a process is parked, and with what: once the ranks of an attempt have imported all they need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from midwatch.supervise.ranks import LocalAttempt
from midwatch.supervise.spawn import NodeSetup
from midwatch.supervise.warm import Parked
from midwatch.supervise.warm_modules import age_s, mapped_packages, noted_modules

_LOOK_NS: Final = 500_000_000
_SETTLED_S: Final = 5.0
"""A script that does not tell when its first step is done, and has mapped no further package for so long, has imported
its libraries or waits for something else; what it imports later is imported by each rank itself."""


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
        self._seen: tuple[int, list[str]] = (0, [])
        self._seen_ns = 0
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
        if len(alive) < len(attempt.ranks):
            return
        modules = self._modules(attempt, now_ns)
        if modules:
            self.parked.park(modules, attempt.environment(alive[0]))

    def _modules(self, attempt: LocalAttempt, now_ns: int) -> list[str]:
        """What to import; empty until the ranks have."""
        slots = [attempt.slot(proc) for proc in attempt.ranks]
        if all(slot.steps_done > 0 for slot in slots):
            noted = noted_modules(self._run_dir, attempt.setup.node)
            if noted:
                return noted
        elif any(slot.is_attached for slot in slots):
            return []
        pid = attempt.ranks[0].pid
        found = mapped_packages(pid)
        if (pid, found) != self._seen:
            self._seen, self._seen_ns = (pid, found), now_ns
        is_settled = now_ns - self._seen_ns > _SETTLED_S * 1e9 and age_s(pid) > _SETTLED_S
        return found if is_settled else []
