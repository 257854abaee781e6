"""The bytes of a slot file: one 64-byte header, then one 1024-byte slot per local rank.

A slot has two parts with one writer each. The rank writes everything but the control word at 192, which is the agent's.
Behind it lie what the rank reads (a text) and, for a few process groups, how many collectives it had issued when it
began each of the newest steps.

The rank half is a sequence lock without a lock: ``head`` is raised first, the fields follow, ``tail`` is raised last.
A reader takes ``tail``, then the fields, then ``head``, and keeps the copy only if both are equal and a second copy is
the same. That holds although ``struct.pack_into`` clears its target before it fills it in: between the clearing and the
last store ``tail`` is not what ``head`` is. All words are native and 8-byte aligned, so each is stored whole.
"""

from __future__ import annotations

import enum
import struct
from typing import Final, Literal, NamedTuple

MAGIC: Final = b"MWPULSE2"
HEADER: Final = struct.Struct("@8sIIQQ")
"""magic, slot size, number of slots, attempt, creation time (monotonic ns)."""
HEADER_BYTES: Final = 64
SLOT_BYTES: Final = 1024

HEAD: Final = struct.Struct("@Q")
HEAD_AT: Final = 0
SELDOM: Final = struct.Struct("@qqQ8s8s24s")
"""resumed step, verified step, has-resumed bit set, checkpoint digest, config hash, custom phase name."""
SELDOM_AT: Final = 8
OFTEN: Final = struct.Struct("@qQQQQQIIIIQ")
"""step, beats, steps done, beat ns, phase ns, ns in long phases, pid, attempt, phase, state, and last ``tail``."""
OFTEN_AT: Final = SELDOM_AT + SELDOM.size
TAIL_AT: Final = OFTEN_AT + OFTEN.size - 8
CONTROL: Final = struct.Struct("@Q")
CONTROL_AT: Final = 192
POSITION_AT: Final = 256
POSITION_BYTES: Final = 48
GROUPS_AT: Final = POSITION_AT + POSITION_BYTES
MAX_GROUPS: Final = 4
"""The default group and three more: enough for data, tensor and pipeline parallelism."""
DIGEST_BYTES: Final = 8
COUNT: Final = struct.Struct("@qQ")
"""step, collectives issued before it began."""
RING: Final = 8
"""Steps remembered: ranks in lockstep are never this far apart."""
MARK_EVERY: Final = 16
MARKS: Final = 2
"""The newest steps that are multiples of 16: ranks of other nodes, whose reports come once a second, meet there."""
GROUP_BYTES: Final = DIGEST_BYTES + (RING + MARKS) * COUNT.size

assert OFTEN_AT % 8 == 0
assert TAIL_AT % 8 == 0
assert TAIL_AT + 8 <= CONTROL_AT
assert GROUPS_AT + MAX_GROUPS * GROUP_BYTES <= SLOT_BYTES

State = Literal["new", "init", "running", "finished"]
STATES: Final[tuple[State, ...]] = ("new", "init", "running", "finished")

PHASES: Final = (
    "init",
    "data_wait",
    "forward_backward",
    "optimizer",
    "collective",
    "checkpoint_save",
    "checkpoint_load",
    "eval",
    "compile",
    "custom",
    "step",
)
"""``step`` is what a rank is in when it named no phase of its own."""
NO_STEP: Final = -1


class Flag(enum.IntFlag):
    """What the agent asks of a rank; looked at between steps."""

    GO = 1
    """Every rank resumed from the same point: train."""
    STOP = 2
    """Save at the next step boundary and end."""
    SAVE = 4
    """Save at the next step boundary and go on."""
    ABORT = 8
    """The attempt is over: end without saving."""


class Slot(NamedTuple):
    """One consistent copy of a rank's half of its slot, plus the control word."""

    pid: int
    attempt: int
    state: State
    step: int | None
    """The step that was begun last."""
    beats: int
    steps_done: int
    beat_ns: int
    """Monotonic time of the last beat; 0 before the first."""
    phase: str
    phase_ns: int
    """Monotonic time of the last sign of progress: a beat, a phase entered or left."""
    long_ns: int
    """Nanoseconds in long phases so far; a gap between two beats less its growth is the step's own time."""
    has_resumed: bool
    resumed_step: int | None
    digest: str
    config_hash: str
    verified_step: int | None
    flags: Flag

    @property
    def is_attached(self) -> bool:
        """The rank opened its slot: silence means something."""
        return self.state != "new"

    @property
    def is_finished(self) -> bool:
        return self.state == "finished"

    def phase_age_s(self, now_ns: int) -> float:
        """Seconds since the last sign of progress; ``now_ns`` is this host's monotonic clock."""
        return max(0, now_ns - self.phase_ns) / 1e9


class GroupCounts(NamedTuple):
    """One process group of one rank."""

    digest: str
    """The same on every member."""
    counts: tuple[tuple[int, int], ...]
    """(step, collectives issued before it began), by step."""


EMPTY_SLOT: Final = Slot(
    pid=0,
    attempt=0,
    state="new",
    step=None,
    beats=0,
    steps_done=0,
    beat_ns=0,
    phase="init",
    phase_ns=0,
    long_ns=0,
    has_resumed=False,
    resumed_step=None,
    digest="",
    config_hash="",
    verified_step=None,
    flags=Flag(0),
)
