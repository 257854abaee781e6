"""Targets that take a POST: any webhook, Slack and Mattermost, PagerDuty.

Source: Slack, "Formatting text for app surfaces" (what to escape); Mattermost, "Incoming webhooks" (the same form);
PagerDuty, "Events API v2" (fields and their lengths).
"""

from __future__ import annotations

from typing import Any, Final

from midwatch.audit.alerts.alert import Alert, Message, body, document, subject
from midwatch.audit.alerts.post import address_of, host_of, post_json
from midwatch.config import read_secret
from midwatch.core import ConfigError, printable

_MARKS: Final = {
    "info": ":information_source:",
    "warning": ":warning:",
    "error": ":rotating_light:",
    "critical": ":rotating_light:",
}
_MOST_SUMMARY: Final = 1024
_MOST_KEY: Final = 255


class _Hook:
    """An address that is a secret; read for each delivery, so that it may be exchanged."""

    is_stateful = False
    _table = ""

    def __init__(self, number: int, reference: str) -> None:
        self.name = f"{self._table}:{number}"
        self._key = f"alerts.to.{self._table}"
        self._reference = reference

    def check(self) -> str:
        return host_of(self._address())

    def _address(self) -> str:
        return address_of(self._key, read_secret(self._key, self._reference))

    def _document(self, message: Message) -> Any:
        raise NotImplementedError

    def send(self, message: Message, timeout_s: float) -> str:
        return post_json(self._address(), self._document(message), timeout_s)


class Webhook(_Hook):
    """Any receiver of JSON."""

    _table = "webhook"

    def _document(self, message: Message) -> dict[str, Any]:
        return document(message)


class Slack(_Hook):
    """An incoming webhook of Slack, or of Mattermost, which takes the same form."""

    _table = "slack"

    def _document(self, message: Message) -> dict[str, Any]:
        # In a block of code nothing is a mention, a link or a colour, whatever a rank wrote.
        mark = _MARKS[message.severity]
        return {"text": f"{mark} {_escaped(subject(message))}\n```\n{_escaped(body(message))}\n```"}


def _escaped(text: str) -> str:
    """Without control sequences of Slack (``<!channel>``), ends of blocks, and mentions."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # Mattermost calls everybody for a plain @channel outside of a block; a space of no width keeps it readable.
    return text.replace("`", "'").replace("@", "@\u200b")


class PagerDuty:
    """Events API v2. What is over resolves what began, by the key both share."""

    is_stateful = True

    def __init__(self, number: int, reference: str, url: str) -> None:
        self.name = f"pagerduty:{number}"
        self._reference = reference
        self._url = url

    def check(self) -> str:
        address_of("alerts.to.pagerduty_url", self._url)
        self._routing_key()
        return host_of(self._url)

    def send(self, message: Message, timeout_s: float) -> str:
        return post_json(self._url, self._event(message), timeout_s)

    def _routing_key(self) -> str:
        key = read_secret("alerts.to.pagerduty", self._reference)
        if not key.isalnum():
            raise ConfigError(
                "CF102", "what alerts.to.pagerduty points to is no routing key", key="alerts.to.pagerduty"
            )
        return key

    def _event(self, message: Message) -> dict[str, Any]:
        alert = message.alert
        event: dict[str, Any] = {
            "routing_key": self._routing_key(),
            "event_action": "resolve" if alert.state == "over" else "trigger",
            "dedup_key": f"midwatch/{alert.run}/{alert.key}"[:_MOST_KEY],
        }
        if alert.state == "over":
            return event
        summary = f"{subject(message)}: {alert.sentence}"
        return event | {
            "client": "midwatch",
            "payload": {
                "summary": summary[:_MOST_SUMMARY],
                "source": alert.node or alert.run or "midwatch",
                "severity": alert.severity,
                "component": "midwatch",
                "group": printable(alert.name or alert.run),
                "class": alert.kind,
                "custom_details": _details(alert),
            },
        }


def _details(alert: Alert) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "what": alert.sentence,
        "what midwatch did": alert.did,
        "look": alert.look,
        "runbook": f"midwatch explain {alert.page}" if alert.page else "",
        "run": alert.run,
        "run folder": alert.run_dir,
        "attempt": alert.attempt or None,
        "step": alert.step,
        "rank": alert.rank,
        "node": alert.node,
    }
    return {name: value for name, value in facts.items() if value not in ("", None)}
