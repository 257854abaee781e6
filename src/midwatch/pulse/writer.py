"""The rank's side of the pulse: a microsecond per step, no thread, no system call."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from midwatch.core import LONG_PHASES
from midwatch.pulse.layout import (
    CONTROL,
    CONTROL_AT,
    COUNT,
    DIGEST_BYTES,
    GROUP_BYTES,
    GROUPS_AT,
    HEAD,
    HEAD_AT,
    MARK_EVERY,
    MARKS,
    MAX_GROUPS,
    NO_STEP,
    OFTEN,
    OFTEN_AT,
    PHASES,
    POSITION_AT,
    POSITION_BYTES,
    RING,
    SELDOM,
    SELDOM_AT,
    Flag,
)
from midwatch.pulse.slotfile import SlotFile

_PHASE_ID: Final = {name: number for number, name in enumerate(PHASES)}
_STEP: Final = _PHASE_ID["step"]
_ALL_FLAGS: Final = int(sum(Flag))
_FLAGS: Final = tuple(map(Flag, range(_ALL_FLAGS + 1)))
"""Made once: to make one of a number takes longer than to read the number."""
_INIT_STATE, _RUNNING, _FINISHED = 1, 2, 3


class PulseWriter:
    """Tells the agent of this node how far the rank is.

    Not thread-safe: call it from the training thread only. After ``begin`` silence is watched.
    """

    def __init__(self, path: str | Path, local_rank: int) -> None:
        self._file = SlotFile.open(Path(path))
        self._map = self._file.mapping
        self._base = self._file.offset(local_rank)
        self._often_at = self._base + OFTEN_AT
        self._seq: int = HEAD.unpack_from(self._map, self._base + HEAD_AT)[0]
        self._pid = self._attempt = self._state = 0
        self._step, self._beats, self._beat_ns, self._long_ns = NO_STEP, 0, 0, 0
        self._phase, self._phase_ns = 0, 0
        self._stack: list[tuple[int, str]] = []
        self._resumed: tuple[int, int, bytes, bytes] = (NO_STEP, 0, bytes(8), bytes(8))
        self._verified = NO_STEP

    def begin(self, pid: int, attempt: int) -> None:
        """Attach: from now on this rank promises to beat."""
        self._pid, self._attempt, self._state = pid, attempt, _INIT_STATE
        self._phase_ns = time.monotonic_ns()
        self._write_all()

    def beat(self, step: int, counts: Sequence[int] = ()) -> None:
        """``step`` begins now, so the one before it is done.

        Args:
            step: Which.
            counts: Collectives issued so far in each group, in the order given to ``groups``.
        """
        now = time.monotonic_ns()
        self._step, self._beat_ns, self._phase_ns = step, now, now
        beats = self._beats = self._beats + 1
        self._state = _RUNNING
        if not self._stack:
            self._phase = _STEP
        seq = self._seq = self._seq + 1
        buffer, base = self._map, self._base
        HEAD.pack_into(buffer, base, seq)
        if counts:
            self._count(step, counts)
        OFTEN.pack_into(
            buffer,
            self._often_at,
            step,
            beats,
            beats - 1,
            now,
            now,
            self._long_ns,
            self._pid,
            self._attempt,
            self._phase,
            _RUNNING,
            seq,
        )

    def groups(self, digests: Sequence[str]) -> None:
        """Which process groups are counted from now on; what was counted before is forgotten.

        Args:
            digests: 16 hex digits each, the same on every member; at most ``MAX_GROUPS`` are kept.
        """
        start, size = self._base + GROUPS_AT, MAX_GROUPS * GROUP_BYTES
        image = bytearray(size)
        nothing = COUNT.pack(NO_STEP, 0) * (RING + MARKS)
        for number, digest in enumerate(digests[:MAX_GROUPS]):
            at = number * GROUP_BYTES
            image[at : at + GROUP_BYTES] = bytes.fromhex(digest) + nothing
        seq = self._seq = self._seq + 1
        HEAD.pack_into(self._map, self._base, seq)
        self._map[start : start + size] = bytes(image)
        self._write_often(seq)

    def position(self, text: str) -> None:
        """What is read now, for people; cut to 48 bytes."""
        data = text.encode(errors="replace")[:POSITION_BYTES].ljust(POSITION_BYTES, b"\0")
        at = self._base + POSITION_AT
        self._map[at : at + POSITION_BYTES] = data

    def _count(self, step: int, counts: Sequence[int]) -> None:
        at = self._base + GROUPS_AT + DIGEST_BYTES
        for count in counts[:MAX_GROUPS]:
            COUNT.pack_into(self._map, at + step % RING * COUNT.size, step, count)
            if step % MARK_EVERY == 0:
                place = RING + step // MARK_EVERY % MARKS
                COUNT.pack_into(self._map, at + place * COUNT.size, step, count)
            at += GROUP_BYTES

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Name what the rank does meanwhile; nests. Unknown names count as ``custom:NAME``.

        Inside a long phase (``core.LONG_PHASES``) the outermost long one is what is reported, whatever is nested in it.
        """
        label, _, custom = name.partition(":")
        if label not in _PHASE_ID:
            label, custom = "custom", name
        is_long = label in LONG_PHASES
        entered_ns = time.monotonic_ns()
        is_outermost_long = is_long and not any(PHASES[number] in LONG_PHASES for number, _ in self._stack)
        self._stack.append((_PHASE_ID[label], custom))
        self._turn(entered_ns)
        try:
            yield
        finally:
            self._stack.pop()
            now = time.monotonic_ns()
            if is_outermost_long:
                self._long_ns += now - entered_ns
            self._turn(now)

    def resumed(self, step: int | None, digest: str, config_hash: str) -> None:
        """Say what was resumed from: None and an empty digest for a fresh start; both hashes are 16 hex digits."""
        self._resumed = (NO_STEP if step is None else step, 1, _half(digest), _half(config_hash))
        self._write_all()

    def checkpoint_verified(self, step: int) -> None:
        """A checkpoint of this step is durable and was read back."""
        self._verified = step
        self._write_all()

    def finished(self) -> None:
        """The last step is done: an exit with code 0 is now expected."""
        self._state = _FINISHED
        self._phase_ns = time.monotonic_ns()
        self._write_all()

    def flags(self) -> Flag:
        """What the agent asks; costs less than a microsecond, look between steps."""
        return _FLAGS[CONTROL.unpack_from(self._map, self._base + CONTROL_AT)[0] & _ALL_FLAGS]

    def close(self) -> None:
        self._file.close()

    def _turn(self, now_ns: int) -> None:
        stack = self._stack
        idle = 0 if self._state < _RUNNING else _STEP
        self._phase = next((n for n, _ in stack if PHASES[n] in LONG_PHASES), stack[-1][0] if stack else idle)
        self._phase_ns = now_ns
        self._write_all()

    def _write_all(self) -> None:
        step, has_resumed, digest, config_hash = self._resumed
        custom = next((name for number, name in self._stack if PHASES[number] == "custom"), "")
        seq = self._seq = self._seq + 1
        HEAD.pack_into(self._map, self._base, seq)
        label = custom.encode(errors="replace")[:24]
        SELDOM.pack_into(
            self._map, self._base + SELDOM_AT, step, self._verified, has_resumed, digest, config_hash, label
        )
        self._write_often(seq)

    def _write_often(self, seq: int) -> None:
        done = self._beats if self._state == _FINISHED else max(0, self._beats - 1)
        OFTEN.pack_into(
            self._map,
            self._often_at,
            self._step,
            self._beats,
            done,
            self._beat_ns,
            self._phase_ns,
            self._long_ns,
            self._pid,
            self._attempt,
            self._phase,
            self._state,
            seq,
        )


