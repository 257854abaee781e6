"""Incidents are written down beside the restart, and tried again while the storage does not take them.

A disk is full, or a mount away, just when things go wrong; what was gathered from ranks that are gone by then exists
only here. So it is kept until it is written, or until the run ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from midwatch.core import StorageError
from midwatch.supervise.bundle import write_bundle
from midwatch.supervise.loglines import log_files
from midwatch.supervise.messages import WriteVerdict

AGAIN_S: Final = (5.0, 30.0, 120.0, 600.0)
"""Before the next try: a mount comes back within minutes, people make room on a disk within an hour."""
_TRIES: Final = 12


class Bundles:
    """Writes the folders of a run's incidents.

    Args:
        run_dir: Of the run.
        say: Tells people, with a level.
    """

    def __init__(self, run_dir: Path, say: Callable[[str, str], None]) -> None:
        self._run_dir = run_dir
        self._say = say
        self._ending = asyncio.Event()

    def end(self) -> None:
        """The run is over: one last try for each that is not written yet."""
        self._ending.set()

    async def write(
        self, written: WriteVerdict, remarks: Mapping[str, tuple[str, ...]], story: tuple[str, ...]
    ) -> None:
        """Returns when it is written, or given up and said so."""
        name = written.verdict.incident
        for number in range(_TRIES):
            is_last = self._ending.is_set() or number == _TRIES - 1
            error = await self._try(written, remarks, story)
            if error is None:
                if number:
                    self._say(f"incident {name} is written down now", "info")
                return
            if is_last:
                self._say(f"incident {name} could not be written down: {error}", "error")
                return
            if number == 0:
                self._say(f"incident {name} cannot be written down yet, it is tried again: {error}", "error")
            await self._pause(AGAIN_S[min(number, len(AGAIN_S) - 1)])

    async def _try(
        self, written: WriteVerdict, remarks: Mapping[str, tuple[str, ...]], story: tuple[str, ...]
    ) -> Exception | None:
        folder = self._run_dir / "incidents" / written.verdict.incident
        try:
            # In a thread: shared storage may be slow exactly when something is wrong.
            logs = await asyncio.to_thread(log_files, self._run_dir, written.attempt)
            await asyncio.to_thread(write_bundle, folder, written.verdict, written.evidence, remarks, story, logs)
        except (OSError, StorageError) as error:
            return error
        return None

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._ending.wait(), seconds)
        except TimeoutError:
            return
