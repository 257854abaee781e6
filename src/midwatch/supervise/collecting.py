"""Python's garbage collector in a process with a large state that lives as long as the run.

Now and then it looks through everything that lives. With the nodes, ranks and connections of a thousand agents that
takes a tenth of a second each time, in which nobody is answered, and it finds nothing. So once a crowd has come, what
is there by then is put out of its sight. What nothing refers to is freed at once all the same; only rings of objects
that were garbage at that moment stay, a megabyte of them for each launch of thousands of nodes.
"""

from __future__ import annotations

import gc
from typing import Final

_YOUNG: Final = 10_000
"""New objects before it looks at the new ones; Python's 700 is for small programs."""
SETTLE_S: Final = 5.0
"""After the last arrival or launch: what comes with them has come by then."""


def calm() -> None:
    """For this process: look at what is new less often."""
    gc.set_threshold(_YOUNG, 20, 20)


class Collector:
    """When to put what lives out of its sight."""

    def __init__(self) -> None:
        self._grown_s: float | None = None

    def has_grown(self, now_s: float) -> None:
        """Nodes came, or an attempt was launched; monotonic seconds."""
        self._grown_s = now_s

    def look(self, now_s: float) -> None:
        """Call about once a second."""
        if self._grown_s is not None and now_s - self._grown_s > SETTLE_S:
            self._grown_s = None
            gc.freeze()