class NullPulse:
    """The same calls with nobody listening: a script run without ``midwatch run``."""

    def begin(self, pid: int, attempt: int) -> None:
        pass

    def beat(self, step: int, counts: Sequence[int] = ()) -> None:
        pass

    def groups(self, digests: Sequence[str]) -> None:
        pass

    def position(self, text: str) -> None:
        pass

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        yield

    def resumed(self, step: int | None, digest: str, config_hash: str) -> None:
        pass

    def checkpoint_verified(self, step: int) -> None:
        pass

    def finished(self) -> None:
        pass

    def flags(self) -> Flag:
        return _FLAGS[0]

    def close(self) -> None:
        pass


def writer_from_env() -> PulseWriter | NullPulse:
    """The writer for this rank's slot, or ``NullPulse`` when no agent started this process.

    Raises:
        StorageError: ST102, ST104 the slot file that the environment names cannot be used.
    """
    path = os.environ.get("MIDWATCH_PULSE", "")
    if not path:
        return NullPulse()
    # Under another launcher each rank has a slot file of its own, whatever its local rank is.
    return PulseWriter(path, int(os.environ.get("MIDWATCH_SLOT") or os.environ.get("LOCAL_RANK", "0")))


def _half(digits: str) -> bytes:
    """The first 16 hex digits as 8 bytes; short or empty strings are padded with zeros."""
    return bytes.fromhex((digits[:16]).ljust(16, "0"))
