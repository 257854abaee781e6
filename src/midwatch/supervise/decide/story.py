"""The bounded story: which events came, what they changed, what was told to do. Carried by every internal error."""

from __future__ import annotations

from collections import deque

import msgspec

from midwatch.supervise.decide.model import State


class Chapter(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the story."""

    number: int
    now_ns: int
    cause: str
    event: str
    states: tuple[State, ...]
    """The states passed through; one entry when nothing changed."""
    instructions: tuple[str, ...]
    note: str = ""
    """Why an event was set aside, where it was."""

    def __str__(self) -> str:
        told = f" => {', '.join(self.instructions)}" if self.instructions else ""
        note = f" ({self.note})" if self.note else ""
        states = " -> ".join(self.states)
        return f"#{self.number} {self.now_ns / 1e9:.3f} s {self.event} [{self.cause}] {states}{told}{note}"


class InvalidTransition(RuntimeError):  # noqa: N818  It says what was invalid; callers let it pass.
    """The core tried a step its own table forbids: a bug of ours. ``story`` says how it came to it."""

    def __init__(self, start: State, end: State, story: tuple[Chapter, ...]) -> None:
        lines = "\n  ".join(str(chapter) for chapter in story[-20:])
        super().__init__(f"no transition from {start} to {end}; what came before:\n  {lines}")
        self.start = start
        self.end = end
        self.story = story


class Story:
    """The last ``length`` chapters."""

    def __init__(self, length: int) -> None:
        self._chapters: deque[Chapter] = deque(maxlen=length)
        self._count = 0

    def add(
        self,
        event: str,
        *,
        now_ns: int,
        cause: str,
        states: tuple[State, ...],
        instructions: tuple[str, ...],
        note: str,
    ) -> None:
        """Append a chapter; the oldest one gives way."""
        self._count += 1
        self._chapters.append(
            Chapter(
                number=self._count,
                now_ns=now_ns,
                cause=cause,
                event=event,
                states=states,
                instructions=instructions,
                note=note,
            )
        )

    def tell(self, cause: str = "") -> tuple[Chapter, ...]:
        """All remembered chapters, or those of one cause."""
        return tuple(c for c in self._chapters if not cause or c.cause == cause)
