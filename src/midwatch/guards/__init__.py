"""Watching the numbers of training: pure detectors over one step's values, and the circuit breaker that acts on them.

Nothing here needs PyTorch, reads a clock or touches a file, so that ``midwatch triage`` runs the same rules over a
recorded curve as training does.
"""

from midwatch.guards.breaker import Breaker
from midwatch.guards.breaker_memory import Memory, Trip
from midwatch.guards.breaker_messages import (
    Act,
    BreakerEvent,
    ClearSuspect,
    Decision,
    End,
    GoBack,
    GoOn,
    Instruction,
    MarkSuspect,
    Moved,
    Pause,
    Resumed,
    Say,
    State,
    StepJudged,
    Ticked,
    WakeAt,
    judged,
)
from midwatch.guards.finding import TIERS, Finding, Judgement, Kind, Sample, Tier, worst
from midwatch.guards.guards import START_STEPS, Guards
from midwatch.guards.logged import LR_NAMES, NUMBERS, by_group, sample_of
from midwatch.guards.replicas import Vote, vote
from midwatch.guards.schedule import Schedule

__all__ = [
    "LR_NAMES",
    "NUMBERS",
    "START_STEPS",
    "TIERS",
    "Act",
    "Breaker",
    "BreakerEvent",
    "ClearSuspect",
    "Decision",
    "End",
    "Finding",
    "GoBack",
    "GoOn",
    "Guards",
    "Instruction",
    "Judgement",
    "Kind",
    "MarkSuspect",
    "Memory",
    "Moved",
    "Pause",
    "Resumed",
    "Sample",
    "Say",
    "Schedule",
    "State",
    "StepJudged",
    "Ticked",
    "Tier",
    "Trip",
    "Vote",
    "WakeAt",
    "by_group",
    "judged",
    "sample_of",
    "vote",
    "worst",
]
