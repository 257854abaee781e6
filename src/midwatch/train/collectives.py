"""How many collectives this rank has issued, group by group. The one place that touches private parts of torch for it.

Every process group of torch numbers its collectives, DDP's and FSDP's own ones included, and the numbers of all members
must be equal when they begin the same step. Reading one takes a tenth of a microsecond. Where a version of torch or a
backend does not tell, nothing is counted, and ranks that go out of step are found only by what follows from it.

Gloo gives messages between two ranks numbers of the same row, and those differ rightly. So what such a call adds is
taken off again: the methods by which ``torch.distributed`` sends messages are wrapped once, for all groups.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
from collections.abc import Callable, Collection
from typing import Any, Final

import torch.distributed as dist

from midwatch.pulse import MAX_GROUPS, NullPulse, PulseWriter

_MESSAGES: Final = ("send", "recv", "recv_anysource", "monitored_barrier")
"""Calls of a group that are not issued by all members alike; a monitored barrier is made of messages to rank 0."""
_log = logging.getLogger(__name__)


class Collectives:
    """Counts for the pulse. Use it from the training thread.

    Args:
        pulse: Told which groups are counted.
        ours: Groups of midwatch itself, which are none of training's business.
    """

    def __init__(self, pulse: PulseWriter | NullPulse, ours: Collection[Any]) -> None:
        self._pulse = pulse
        self._ours = {id(group) for group in ours}
        self._readers: list[Callable[[], int]] = []
        self._known: tuple[int, ...] = ()
        self._is_able = not isinstance(pulse, NullPulse) and dist.is_available()
        if self._is_able:
            _MessageNumbers.watch()

    def counts(self) -> list[int]:
        """Collectives issued so far, by group; empty where they cannot be told."""
        if not self._is_able or not dist.is_initialized():
            return []
        try:
            groups: dict[Any, Any] = dist.distributed_c10d._world.pg_map  # pyright: ignore[reportPrivateUsage]
            known = tuple(map(id, groups))
            if known != self._known:
                self._known = known
                self._choose(list(groups))
            return [read() for read in self._readers]
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            self._is_able = False
            self._pulse.groups([])
            _log.info("collectives are not counted: %s", error)
            return []

    def _choose(self, groups: list[Any]) -> None:
        """The first groups with more than one member, in the order they were made, which is the same on all ranks."""
        digests: list[str] = []
        self._readers = []
        for group in groups:
            ranks = tuple(dist.get_process_group_ranks(group))
            if len(ranks) < 2 or id(group) in self._ours or len(digests) == MAX_GROUPS:
                continue
            # Members meet under the group's name when they make it, so it is the same on all of them.
            digests.append(hashlib.sha256(f"{group.group_name} {ranks}".encode()).hexdigest()[:16])
            self._readers.append(_reader(group))
        self._pulse.groups(digests)


def _reader(group: Any) -> Callable[[], int]:
    number, messages, key = group._get_sequence_number_for_group, _MessageNumbers.taken, id(group)
    return lambda: number() - messages.get(key, 0)


class _MessageNumbers:
    """Numbers that messages took, by group; for the whole process, for torch's classes are."""

    taken: Final[dict[int, int]] = {}
    """By ``id``. A group made where another one was destroyed may begin with that one's: only changes are compared."""
    _lock: Final = threading.Lock()
    _is_watching = False

    @classmethod
    def watch(cls) -> None:
        """From now on; a second call does nothing."""
        with cls._lock:
            if cls._is_watching:
                return
            cls._is_watching = True
            for name in _MESSAGES:
                call = getattr(dist.ProcessGroup, name, None)
                if call is not None:
                    setattr(dist.ProcessGroup, name, cls._counted(call))

    @classmethod
    def _counted(cls, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(group: Any, *args: Any, **kwargs: Any) -> Any:
            before = cls._number(group)
            try:
                return call(group, *args, **kwargs)
            finally:
                cls._add(id(group), cls._number(group) - before)

        return counted

    @staticmethod
    def _number(group: Any) -> int:
        try:
            return group._get_sequence_number_for_group()
        except RuntimeError:
            return 0  # a backend that does not number its calls

    @classmethod
    def _add(cls, key: int, taken: int) -> None:
        if taken:  # NCCL numbers messages apart: nothing to take off
            with cls._lock:
                cls.taken[key] = cls.taken.get(key, 0) + taken
