"""Rows become journals, one an attempt: a metric whose step goes back tells that the run was started again.

A value that comes late (a validation that took its time) is no such sign, for it is the first of its own metric.
"""

from __future__ import annotations

from typing import Final

import msgspec

from midwatch.audit.importers.mixed import Mixture, contradicts
from midwatch.audit.importers.numbers import LARGEST_STEP
from midwatch.audit.importers.output import JournalOutput
from midwatch.audit.importers.rows import MOST_METRICS, Notes, Row
from midwatch.core import MetricsError

MOST_JOURNALS: Final = 20_000
"""Attempts times ranks; each is a file. More are none: a column that is called rank counts something else."""
MOST_STRAYS: Final = 3
"""Rows that lie alone behind those around them: a step that was written wrongly is no restart. More are a mixture."""
LONGEST_NAME: Final = 500
"""Characters; it would be written with each value."""


class Attempt(msgspec.Struct):
    """What was imported as one attempt."""

    attempt: int
    start: int
    first: int
    last: int
    rows: int = 0


class Attempts:
    """Takes rows in and hands records on. Keeps the last step of each metric and one record, nothing else."""

    def __init__(self, output: JournalOutput, notes: Notes) -> None:
        self._output = output
        self._notes = notes
        self._number = 0
        self._is_told = False
        self._mixture = Mixture(output.source)
        self._last: dict[tuple[int, str], tuple[int, float, int]] = {}
        """Step, value and attempt, by rank and metric."""
        self._names: set[str] = set()
        self._journals: set[tuple[int, int]] = set()
        self._pending: Row | None = None
        self._doubtful: tuple[Row, int] | None = None
        """A row whose step goes back, and the step that was reached before."""
        self._strays = 0
        self._found: dict[int, Attempt] = {}
        self.points = 0

    def add(self, row: Row) -> None:
        """Take one row in.

        Raises:
            MetricsError: MT101 what should be names is none, MT102 several runs are mixed.
            OSError: The journals cannot be written.
        """
        self._notes.rows += 1
        self._mixture.run(row.run)
        if not -LARGEST_STEP < row.step < LARGEST_STEP:
            self._notes.pass_over("steps beyond all counting")
            return
        self._is_told = self._is_told or row.attempt is not None
        if not self._is_told and self._is_doubtful(row):
            return
        self._take(row)

    def _is_doubtful(self, row: Row) -> bool:
        """Keep a row whose step goes back until the next one tells whether this was a restart."""
        held, self._doubtful = self._doubtful, None
        if held is not None:
            kept, before = held
            if row.rank == kept.rank and row.step > before and self._strays < MOST_STRAYS:
                self._strays += 1
                self._notes.pass_over("rows that lie behind those around them", f"step {kept.step}")
            else:
                self._take(kept)
        before = self._reached(row)
        if row.is_restart or row.step >= before:
            return False
        self._doubtful = (row, before)
        return True

    def _reached(self, row: Row) -> int:
        """The highest last step of the row's metrics."""
        return max(
            (self._last[row.rank, name][0] for name in row.values if (row.rank, name) in self._last), default=row.step
        )

    def _take(self, row: Row) -> None:
        number = row.attempt if row.attempt is not None else self._seen(row)
        values = self._named(self._news(row, number))
        if not values:
            return
        self._count(number, row)
        held = self._pending
        if held is not None and (held.attempt, held.rank, held.step) == (number, row.rank, row.step):
            held.values.update(values)
            return
        self._pending = row._replace(values=values, attempt=number)
        if held is not None:
            self._write(held)

    def close(self) -> list[Attempt]:
        """Write the rest; what was found, by attempt.

        Raises:
            MetricsError: MT102 several runs are mixed. OSError: The journals cannot be written.
        """
        if self._doubtful is not None:
            self._take(self._doubtful[0])
            self._doubtful = None
        if self._pending is not None:
            self._write(self._pending)
            self._pending = None
        self._mixture.close()
        self._output.close()
        return [found for _, found in sorted(self._found.items()) if found.rows]

    def _seen(self, row: Row) -> int:
        """The attempt as steps tell it."""
        if not self._number:
            self._number = 1
            self._found[1] = Attempt(1, min(0, row.step), row.step, row.step)
        if row.is_restart or row.step < self._reached(row):
            self._mixture.restart(self._notes.rows)
            self._last.clear()
            if self._found[self._number].rows:
                self._number += 1
            self._found[self._number] = Attempt(self._number, row.step, row.step, row.step)
        self._mixture.step(row.step)
        return self._number

    def _news(self, row: Row, attempt: int) -> dict[str, float]:
        """The values that were not told just before for this step."""
        kept: dict[str, float] = {}
        differing: list[str] = []
        for name, value in row.values.items():
            last = self._last.get((row.rank, name))
            if last is not None and (last[0], last[2]) == (row.step, attempt):
                if last[1] == value or (last[1] != last[1] and value != value):
                    self._notes.pass_over("values told twice")
                    continue
                self._notes.pass_over("values told twice, and differently: the last one counts")
                if contradicts(value, last[1]):
                    differing.append(name)
            kept[name] = value
            self._last[row.rank, name] = (row.step, value, attempt)
            self._names.add(name)
        self._mixture.told(row.rank, row.step, differing)
        self._refuse_what_are_no_names()
        return kept

    def _refuse_what_are_no_names(self) -> None:
        if len(self._names) > MOST_METRICS:
            source = self._output.source
            raise MetricsError(
                "MT101", f"{source} has more than {MOST_METRICS} metrics: these are no names", path=source
            )

    def _named(self, values: dict[str, float]) -> dict[str, float]:
        """Without what has no name that one could ask for."""
        if values and max(map(len, values)) <= LONGEST_NAME and "" not in values:
            return values
        kept = {name: value for name, value in values.items() if 0 < len(name) <= LONGEST_NAME}
        if len(kept) < len(values):
            self._notes.pass_over("values whose name is none", count=len(values) - len(kept))
        return kept

    def _count(self, number: int, row: Row) -> None:
        self._journals.add((number, row.rank))
        if len(self._journals) > MOST_JOURNALS:
            source = self._output.source
            message = f"{source} has more than {MOST_JOURNALS} attempts and ranks: the columns count something else"
            raise MetricsError("MT101", message, path=source)
        found = self._found.setdefault(number, Attempt(number, row.step, row.step, row.step))
        found.first, found.last = min(found.first, row.step), max(found.last, row.step)
        found.rows += 1

    def _write(self, row: Row) -> None:
        self.points += len(row.values)
        # Rows that name their attempt may come in any order: its lowest step is where it started.
        attempt = row.attempt if row.attempt is not None else 1
        self._output.write(row, attempt, None if self._is_told else self._found[attempt].start)
