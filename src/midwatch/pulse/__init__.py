"""The pulse: a shared-memory slot per rank that says how far it is. Standard library only, no thread in the trainer."""

from midwatch.pulse.deadline import KEPT, DeadlineLearner
from midwatch.pulse.layout import MARK_EVERY, MAX_GROUPS, PHASES, STATES, Flag, GroupCounts, Slot
from midwatch.pulse.reader import PulseReader
from midwatch.pulse.slotfile import SlotFile
from midwatch.pulse.writer import NullPulse, PulseWriter, writer_from_env

__all__ = [
    "KEPT",
    "MARK_EVERY",
    "MAX_GROUPS",
    "PHASES",
    "STATES",
    "DeadlineLearner",
    "Flag",
    "GroupCounts",
    "NullPulse",
    "PulseReader",
    "PulseWriter",
    "Slot",
    "SlotFile",
    "writer_from_env",
]
