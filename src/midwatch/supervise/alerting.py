"""The launcher that hosts a run's coordinator tells people of it: it outlives the coordinator, and knows when that
cannot be kept alive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from midwatch.audit.alerts import Bell
from midwatch.supervise.ending import Result
from midwatch.supervise.prepare import Plan

_LAST_WORD_S: Final = 15.0
"""At the end, for what is not told yet: covers one receiver that does not answer (10 s) beside one that does."""


class Alerts:
    """Of one invocation; rings only while this node hosts the coordinator.

    Args:
        say: Shows a sentence and its level to people.
    """

    def __init__(self, plan: Plan, say: Callable[[str, str], None]) -> None:
        self._plan = plan
        self._say = say
        self._bell: Bell | None = None

    def host(self, *, takes_over: bool) -> None:
        """This node hosts now. Called again when its coordinator is started again."""
        if self._bell is not None:
            return
        config = self._plan.request.config
        loop = asyncio.get_running_loop()
        bell = Bell(
            self._plan.paths.run_dir,
            config.alerts,
            name=config.run.name,
            # Said from the bell's thread; what is shown is the loop's.
            say=lambda sentence: self._shown(loop, sentence),
            is_new=not takes_over,
        )
        if bell.is_wanted:
            self._bell = bell
            bell.start()

    def give_way(self) -> None:
        """Another node hosts now, and tells."""
        bell, self._bell = self._bell, None
        if bell is not None:
            bell.leave()

    async def end(self, result: Result | None, *, is_settled: bool) -> None:
        """The run is over: the last word goes out.

        Args:
            is_settled: The coordinator wrote down how it ended.

        Blocking: 15 s where a receiver does not answer.
        """
        bell, self._bell = self._bell, None
        if bell is None:
            return
        if result is not None and result.error not in ("", "SV109") and not is_settled:
            bell.ended(f"launcher:{self._plan.tag}", result.sentence, result.error, node=self._plan.node)
        if not await asyncio.to_thread(bell.stop, _LAST_WORD_S):
            self._say(
                "[AL101] not everybody was told how the run ended; the next run in this folder does it", "warning"
            )

    def _shown(self, loop: asyncio.AbstractEventLoop, sentence: str) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._say, sentence, "warning")
