"""The last one out: kills everything a launcher started when the launcher is gone, however it went.

It is started by the launcher in a session of its own and waits on a pipe whose other end only the launcher holds. The
kernel closes that end when the launcher ends, SIGKILL included; then everything that carries the launcher's tag goes.
Standard library only: it must start fast, stay small, and not fail for want of a package.

Usage: ``python -m midwatch.supervise.guardian FD TAG``
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Final

from midwatch.supervise.procs import kill_tagged, sweep_shm

_DEADLINE_S: Final = 10.0
"""Give up on processes that SIGKILL does not end in this time: they hang in the kernel and no one can help."""
_PAUSE_S: Final = 0.02
"""Between two passes over /proc: a killed process needs a moment to go."""


def guard(fd: int, tag: str) -> int:
    """Block until the pipe closes, then kill.

    Returns:
        How many processes would not die.
    """
    while os.read(fd, 64):
        pass
    end = time.monotonic() + _DEADLINE_S
    left = kill_tagged(tag)
    while left and time.monotonic() < end:
        time.sleep(_PAUSE_S)
        left = kill_tagged(tag)
    sweep_shm(f"midwatch-{tag}-")
    return len(left)


def main() -> int:
    # A terminal's or a scheduler's signal is for the launcher; the guardian acts only on the launcher's end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    return 1 if guard(int(sys.argv[1]), sys.argv[2]) else 0


if __name__ == "__main__":
    sys.exit(main())
