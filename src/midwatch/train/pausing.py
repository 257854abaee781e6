"""The look that all ranks take together, again and again, while a run is paused: is anything decided?"""

from __future__ import annotations

import logging
import time
from typing import Any, Final, NamedTuple

import msgspec
import torch

from midwatch.guards import Decision
from midwatch.train.around import Around

_log = logging.getLogger(__name__)

LOOK_S: Final = 0.5
"""Between two looks: soon enough for people, and no load for a file system."""
PAUSED: Final = "custom:paused"


class News(NamedTuple):
    """The same on all ranks."""

    now_ns: int
    decisions: list[Decision]
    is_stop_asked: bool = False


class Lookout:
    """One rank's part of the look. Every method is collective."""

    def __init__(self, around: Around) -> None:
        self._around = around

    def look(self) -> News:
        """Wait for a moment, then hear one decision, and whether anybody wants the processes to end."""
        around = self._around
        # Each look is a phase of its own: the watch sees that this is no hang.
        with around.phase(PAUSED):
            time.sleep(LOOK_S)
            wants = torch.tensor([int(around.signals.is_stop_asked)], dtype=torch.int64)
            handle = around.group.start_max(wants)
            if handle is not None:
                handle.wait()
            return self.hear(1)._replace(is_stop_asked=bool(int(wants)))

    def hear(self, most: int | None = None) -> News:
        """What people left, oldest first, each once; what is beyond ``most`` stays for the next call."""
        told = self._around.group.broadcast(self._told(most) if self._around.is_first else None)
        now_ns: int = told["now_ns"]
        found = [msgspec.convert(one, Decision) for one in told["decisions"]]
        return News(now_ns, [msgspec.structs.replace(one, now_ns=now_ns) for one in found])

    def _told(self, most: int | None) -> dict[str, Any]:
        good: list[dict[str, Any]] = []
        for raw in self._around.desk.take(most):
            try:
                good.append(msgspec.to_builtins(msgspec.convert(raw, Decision)))
            except msgspec.ValidationError as error:
                _log.error("a decision that cannot be understood is left aside: %s", error)
                act, by = (str(raw.get(name, "")) for name in ("act", "by"))
                self._around.record("breaker.not_decided", None, act=act, by=by, why=f"not understood: {error}")
        return {"now_ns": self._around.clock.now_ns(), "decisions": good}
