"""The pulse: a shared-memory slot per rank that says how far it is. Standard library only, no thread in the trainer."""

from midwatch.pulse.deadline import DeadlineLearner
from midwatch.pulse.layout import PHASES, Flag, Slot
from midwatch.pulse.reader import PulseReader
from midwatch.pulse.slotfile import SlotFile
from midwatch.pulse.writer import NullPulse, PulseWriter, writer_from_env

__all__ = [
    "PHASES",
    "DeadlineLearner",
    "Flag",
    "NullPulse",
    "PulseReader",
    "PulseWriter",
    "Slot",
    "SlotFile",
    "writer_from_env",
]
