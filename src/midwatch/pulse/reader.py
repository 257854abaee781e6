"""The agent's side of the pulse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from midwatch.pulse.layout import (
    CONTROL,
    CONTROL_AT,
    COUNT,
    DIGEST_BYTES,
    EMPTY_SLOT,
    GROUP_BYTES,
    GROUPS_AT,
    HEAD,
    HEAD_AT,
    MAX_GROUPS,
    NO_STEP,
    OFTEN,
    OFTEN_AT,
    PHASES,
    POSITION_AT,
    POSITION_BYTES,
    SELDOM,
    SELDOM_AT,
    STATES,
    TAIL_AT,
    Flag,
    GroupCounts,
    Slot,
)
from midwatch.pulse.slotfile import SlotFile

_TRIES: Final = 64
"""A writer needs about a microsecond between two consistent states; only one frozen in that window fails 64 times."""


class PulseReader:
    """Reads slots and sets flags. Never returns torn data: a slot caught mid-write yields its last whole copy."""

    def __init__(self, path: str | Path, *, file: SlotFile | None = None) -> None:
        self._file = file or SlotFile.open(Path(path))
        self._map = self._file.mapping
        self._last: dict[int, Slot] = {}

    @property
    def slots(self) -> int:
        return self._file.slots

    def read(self, local_rank: int) -> Slot:
        """The rank's state; works also when the rank is stopped or dead."""
        base = self._file.offset(local_rank)
        for _ in range(_TRIES):
            image = self._snapshot(base)
            if image is not None and image == self._snapshot(base):
                slot = self._last[local_rank] = _decode(image, self._flags(base))
                return slot
        return self._last.get(local_rank, EMPTY_SLOT)._replace(flags=self._flags(base))

    def counts(self, local_rank: int) -> tuple[GroupCounts, ...]:
        """What the rank counted of its process groups; empty where it counts nothing, or was caught in the act."""
        base = self._file.offset(local_rank)
        start, size = base + GROUPS_AT, MAX_GROUPS * GROUP_BYTES
        if not any(self._map[start : start + DIGEST_BYTES]):
            return ()
        for _ in range(_TRIES):
            tail = HEAD.unpack_from(self._map, base + TAIL_AT)[0]
            image = self._map[start : start + size]
            head = HEAD.unpack_from(self._map, base + HEAD_AT)[0]
            if head == tail and image == self._map[start : start + size]:
                return tuple(_groups(image))
        return ()

    def position(self, local_rank: int) -> str:
        """What the rank last said it was reading."""
        at = self._file.offset(local_rank) + POSITION_AT
        return self._map[at : at + POSITION_BYTES].rstrip(b"\0").decode(errors="replace")

    def set_flag(self, local_rank: int, flag: Flag) -> None:
        self._put(local_rank, lambda flags: flags | flag)

    def clear_flag(self, local_rank: int, flag: Flag) -> None:
        self._put(local_rank, lambda flags: flags & ~flag)

    def close(self) -> None:
        self._file.close()

    def _snapshot(self, base: int) -> bytes | None:
        tail = HEAD.unpack_from(self._map, base + TAIL_AT)[0]
        image = self._map[base + SELDOM_AT : base + TAIL_AT]
        head = HEAD.unpack_from(self._map, base + HEAD_AT)[0]
        return image if head == tail else None

    def _flags(self, base: int) -> Flag:
        return Flag(CONTROL.unpack_from(self._map, base + CONTROL_AT)[0])

    def _put(self, local_rank: int, change: Callable[[Flag], Flag]) -> None:
        base = self._file.offset(local_rank)
        CONTROL.pack_into(self._map, base + CONTROL_AT, int(change(self._flags(base))))


def _decode(image: bytes, flags: Flag) -> Slot:
    resumed_step, verified, has_resumed, digest, config_hash, custom = SELDOM.unpack_from(image, 0)
    often = OFTEN.unpack_from(image + bytes(8), OFTEN_AT - SELDOM_AT)
    step, beats, done, beat_ns, phase_ns, long_ns, pid, attempt, phase, state, _ = often
    # A rank that wrote over its memory must not take the agent with it.
    label = PHASES[phase] if phase < len(PHASES) else "step"
    name = custom.rstrip(b"\0").decode(errors="replace")
    return Slot(
        pid=pid,
        attempt=attempt,
        state=STATES[state] if state < len(STATES) else "running",
        step=_step(step) if beats else None,
        beats=beats,
        steps_done=done,
        beat_ns=beat_ns,
        phase=f"custom:{name}" if label == "custom" and name else label,
        phase_ns=phase_ns,
        long_ns=long_ns,
        has_resumed=bool(has_resumed),
        resumed_step=_step(resumed_step) if has_resumed else None,
        digest=_hex(digest),
        config_hash=_hex(config_hash),
        verified_step=_step(verified) if state else None,
        flags=flags,
    )


def _groups(image: bytes) -> Iterator[GroupCounts]:
    for at in range(0, len(image), GROUP_BYTES):
        digest = image[at : at + DIGEST_BYTES]
        if any(digest):
            counts = dict(COUNT.iter_unpack(image[at + DIGEST_BYTES : at + GROUP_BYTES]))
            counts.pop(NO_STEP, None)
            yield GroupCounts(digest.hex(), tuple(sorted(counts.items())))


def _step(value: int) -> int | None:
    return None if value == NO_STEP else value


def _hex(value: bytes) -> str:
    return value.hex() if any(value) else ""
