"""The index of a run's metrics: a SQLite file that answers fast, and that can be thrown away at any time.

The journals are the record. An index that is damaged, another program's, another run's or of another format is left
aside and a new one is made beside it: each has a number in its name, so that a process that still reads the old one
loses nothing.
"""

from __future__ import annotations

import logging
import os
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from midwatch.audit.index import query, schema
from midwatch.audit.index.fill import Filler, Progress
from midwatch.audit.index.listing import all_metrics
from midwatch.audit.index.place import index_folder, index_name
from midwatch.audit.index.types import Branch, Bucket, DeadBranch, MetricInfo, Newest, Point, SyncReport
from midwatch.core import MetricsError
from midwatch.storage import as_storage_error, ops

_log = logging.getLogger(__name__)

T = TypeVar("T")

_TRIES: Final = 5
"""Each makes a new file; more than one is needed only when somebody damages them as fast as they are made."""

_DAMAGE: Final = frozenset({"SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR", "SQLITE_MISMATCH", "SQLITE_CONSTRAINT"})
"""What a broken file, or one without our tables, makes of our own statements."""

_ALL: Final = (-schema.NEVER, schema.NEVER - 1)


class MetricIndex:
    """One open index. Not for several threads at once; several processes may each have one of the same run.

    Opening does not read the journals: ``sync`` does.
    """

    def __init__(self, run_dir: Path, folder: Path | None = None) -> None:
        """Open the index of a run, or make it.

        Args:
            folder: Where indexes lie, on a disk of this host; None takes one of this user's. See ``index_folder``.

        Raises:
            MetricsError: MT105 there is no place for it. StorageError: ST101 to ST103.
        """
        self.run_dir = run_dir.absolute()
        self._about = os.path.realpath(run_dir)
        self._base = index_folder(folder) / index_name(run_dir)
        self.rebuilt = ""
        """Why an index that was there was not believed; empty when it was, or there was none."""
        self._db, self.path = self._open()
        self._filler = Filler(self._db)

    # --- keeping up -----------------------------------------------------------------------------------------------

    def sync(self, *, budget_s: float | None = None, progress: Progress | None = None) -> SyncReport:
        """Take in what the journals have got since the last look.

        Blocking: for ``budget_s``, and a fraction of a second more; without it until all is in.

        Raises:
            StorageError: ST103 a journal cannot be read. MetricsError: MT105 the index cannot be written.
        """
        try:
            return self._ask(lambda _: self._filler.sync(self.run_dir, budget_s=budget_s, progress=progress))
        except OSError as error:
            raise as_storage_error(error, "cannot read a journal") from error

    def start_anew(self, why: str) -> None:
        """Leave the index aside and begin an empty one, which the next ``sync`` fills."""
        self._db.close()
        self.rebuilt = why
        self._db, self.path = self._open(_generation(self.path) + 1)
        self._filler = Filler(self._db)

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> MetricIndex:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- questions ------------------------------------------------------------------------------------------------

    def metrics(self) -> list[MetricInfo]:
        """Every metric of every rank that has a live step."""
        return self._ask(all_metrics)

    def branches(self) -> list[Branch]:
        """The attempts, and what each is still worth."""
        return self._ask(query.all_branches)

    def has(self, metric: str, rank: int = 0) -> bool:
        return self._ask(lambda db: query.series_of(db, metric, rank)) is not None

    def series(self, metric: str, *, rank: int = 0, first: int = _ALL[0], last: int = _ALL[1]) -> list[Point]:
        """The live values of a metric by step: each step's from the newest attempt that reached it."""

        def question(db: sqlite3.Connection) -> list[Point]:
            series = query.series_of(db, metric, rank)
            return [] if series is None else list(query.live_points(db, series, rank, first, last))

        return self._ask(question)

    def buckets(
        self, metric: str, count: int, *, rank: int = 0, first: int = _ALL[0], last: int = _ALL[1]
    ) -> tuple[int, list[Bucket]]:
        """The live values in at most ``count`` buckets of equally many steps, with the lowest and highest of each.

        Returns:
            How many steps a bucket spans, and the buckets that have a value. With ``first`` and ``last`` given the
            buckets of all metrics begin at the same steps.
        """

        def question(db: sqlite3.Connection) -> tuple[int, list[Bucket]]:
            series = query.series_of(db, metric, rank)
            return (1, []) if series is None else query.live_buckets(db, series, rank, max(1, count), first, last)

        return self._ask(question)

    def dead(self, metric: str, *, rank: int = 0, first: int = _ALL[0], last: int = _ALL[1]) -> list[DeadBranch]:
        """What was recorded of a metric and rolled back, by attempt."""

        def question(db: sqlite3.Connection) -> list[DeadBranch]:
            series = query.series_of(db, metric, rank)
            return [] if series is None else query.dead_branches(db, series, rank, first, last)

        return self._ask(question)

    def newest(self) -> list[Newest]:
        """The last live value of every metric."""
        return self._ask(query.newest_values)

    def damaged_lines(self) -> dict[str, int]:
        """Journals with lines that could not be read, and how many each."""
        rows = self._ask(
            lambda db: db.execute("SELECT name, damaged FROM source WHERE damaged ORDER BY name").fetchall()
        )
        return dict(rows)

    # --- the file -------------------------------------------------------------------------------------------------

    def _ask(self, question: Callable[[sqlite3.Connection], T]) -> T:
        """An answer; an index that turns out to be damaged is made anew first, and asked once more."""
        try:
            return question(self._db)
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise _refused(error, self.path) from error
            _log.warning("the index %s is damaged (%s): made anew", self.path, error)
            self.start_anew(f"it is damaged ({error})")
        try:
            self._filler.sync(self.run_dir)
            return question(self._db)
        except sqlite3.DatabaseError as error:
            raise _refused(error, self.path) from error
        except OSError as error:
            raise as_storage_error(error, "cannot read a journal") from error

    def _open(self, least: int = 1) -> tuple[sqlite3.Connection, Path]:
        generation = max([least, *map(_generation, self._there())])
        why = ""
        for _ in range(_TRIES):
            path = self._base.with_name(f"{self._base.name}-g{generation:04d}.sqlite")
            db, why = self._try(path)
            if db is not None:
                self._remove_older(generation)
                return db, path
            _log.warning("the index %s is not used: %s", path, why)
            self.rebuilt = why
            generation += 1
        raise MetricsError("MT105", f"no index can be kept at {self._base}: {why}", path=str(self._base))

    def _try(self, path: Path) -> tuple[sqlite3.Connection | None, str]:
        db: sqlite3.Connection | None = None
        try:
            db = schema.connect(path)
            schema.create(db, self._about)
            if not (why := schema.why_not_ours(db, self._about)):
                return db, ""
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                if db is not None:
                    db.close()
                raise _refused(error, path) from error
            why = f"it is damaged ({error})"
        if db is not None:
            db.close()
        return None, why

    def _there(self) -> list[Path]:
        return [path for path in self._base.parent.glob(f"{self._base.name}-g*.sqlite") if _generation(path)]

    def _remove_older(self, generation: int) -> None:
        for path in self._there():
            if _generation(path) < generation:
                for suffix in ("", "-wal", "-shm"):
                    try:
                        ops.unlink(path.with_name(path.name + suffix))
                    except OSError as error:
                        _log.warning("cannot remove %s%s: %s", path, suffix, error)


def _generation(path: Path) -> int:
    match = re.fullmatch(r".*-g(\d{4,9})", path.stem)
    return int(match[1]) if match else 0


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    name = getattr(error, "sqlite_errorname", "") or ""
    return any(name == kind or name.startswith(f"{kind}_") for kind in _DAMAGE)


def _refused(error: sqlite3.DatabaseError, path: Path) -> MetricsError:
    return MetricsError("MT105", f"the index {path} cannot be used: {error}", path=str(path))
