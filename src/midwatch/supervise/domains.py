"""Ask the scheduler which nodes hang together, beside the run: nobody waits for the answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from midwatch.cluster import Topology
from midwatch.config import IsolateConfig
from midwatch.core import MidwatchError
from midwatch.supervise.isolating import scheduler

_ASK_AGAIN_S: Final = (10.0, 60.0, 300.0)
"""A scheduler that does not answer is overloaded or being restarted."""
_log: Final = logging.getLogger("midwatch.coordinator")


async def ask_topology(learn: Callable[[Topology], None], isolate: IsolateConfig, labels: Sequence[str] = ()) -> None:
    """Which nodes share a switch, a block or a rack, if the scheduler knows; a few tries.

    It may be slow or down when we start, or when we take over from a node that is gone and everybody waits for us;
    before the first fault the answer is not needed.
    """
    for pause_s in (*_ASK_AGAIN_S, None):
        try:
            topology = await scheduler(isolate, labels).topology()
        except MidwatchError as error:
            _log.warning("the scheduler's topology is not used: %s", error.message)
            return
        if topology is not None:
            learn(topology)
            return
        if pause_s is not None:
            await asyncio.sleep(pause_s)
    _log.warning("the scheduler does not tell which nodes hang together: faults are not traced to switches")
