"""When a delivery counts as failing, and when as mended. Pure: time is an argument."""

from __future__ import annotations

from typing import Final, Literal

from midwatch.audit.exporters.pusher import PushReport

DOUBT_S: Final = 10.0
"""A receiver that is restarted is back within this time, and nobody need hear of it."""

News = Literal["", "failing", "mended"]


class PushTrouble:
    """Makes one word of many equal reports.

    Args:
        doubt_s: Trouble that lasts this long is told; then its end is, too.
    """

    def __init__(self, doubt_s: float = DOUBT_S) -> None:
        self._doubt_s = doubt_s
        self._since: float | None = None
        self._is_refusing = False
        self.problem = ""
        """What is wrong, in words; empty while nothing is."""
        self.is_told = False
        self.away_s = 0.0
        """How long the trouble that is over had lasted."""

    def feed(self, report: PushReport, now: float) -> News:
        """What is to be told after one more call of ``Pusher.step``.

        Args:
            now: Monotonic seconds.
        """
        problem = self._problem_of(report)
        if problem is None:
            return ""
        if not problem:
            return self._mend(now)
        self.problem = problem
        if self._since is None:
            self._since = now
        if self.is_told or now - self._since < self._doubt_s:
            return ""
        self.is_told = True
        return "failing"

    def _problem_of(self, report: PushReport) -> str | None:
        """Empty when all is well; None when this report says neither."""
        if report.problem:
            self._is_refusing = False
            return report.problem
        if report.refused and not report.records:
            self._is_refusing = True
            return f"the receiver refuses what it is sent ({report.refused} records at once)"
        if report.records or not self._is_refusing:
            self._is_refusing = False
            return ""
        return None

    def _mend(self, now: float) -> News:
        self.away_s = now - self._since if self._since is not None else 0.0
        was_told = self.is_told
        self._since, self.problem, self.is_told = None, "", False
        return "mended" if was_told else ""
