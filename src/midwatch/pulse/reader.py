"""The agent's side of the pulse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from midwatch.pulse.layout import (
    CONTROL,
    CONTROL_AT,
    EMPTY_SLOT,
    HEAD,
    HEAD_AT,
    NO_STEP,
    OFTEN,
    OFTEN_AT,
    PHASES,
    SELDOM,
    SELDOM_AT,
    STATES,
    TAIL_AT,
    Flag,
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
    label = PHASES[phase]
    name = custom.rstrip(b"\0").decode(errors="replace")
    return Slot(
        pid=pid,
        attempt=attempt,
        state=STATES[state],
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


def _step(value: int) -> int | None:
    return None if value == NO_STEP else value


def _hex(value: bytes) -> str:
    return value.hex() if any(value) else ""
