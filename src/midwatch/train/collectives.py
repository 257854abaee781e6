"""How many collectives this rank has issued, group by group. The one place that calls private parts of torch for it.

Every process group of torch numbers its collectives, DDP's and FSDP's own ones included, and the numbers of all members
must be equal when they begin the same step. Reading one takes a tenth of a microsecond. Where a version of torch or a
backend does not tell, nothing is counted, and ranks that go out of step are found only by what follows from it.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import torch.distributed as dist

from midwatch.pulse import MAX_GROUPS, NullPulse, PulseWriter

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
        self._known = 0
        self._is_able = not isinstance(pulse, NullPulse) and dist.is_available()

    def counts(self) -> list[int]:
        """Collectives issued so far, by group; empty where they cannot be told."""
        if not self._is_able or not dist.is_initialized():
            return []
        try:
            groups: dict[Any, Any] = dist.distributed_c10d._world.pg_map  # pyright: ignore[reportPrivateUsage]
            if len(groups) != self._known:
                self._known = len(groups)
                self._choose(list(groups))
            return [read() for read in self._readers]
        except (AttributeError, RuntimeError, TypeError) as error:
            self._is_able = False
            self._pulse.groups([])
            _log.info("collectives are not counted: %s", error)
            return []

    def _choose(self, groups: list[Any]) -> None:
        """The first groups with more than one member, in the order they were made, which is the same on all ranks."""
        seen: Counter[tuple[int, ...]] = Counter()
        digests: list[str] = []
        self._readers = []
        for group in groups:
            ranks = tuple(dist.get_process_group_ranks(group))
            if len(ranks) < 2 or id(group) in self._ours or len(digests) == MAX_GROUPS:
                continue
            seen[ranks] += 1
            text = f"{seen[ranks]} {ranks}"
            digests.append(hashlib.sha256(text.encode()).hexdigest()[:16])
            self._readers.append(group._get_sequence_number_for_group)
        self._pulse.groups(digests)
