"""Whether the process is about to end by an exception."""

from __future__ import annotations

import sys


def crash() -> BaseException | None:
    """The exception: one that unwinds now, in a ``finally`` of the script's, or that has reached the interpreter."""
    return sys.exc_info()[1] or getattr(sys, "last_value", None)
