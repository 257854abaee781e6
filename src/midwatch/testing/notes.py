"""A recorder for tests: it keeps what it is told, to be asked afterwards."""

from __future__ import annotations

from typing import Any


class Notes:
    """Remembers every event with its data; the step is among them where there was one."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def record(self, event: str, *, step: int | None = None, cause: str = "", **data: Any) -> None:
        """See ``core.Recorder``."""
        del cause
        self.events.append((event, data if step is None else {"step": step, **data}))

    def of(self, event: str) -> list[dict[str, Any]]:
        """What was told of one kind of event, oldest first."""
        return [data for name, data in self.events if name == event]
