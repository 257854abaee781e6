"""Alerts that reach a person: what the ledgers say, told to webhooks, pagers, mailboxes and programs."""

from midwatch.audit.alerts.alert import Alert, Message, body, subject
from midwatch.audit.alerts.bell import Bell
from midwatch.audit.alerts.state import Sent, State, Waiting, read_state
from midwatch.audit.alerts.target import (
    TIMEOUT_S,
    Target,
    TargetAwayError,
    TargetError,
    TargetRefusedError,
)
from midwatch.audit.alerts.targets import targets_of

__all__ = [
    "TIMEOUT_S",
    "Alert",
    "Bell",
    "Message",
    "Sent",
    "State",
    "Target",
    "TargetAwayError",
    "TargetError",
    "TargetRefusedError",
    "Waiting",
    "body",
    "read_state",
    "subject",
    "targets_of",
]
