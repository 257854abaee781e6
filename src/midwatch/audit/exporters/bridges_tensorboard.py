"""TensorBoard as a tracker: a folder for each attempt, and in it one event file that goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from midwatch.audit.exporters.bridges import Row, TrackerRun
from midwatch.audit.exporters.tensorboard import append_events, event_path, mend_events


class TensorBoardTracker:
    """``FOLDER/a0003/events.out.tfevents....midwatch``; ``tensorboard --logdir FOLDER`` shows the attempts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder
        self.name = f"tensorboard:{folder}"

    def open(self, run: TrackerRun) -> int | None:
        """See ``Tracker``. The file itself tells; a torn end is cut off, for nobody reads what stands behind one."""
        self._path = event_path(self._folder / run.place)
        return mend_events(self._path)

    def write(self, rows: Sequence[Row]) -> None:
        """See ``Tracker``. Durability: survives a kill; power loss costs some seconds."""
        append_events(self._path, ((row.step, row.ts_ns / 1e9, row.values) for row in rows))

    def close(self) -> None:
        """Nothing is held."""
