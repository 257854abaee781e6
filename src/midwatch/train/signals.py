"""Stop and save requests, acted on by all ranks at the same step.

A request reaches ranks at different moments (agents write flags, signal handlers run on one rank). So at every step
boundary the ranks begin to take the maximum of what each has seen, and look at the result one boundary later, when it
has long arrived: nobody waits, and everybody acts after the same step. Where all ranks bring other numbers together at
that moment, requests go with them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from midwatch.checkpoint import ControlGroup
from midwatch.pulse import Flag

_NOTHING = Flag(0)
_ASKED = Flag.STOP | Flag.SAVE
"""The requests that need agreement; ABORT does not (nothing is saved), nor does GO."""


class Signals:
    """One rank's view of the requests. ``at_boundary`` is collective, but waits only for the boundary before.

    ``take`` and ``heard`` are for those who bring numbers of all ranks together: what was heard since the last boundary
    is acted on at the next one, and that one asks nobody.
    """

    def __init__(
        self,
        group: ControlGroup,
        read: Callable[[], Flag],
        waiting: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._group = group
        self._read = read
        self._waiting = waiting
        self._own = _NOTHING
        self._kept = _NOTHING
        """Beside ``_own``, which a signal handler may change between any two lines."""
        self._flight: tuple[Any, torch.Tensor] | None = None
        self._seen = _NOTHING
        self._heard: Flag | None = None

    def ask(self, flag: Flag) -> None:
        """Make a request of this process's own; safe in a signal handler."""
        self._own |= flag

    @property
    def is_stop_asked(self) -> bool:
        """By this rank's agent or this process, so far; no agreement."""
        return bool((self._own | self._kept | self._read()) & (Flag.STOP | Flag.ABORT))

    def take(self) -> Flag:
        """What this rank asks for now; each request is given once."""
        seen = self._read() & _ASKED
        if not (seen or self._own or self._kept):  # in nearly all steps; the rest of this takes longer
            self._seen = _NOTHING
            return _NOTHING
        # The agent's flags stay up until it takes them down: a request is made when one goes up, not while it is up.
        own, self._own = self._own, _NOTHING
        kept, self._kept = self._kept, _NOTHING
        new, self._seen = seen & ~self._seen, seen
        return new | own | kept

    def heard(self, asked: Flag) -> None:
        """What any rank has asked for, at the same place on all of them."""
        self._heard = self._heard | asked if self._heard else asked

    def at_boundary(self) -> Flag:
        """The requests to act on after this step, the same on every rank; each is reported once."""
        agreed, heard = self._await_agreement(), self._heard
        self._heard = None
        if heard is not None:
            return agreed | heard if agreed else heard
        mine = self.take()
        if self._group.world_size == 1:
            return mine
        box = torch.tensor([int(bool(mine & flag)) for flag in _ASKED], dtype=torch.int64)
        self._flight = (self._group.start_max(box), box)
        return agreed

    def keep_for_later(self) -> None:
        """What is on its way becomes a request that is still to be made. All ranks call it at the same place."""
        self._kept |= self._await_agreement() | (self._heard or _NOTHING)
        self._heard = None

    def finish(self) -> None:
        """Wait for what is on its way, so that no rank leaves a collective the others are in."""
        self._await_agreement()

    def _await_agreement(self) -> Flag:
        if self._flight is None:
            return _NOTHING
        handle, box = self._flight
        self._flight = None
        if handle.is_completed():
            handle.wait()
        else:
            # Only a rank that is a whole step behind keeps us here: say what we wait in, for whoever looks.
            with self._waiting("collective"):
                handle.wait()
        return Flag(sum(flag for flag, raised in zip(_ASKED, box.tolist(), strict=True) if raised))
