"""Explaining what went wrong with the numbers: evidence, ordered checks, a verdict. Works without PyTorch."""

from midwatch.triage.checks import Check
from midwatch.triage.facts import Facts, ScheduleFacts, read_facts
from midwatch.triage.of_run import replay_run
from midwatch.triage.replaying import Replayed, replay
from midwatch.triage.reporting import Report, Verdict, report

__all__ = [
    "Check",
    "Facts",
    "Replayed",
    "Report",
    "ScheduleFacts",
    "Verdict",
    "read_facts",
    "replay",
    "replay_run",
    "report",
]
