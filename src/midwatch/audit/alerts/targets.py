"""The targets that a configuration names."""

from __future__ import annotations

from midwatch.audit.alerts.child import Apprise, Command
from midwatch.audit.alerts.hooks import PagerDuty, Slack, Webhook
from midwatch.audit.alerts.mail import Mail
from midwatch.audit.alerts.target import Target
from midwatch.config import AlertsConfig


def targets_of(config: AlertsConfig) -> list[Target]:
    """In the order of the configuration; nothing is connected, and no secret is read yet."""
    to = config.to
    found: list[Target] = [
        *(PagerDuty(number, key, to.pagerduty_url) for number, key in enumerate(to.pagerduty, 1)),
        *(Slack(number, address) for number, address in enumerate(to.slack, 1)),
        *(Webhook(number, address) for number, address in enumerate(to.webhook, 1)),
        *(Apprise(number, file) for number, file in enumerate(to.apprise, 1)),
    ]
    found += [Mail(to.email, config.smtp)] if to.email else []
    found += [Command(to.command)] if to.command else []
    return found
