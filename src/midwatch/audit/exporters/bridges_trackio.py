"""trackio: a run for each attempt, in the group of the run's id, in a SQLite file of this user.

The library keeps it below ``TRACKIO_DIR`` (by default ``~/.cache/huggingface/trackio``); ``trackio show`` is its page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from midwatch.audit.exporters.bridges import Row, TrackerRun
from midwatch.audit.exporters.sink import SinkAwayError
from midwatch.core import load_extra, printable


class TrackioTracker:
    """One project."""

    def __init__(self, project: str, space: str = "") -> None:
        """Nothing is written yet.

        Args:
            space: A Hugging Face Space to log to; empty: the local file.

        Raises:
            ConfigError: CF107 the library is not installed.
        """
        self._trackio = load_extra("trackio", "trackio", "--to trackio")
        self._project = project
        self._space = space
        self._run: Any = None
        self.name = f"trackio:{project}" + (f":{space}" if space else "")

    def open(self, run: TrackerRun) -> int | None:
        """See ``Tracker``."""
        self.close()
        try:
            self._run = self._trackio.init(
                project=self._project,
                name=run.key,
                group=run.group,
                space_id=self._space or None,
                config=run.facts,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise SinkAwayError(f"trackio: {printable(error)}") from error
        return None

    def write(self, rows: Sequence[Row]) -> None:
        """See ``Tracker``."""
        for row in rows:
            self._run.log(dict(row.values), step=row.step)

    def close(self) -> None:
        """See ``Tracker``. Blocking: until the library has written what it holds."""
        run, self._run = self._run, None
        if run is not None:
            try:
                run.finish()
            except (OSError, RuntimeError) as error:
                raise SinkAwayError(f"trackio: {printable(error)}") from error
