"""A process that must not outlive the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def follow_parent(parent: int) -> None:
    """Die with the process (0: whichever it is) whose thread started us, even when somebody else holds our stdin open.

    A forked data loader worker inherits such a pipe, so the end of it does not tell of its owner's end.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(0)  # it died before we could ask
