"""What the processes beside a run have in common: they serve people, end with their launcher, and decide nothing."""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import time
from typing import Any, Final

import msgspec

from midwatch.supervise.chat import Words

_CHUNK_BYTES: Final = 64 * 1024


def begin() -> None:
    """Log to stderr, which the launcher keeps in a file, and leave signals to the launcher."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO, stream=sys.stderr)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


class Ear:
    """Hears the launcher's lines on a descriptor without an event loop.

    Args:
        fd: Stdin, from which nobody else reads.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._heard = b""
        self.is_closed = False
        """The launcher is gone."""

    def line(self) -> bytes:
        """The next line, however long it takes; empty when there is none to come."""
        while b"\n" not in self._heard and not self.is_closed:
            self._hear()
        line, _, self._heard = self._heard.partition(b"\n")
        return line

    def word(self, timeout_s: float) -> tuple[str, dict[str, Any]] | None:
        """The next word, if one comes in time; the time is cut short when the launcher is gone."""
        end = time.monotonic() + timeout_s
        while b"\n" not in self._heard and not self.is_closed:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return None
            self._hear()
        if b"\n" not in self._heard:
            return None
        try:
            return msgspec.json.decode(self.line(), type=Words)
        except msgspec.MsgspecError:
            return None

    def _hear(self) -> None:
        data = os.read(self._fd, _CHUNK_BYTES)
        self._heard += data
        self.is_closed = not data
