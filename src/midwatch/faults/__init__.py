"""From signals to a verdict: class, culprit, grade, action. Pure: no I/O, no clock, no environment.

    verdict = judge(evidence)

The stages are kept apart: ``read`` (each rank's own facts), ``locate`` and ``hang`` (whose fault), ``fingerprint`` (the
same failure again?), ``grade`` (how wide, what to do). ``classes.toml`` is the only list of fault classes.
"""

from midwatch.faults.fingerprint import fingerprint
from midwatch.faults.flight import MAX_FLIGHT_BYTES, FlightError, read_flight
from midwatch.faults.frames import is_fetching
from midwatch.faults.grade import Widths
from midwatch.faults.hang import has_moved_on
from midwatch.faults.table import CLASSES, FaultClass, class_of
from midwatch.faults.topology import shared_domain
from midwatch.faults.types import (
    Action,
    CollectiveCall,
    CollectiveCount,
    Confidence,
    Evidence,
    Frame,
    Grade,
    ProcState,
    RankEvidence,
    ResumeReport,
    Suspect,
    Trigger,
    Verdict,
)
from midwatch.faults.verdict import judge

__all__ = [
    "CLASSES",
    "MAX_FLIGHT_BYTES",
    "Action",
    "CollectiveCall",
    "CollectiveCount",
    "Confidence",
    "Evidence",
    "FaultClass",
    "FlightError",
    "Frame",
    "Grade",
    "ProcState",
    "RankEvidence",
    "ResumeReport",
    "Suspect",
    "Trigger",
    "Verdict",
    "Widths",
    "class_of",
    "fingerprint",
    "has_moved_on",
    "is_fetching",
    "judge",
    "read_flight",
    "shared_domain",
]
