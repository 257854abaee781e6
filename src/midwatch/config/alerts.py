"""The tables of alerts. Addresses that are secrets are not in them: they point to a file or a variable."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from midwatch.config.leaf import Leaf, NotNegative

AlertKind = Literal["breaker", "anomaly", "incident", "held", "ended", "unverified", "push"]
"""What people are told of: the circuit breaker opens, closes or ends the run; numbers out of their band, training goes
on; a fault; a run that stands still; a run that ended badly; no checkpoint verified for long; metrics that cannot be
sent."""


class AlertTargetsConfig(Leaf, frozen=True, kw_only=True):
    """Who is told. What is marked as a secret is written ``file:PATH`` or ``env:NAME``."""

    webhook: tuple[str, ...] = ()
    """Addresses (secrets) that take JSON."""
    slack: tuple[str, ...] = ()
    """Incoming webhooks (secrets) of Slack or Mattermost."""
    pagerduty: tuple[str, ...] = ()
    """Routing keys (secrets) of PagerDuty, Events API v2."""
    pagerduty_url: Annotated[str, Meta(min_length=1)] = "https://events.pagerduty.com/v2/enqueue"
    """Where PagerDuty takes events; in Europe ``https://events.eu.pagerduty.com/v2/enqueue``."""
    email: tuple[str, ...] = ()
    """Addresses of people; see ``alerts.smtp``."""
    command: tuple[str, ...] = ()
    """A program and its arguments, no shell; it gets the alert as JSON on its standard input."""
    apprise: tuple[str, ...] = ()
    """Files or variables with addresses (secrets) as the library apprise writes them, one a line."""


class SmtpConfig(Leaf, frozen=True, kw_only=True):
    """How mail is handed over."""

    host: str = ""
    """The server. Empty: no mail."""
    port: Annotated[int, Meta(ge=1, le=65535)] = 587
    """465 with ``tls``, often 25 with ``none``."""
    security: Literal["starttls", "tls", "none"] = "starttls"
    """Encrypted after a greeting, from the first byte, or not at all."""
    user: str = ""
    """Who logs in. Empty: nobody does."""
    password: str = ""
    """A secret: ``file:PATH`` or ``env:NAME``."""
    sender: str = ""
    """The address that mail comes from. Empty: the user, else ``midwatch`` on this host."""


class AlertsConfig(Leaf, frozen=True, kw_only=True):
    """When people are told, and whom."""

    on: tuple[AlertKind, ...] = ("breaker", "anomaly", "incident", "held", "ended", "unverified", "push")
    """What they are told of."""
    min_grade: Literal["G0", "G1", "G2", "G3", "G4", "G5"] = "G2"
    """Faults below this grade are not told of."""
    unverified_s: NotNegative = 7200.0
    """No checkpoint was verified for so long while training went on. 0: not looked at."""
    min_gap_s: NotNegative = 60.0
    """Between two messages of one kind to one target; what comes sooner is told with the next one. What is critical
    never waits."""
    to: AlertTargetsConfig = AlertTargetsConfig()
    smtp: SmtpConfig = SmtpConfig()
