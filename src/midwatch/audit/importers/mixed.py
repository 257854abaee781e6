"""Is this one run that was restarted, or several runs whose lines were mixed? Of the latter no curve can be made."""

from __future__ import annotations

from typing import Final

from midwatch.core import MetricsError

RESTARTS: Final = 16
"""Until so many nothing is said: a run in a crash loop looks odd, too."""

_LEAP: Final = 3


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
        self.retold = 0
        """Values that were told twice for one step, and differently."""

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
        if self._leaps * 2 >= self._restarts or self._restarts * 2.1 >= rows or self.retold > self._restarts:
            message = (
                f"{self._source}: steps go back {self._restarts} times in {rows} rows, as if several runs were mixed"
            )
            raise MetricsError("MT102", message, path=self._source, restarts=self._restarts, rows=rows)
