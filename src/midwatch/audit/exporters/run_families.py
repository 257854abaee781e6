"""What a run's own record says of it, for the page of metrics: attempts, incidents, restarts, holds, the breaker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from midwatch.audit.exporters.text import Family, Sample
from midwatch.audit.line import LedgerLine, decode_line
from midwatch.audit.tail import opened, read_lines

_ENDED_BY_US: Final = "torn_down"
"""Of ranks that were ended with the others: no incident of its own."""


class LedgerCounts:
    """Counts what the coordinator wrote down, as its ledger grows.

    Args:
        path: ``ledger/coordinator.jsonl``; it need not be there yet.
        classes: All classes of faults: each counts from zero, so that its first one is seen as an increase.
    """

    def __init__(self, path: Path, classes: Iterable[str] = ()) -> None:
        self._path = path
        self._classes = sorted(set(classes) - {_ENDED_BY_US})
        self._start_over()

    def _start_over(self) -> None:
        self._at = 0
        self._attempts = 0
        self._is_held = False
        self._judged = ""
        """The class that the next launch is a restart for."""
        self._incidents = Counter[str](dict.fromkeys(self._classes, 0))
        self._restarts = Counter[str](dict.fromkeys(self._classes, 0))

    def look(self) -> None:
        """Take in what is new.

        Raises:
            OSError: The ledger is there and cannot be read.
        """
        try:
            with opened(self._path) as fd:
                self._take_from(fd)
        except FileNotFoundError:
            return

    def _take_from(self, fd: int) -> None:
        if self._path.stat().st_size < self._at:
            # Another file, or one whose torn end was cut off: from the beginning.
            self._start_over()
        while True:
            found = read_lines(fd, self._at)
            for raw in found.lines:
                line = decode_line(raw)
                if line is not None:
                    self._take(line)
            self._at = found.end
            if found.is_last:
                return

    def _take(self, line: LedgerLine) -> None:
        match line.event:
            case "run.started":
                self._judged, self._is_held = "", False
            case "attempt.launched":
                self._attempts += 1
                self._is_held = False
                if self._judged:
                    self._restarts[self._judged] += 1
                self._judged = ""
            case "fault.judged":
                fault_class = str(line.data.get("fault_class", "unknown"))
                if fault_class != _ENDED_BY_US:
                    self._incidents[fault_class] += 1
                    self._judged = fault_class
            case "run.held":
                self._is_held = True
            case "hold.ended":
                self._is_held = False
            case _:
                pass

    def families(self, run: str) -> list[Family]:
        labels = {"run": run}
        return [
            Family(
                "midwatch_attempts_total", "Launches of the run so far.", "counter", [Sample(self._attempts, labels)]
            ),
            Family(
                "midwatch_incidents_total",
                "Faults that were judged, by class.",
                "counter",
                [Sample(count, {**labels, "fault_class": name}) for name, count in sorted(self._incidents.items())],
            ),
            Family(
                "midwatch_restarts_total",
                "Launches that followed a fault, by its class.",
                "counter",
                [Sample(count, {**labels, "fault_class": name}) for name, count in sorted(self._restarts.items())],
            ),
            Family(
                "midwatch_held",
                "1 while nothing is started until probes or a person say so.",
                "gauge",
                [Sample(int(self._is_held), labels)],
            ),
        ]


def breaker_families(memory: Mapping[str, Any], run: str, states: Sequence[str]) -> list[Family]:
    """The circuit breaker's state as one sample a state, 1 for the one it is in; nothing without a breaker.

    Args:
        memory: What ``Desk.memory`` gives.
        states: All states.
    """
    if not memory:
        return []
    state = str(memory.get("state", "closed"))
    samples = [Sample(int(name == state), {"run": run, "state": name}) for name in dict.fromkeys([*states, state])]
    return [Family("midwatch_breaker_state", "1 for the state the circuit breaker is in.", "gauge", samples)]
