"""The process that sends the run's metrics on while it lives (``metrics.push.url``).

A process of its own, so that a receiver or a disk that hangs delays nobody. Where it got to is noted in the run folder:
killed, started again or taken over by another node, it goes on from there. What it has to tell it says to the launcher
and writes into a ledger file of its own, ``ledger/sender.jsonl``.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from midwatch.audit import Ledger
from midwatch.audit.exporters import Pusher, PushReport, PushTrouble, Sink, sink_of
from midwatch.config import expand_path
from midwatch.core import LedgerError, StorageError, format_bytes, format_seconds
from midwatch.supervise.bystander import Ear, begin
from midwatch.supervise.chat import Console
from midwatch.supervise.specs import SenderSpec

_BUDGET_S: Final = 1.0
"""Of one turn while there is more to send."""
_AWAY_S: Final = 1.0
"""Between two looks whether it is time to ask again a receiver that is away."""
_LAST_S: Final = 0.5
"""The same at the end, where there is little time."""
_log: Final = logging.getLogger("midwatch.sender")


class Sender:
    """One run's metrics to one receiver.

    Args:
        spec: The task.
        sink: The receiver.
        say: Tells people a sentence and its level.
        trouble: Says what is worth telling.
    """

    def __init__(
        self, spec: SenderSpec, sink: Sink, say: Callable[[str, str], None], trouble: PushTrouble | None = None
    ) -> None:
        self._spec = spec
        self._name = sink.name
        self._say = say
        self._run_dir = Path(spec.run_dir)
        self._pusher = Pusher(self._run_dir, sink)
        self._trouble = trouble or PushTrouble()

    def work(self, ear: Ear) -> None:
        """Send until the launcher says that the run is over, or is gone."""
        while not ear.is_closed:
            report = self._turn(_BUDGET_S)
            word = ear.word(self._pause_s(report))
            if word is not None and word[0] == "finish":
                self._drain()
                return

    def close(self) -> None:
        self._pusher.close()

    def _turn(self, budget_s: float) -> PushReport:
        report = self._pusher.step(budget_s)
        news = self._trouble.feed(report, time.monotonic())
        if news == "failing":
            problem = self._trouble.problem
            self._say(f"[MT106] metrics are not sent, they wait in the run folder: {self._named(problem)}", "warning")
            self._record("metrics.push_failed", code="MT106", problem=problem, behind_bytes=self._behind_bytes())
        elif news == "mended":
            away_s = self._trouble.away_s
            self._say(f"metrics are sent to {self._name} again, after {format_seconds(away_s)}", "info")
            self._record("metrics.push_recovered", away_s=round(away_s, 1))
        return report

    def _pause_s(self, report: PushReport) -> float:
        every_s = self._spec.push.every_s
        if report.is_caught_up:
            return every_s
        # More at once, unless nothing went out because there is something to wait for.
        return 0.0 if report.records or report.refused else min(_AWAY_S, every_s)

    def _drain(self) -> None:
        """What ranks wrote at their end, and what has waited, for a bounded time."""
        end = time.monotonic() + self._spec.push.drain_s
        while True:
            self._pusher.hurry(end - time.monotonic())
            report = self._turn(max(0.0, min(_BUDGET_S, end - time.monotonic())))
            if report.is_caught_up:
                return
            if time.monotonic() >= end:
                break
            if not (report.records or report.refused):
                time.sleep(_LAST_S)
        left_bytes, problem = self._behind_bytes(), report.problem or "the time was up"
        what = f"{format_bytes(left_bytes)} of metrics were not sent ({self._named(problem)})"
        self._say(
            f"{what}; the next run in this folder sends them, or midwatch metrics push {self._run_dir}", "warning"
        )
        self._record("metrics.push_left", code="MT106", problem=problem, behind_bytes=left_bytes)

    def _named(self, problem: str) -> str:
        """Most problems begin with the receiver's name."""
        return problem if problem.startswith(self._name) else f"{self._name}: {problem}"

    def _behind_bytes(self) -> int:
        try:
            return self._pusher.behind_bytes()
        except (OSError, StorageError):
            return 0

    def _record(self, event: str, **data: Any) -> None:
        """Open only for this: a node that takes over writes the same file."""
        try:
            path = self._run_dir / "ledger" / "sender.jsonl"
            with Ledger(path, run=self._spec.run, node=self._spec.node) as ledger:
                ledger.record(event, to=self._name, **data)
        except (OSError, StorageError, LedgerError) as error:
            _log.warning("%s is not written down: %s", event, error)


def main() -> int:
    begin()
    ear, console = Ear(sys.stdin.fileno()), Console(sys.stdout)
    spec = msgspec.json.decode(ear.line(), type=SenderSpec)
    push = spec.push
    token = expand_path("metrics.push.token_file", push.token_file) if push.token_file else None
    sink = sink_of(push.url, token, push.kind)
    sender = Sender(spec, sink, lambda sentence, level: console.send("say", sentence=sentence, level=level))
    try:
        sender.work(ear)
    finally:
        sender.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
