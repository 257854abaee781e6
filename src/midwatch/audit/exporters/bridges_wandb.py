"""Weights & Biases: a run for each attempt, all in the group of the run's id.

Logging goes through the library, so whatever the user set up holds: ``WANDB_MODE=offline`` writes to a folder that
``wandb sync`` sends later, ``WANDB_BASE_URL`` names a server of one's own, ``wandb login`` keeps the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from midwatch.audit.exporters.bridges import Row, TrackerRun
from midwatch.audit.exporters.sink import SinkAwayError
from midwatch.core import load_extra, printable


class WandbTracker:
    """One project, of the user's default entity or another (``ENTITY/PROJECT``)."""

    def __init__(self, project: str, folder: str = "") -> None:
        """Nothing is connected yet.

        Args:
            folder: Where the library keeps its files; empty: where it does by itself.

        Raises:
            ConfigError: CF107 the library is not installed.
        """
        self._wandb = load_extra("wandb", "wandb", "--to wandb")
        self._entity, _, self._project = project.rpartition("/")
        self._folder = folder
        self._runs: dict[str, Any] = {}
        """Of one attempt: its ranks come in turns."""
        self._attempt = (-1, -1)
        self._current: Any = None
        self.name = f"wandb:{project}" + (f":{folder}" if folder else "")

    def open(self, run: TrackerRun) -> int | None:
        """See ``Tracker``. Online the server tells the newest step; offline nobody does."""
        if (run.attempt, run.part) != self._attempt:
            self._finish()
            self._attempt = (run.attempt, run.part)
        if run.key in self._runs:
            self._current = self._runs[run.key]
            return None
        try:
            self._current = self._wandb.init(
                project=self._project,
                entity=self._entity or None,
                id=run.key,
                name=f"{run.name or run.group} {run.place}",
                group=run.group,
                job_type="midwatch",
                config=run.facts,
                resume="allow",
                reinit="create_new",
                dir=self._folder or None,
                save_code=False,
                settings=self._settings(),
            )
        except (self._wandb.Error, OSError) as error:
            raise SinkAwayError(f"wandb: {printable(error)}") from error
        self._runs[run.key] = self._current
        # It counts the next step; for a run that is new there that is 0.
        return self._current.starting_step - 1 if self._current.resumed else None

    def write(self, rows: Sequence[Row]) -> None:
        """See ``Tracker``."""
        try:
            for row in rows:
                moment = {"_timestamp": row.ts_ns / 1e9} if row.ts_ns else {}
                self._current.log({**row.values, **moment}, step=row.step)
        except (self._wandb.Error, OSError) as error:
            raise SinkAwayError(f"wandb: {printable(error)}") from error

    def close(self) -> None:
        """See ``Tracker``. Blocking: until the library has delivered what it holds, and its process has ended."""
        self._finish()
        # Offline the last points are on the disk only when that process is done.
        self._wandb.teardown()

    def _finish(self) -> None:
        runs, self._runs, self._current = self._runs, {}, None
        self._attempt = (-1, -1)
        try:
            for run in runs.values():
                run.finish()
        except (self._wandb.Error, OSError) as error:
            raise SinkAwayError(f"wandb: {printable(error)}") from error

    def _settings(self) -> Any:
        # We are not the training: its host, code and output are not ours to tell.
        return self._wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True
        )
