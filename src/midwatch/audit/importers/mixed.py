"""Is this one run that was restarted, or several runs whose lines were mixed? Of the latter no curve can be made."""

from __future__ import annotations

import math
import re
import shlex
from typing import Final

from midwatch.audit.importers.numbers import is_printed_twice
from midwatch.core import MetricsError, printable

RESTARTS: Final = 16
"""Until so many nothing is said: a run in a crash loop looks odd, too."""

_LEAP: Final = 3

ODD_STEPS: Final = 3
"""Steps that a logger may tell twice and differently before anything is made of it."""

_PACE: Final = re.compile(r"time|elapsed|duration|seconds?|per_s|/s$|_m?s$|tps|throughput|flops|mfu|memory")
"""Names of what differs from one printing of a step to the next, and from one rank to another."""


class Mixture:
    """Counts what a restarted run does not do.

    After it went back, a run goes on by its usual stride. In a mixture the next line of the other run leaps over steps
    that were told before; or every second line goes back; or one step has several values.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._restarts = 0
        self._leaps = 0
        self._stride: int | None = None
        self._previous: int | None = None
        self._run = ""
        self._newest: dict[int, int] = {}
        """The step that was told of last, by rank."""
        self._odd: dict[int, int] = {}
        """Likewise, of those that were told twice and differently."""
        self._told = self._retold = 0

    def run(self, name: str) -> None:
        """A row names its run.

        Raises:
            MetricsError: MT102 another row has named another one.
        """
        if not self._run:
            self._run = name
        elif name and name != self._run:
            names = [printable(one[:80]) for one in (self._run, name)]
            message = f"{self._source}: rows of several runs, by the column that names them: {', '.join(names)}, ..."
            hint = f"Take one of them: --run-name {shlex.quote(names[0])}, each into a --run-dir of its own."
            raise MetricsError("MT102", message, hint=hint, path=self._source, runs=names)

    def told(self, rank: int, step: int, differing: list[str]) -> None:
        """A row tells of a step; the names of what was told of it before, and contradicts that."""
        if self._newest.get(rank) != step:
            self._newest[rank] = step
            self._told += 1
        if self._odd.get(rank) != step and not all(map(_PACE.search, differing)):
            self._odd[rank] = step
            self._retold += 1

    def close(self) -> None:
        """There are no more rows.

        Raises:
            MetricsError: MT102 most steps were told by two writers, which kept pace.
        """
        if self._retold > ODD_STEPS and 2 * self._retold > self._told:
            message = (
                f"{self._source}: {self._retold} of {self._told} steps are told twice and differently,"
                " as if several runs or ranks were mixed"
            )
            hint = "Give each of them its own file, or a column named run, attempt or rank. If it is one run, keep one"
            hint += " row of each step."
            raise MetricsError("MT102", message, hint=hint, path=self._source, retold=self._retold, steps=self._told)

    def step(self, step: int) -> None:
        """The next row's step."""
        stride = step - self._previous if self._previous is not None else 0
        if stride > 0:
            self._leaps += self._stride is not None and stride > _LEAP * self._stride
            self._stride = min(stride, self._stride or stride)
        if stride >= 0:
            self._previous = step

    def restart(self, rows: int) -> None:
        """Steps went back.

        Raises:
            MetricsError: MT102 once it is clear that several runs are mixed.
        """
        self._restarts += 1
        self._previous = None
        if self._restarts <= RESTARTS:
            return
        if self._leaps * 2 >= self._restarts or self._restarts * 2.1 >= rows or self._retold > self._restarts:
            message = (
                f"{self._source}: steps go back {self._restarts} times in {rows} rows, as if several runs were mixed"
            )
            raise MetricsError("MT102", message, path=self._source, restarts=self._restarts, rows=rows)


def contradicts(one: float, other: float) -> bool:
    """Two values of one step are not the same number, printed twice.

    NaN contradicts nothing: where validations have rows of their own, some write it for what they do not tell.
    """
    if not (math.isfinite(one) and math.isfinite(other)):
        return one != other and not (math.isnan(one) or math.isnan(other))
    return not is_printed_twice(one, other)
