"""One alert, and how people read it. What ranks wrote is data: on one line, cut, and without control characters."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec

from midwatch.config import AlertKind, redact_text
from midwatch.core import format_seconds, printable

Severity = Literal["info", "warning", "error", "critical"]
State = Literal["on", "over", "once"]
"""on: something begins that will end; over: it has ended; once: it has happened."""

SEVERITIES: Final[tuple[Severity, ...]] = ("info", "warning", "error", "critical")

_MOST_CHARACTERS: Final = 600
"""Of one sentence: a page of a phone."""
_MOST_READ: Final = 4000
_OTHERS: Final = 5
"""Folded alerts that are named in a message; the rest is counted."""
_LATE_S: Final = 120.0
"""An alert that comes later than this says so."""


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """What happened, in words for people. ``clean`` has been applied to all that came from outside."""

    id: str
    """The same for one event, whoever reads of it."""
    kind: AlertKind | Literal["test"]
    state: State = "once"
    severity: Severity
    key: str
    """What it is about: equal for the beginning and the end of one thing."""
    title: str
    """Our own words only."""
    sentence: str
    did: str = ""
    """What midwatch did about it."""
    look: str = ""
    """The command that shows more."""
    page: str = ""
    """A code with a runbook page."""
    run: str = ""
    name: str = ""
    """The run's label."""
    run_dir: str = ""
    attempt: int = 0
    step: int | None = None
    rank: int | None = None
    node: str = ""
    ts_ns: int = 0

    @property
    def is_quiet(self) -> bool:
        """Only for receivers that keep open what they were told: nobody wants to be woken by a fault that healed."""
        return self.state == "over" and self.kind in ("anomaly", "incident")


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """What goes to one target at once: the newest alert, and those that waited with it."""

    alert: Alert
    earlier: tuple[Alert, ...] = ()
    """Oldest first."""
    dropped: int = 0
    """Alerts lost before this one, because too many waited."""
    now_ns: int = 0

    @property
    def severity(self) -> Severity:
        """Of the worst one."""
        known: list[Severity] = [one.severity for one in (*self.earlier, self.alert)]
        return max(known, key=SEVERITIES.index)


def clean(text: object) -> str:
    """Text from outside on one line, without control characters or what looks like a secret, and not too long."""
    shown = printable(redact_text(str(text)[:_MOST_READ]))
    return shown if len(shown) <= _MOST_CHARACTERS else f"{shown[: _MOST_CHARACTERS - 3]}..."


def clock_time(ts_ns: int) -> str:
    """UTC to the second; empty for 0."""
    try:
        return f"{datetime.fromtimestamp(ts_ns // 10**9, UTC):%Y-%m-%d %H:%M:%S} UTC" if ts_ns else ""
    except (OverflowError, OSError, ValueError):
        return ""


def subject(message: Message) -> str:
    """One line for a list of messages."""
    alert = message.alert
    more = f" (and {len(message.earlier)} more)" if message.earlier else ""
    return f"[midwatch] {clean(alert.name or alert.run or 'a run')}: {alert.title}{more}"


def document(message: Message) -> dict[str, Any]:
    """The whole message for programs; what a webhook and a command get."""
    return {
        "schema": 1,
        "subject": subject(message),
        "text": body(message),
        "severity": message.severity,
        "alert": message.alert,
        "earlier": message.earlier,
        "dropped": message.dropped,
    }


def body(message: Message) -> str:
    """The whole message as plain text, a fact a line."""
    alert = message.alert
    lines = [alert.sentence, _place(alert)]
    lines += [f"What midwatch did: {alert.did}"] if alert.did else []
    lines += [f"Look: {alert.look}"] if alert.look else []
    lines += [f"Runbook: midwatch explain {alert.page} (docs/runbook/{alert.page}.md)"] if alert.page else []
    late_s = (message.now_ns - alert.ts_ns) / 1e9
    if alert.ts_ns and late_s > _LATE_S:
        lines.append(f"This comes {format_seconds(late_s)} late.")
    lines += _earlier(message)
    return "\n".join(line for line in lines if line)


def _place(alert: Alert) -> str:
    where = [f"rank {alert.rank}"] if alert.rank is not None else []
    where += [f"node {alert.node}"] if alert.node else []
    facts = [f"run {clean(alert.run)}"] if alert.run else []
    facts += [f"attempt {alert.attempt}"] if alert.attempt else []
    facts += [f"step {alert.step}"] if alert.step is not None else []
    facts += [" on ".join(where)] if where else []
    facts += [clock_time(alert.ts_ns)] if alert.ts_ns else []
    return ", ".join(facts)


def _earlier(message: Message) -> list[str]:
    lines = [f"Before it, {len(message.earlier)} more:"] if message.earlier else []
    for one in message.earlier[-_OTHERS:]:
        lines.append(f"- {clock_time(one.ts_ns)} {one.title}: {one.sentence}".replace("-  ", "- "))
    if message.dropped:
        lines.append(f"{message.dropped} alerts before these were dropped: too many waited.")
    return lines
