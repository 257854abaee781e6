"""trackio: a run for each attempt, in the group of the run's id, in a SQLite file of this user.

The library keeps it below ``TRACKIO_DIR`` (by default ``~/.cache/huggingface/trackio``); ``trackio show`` is its page.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

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
        return self._newest(run.key)

    def write(self, rows: Sequence[Row]) -> None:
        """See ``Tracker``."""
        for row in rows:
            self._run.log(dict(row.values), step=row.step)

    def close(self) -> None:
        """See ``Tracker``. Blocking: until the library has written what it holds."""
        run, self._run = self._run, None
        if run is not None:
            try:
                self._trackio.finish()  # not run.finish(): at exit the library would do it again
            except (OSError, RuntimeError) as error:
                raise SinkAwayError(f"trackio: {printable(error)}") from error

    def _newest(self, key: str) -> int | None:
        """From the library's file, in the form that its documentation gives ("Storage schema"); None for a Space."""
        storage = getattr(self._trackio, "SQLiteStorage", None)
        is_elsewhere = not getattr(self._run, "_is_local", True) or getattr(self._run, "_storage_mode", "") == "jsonl"
        if is_elsewhere or storage is None:
            return None
        path = Path(storage.get_project_db_path(self._project))
        if not path.exists():
            return -1
        try:
            with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as db:
                row = db.execute("SELECT MAX(step) FROM metrics WHERE run_name = ?", (key,)).fetchone()
        except sqlite3.Error:
            return None
        return -1 if row[0] is None else int(row[0])
