"""The code of this attempt: what changed since its checkpoint was written, and what is imported while it runs."""

from __future__ import annotations

from midwatch.checkpoint import Checkpointer, ResumePoint
from midwatch.train.resume_notes import ResumeNotes
from midwatch.train.session import Session


class CodeWatch:
    """Rank 0's; on the others it sees nothing. Returns lines for people."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._checkpointer: Checkpointer | None = None
        self._notes: ResumeNotes | None = None

    def open(self, session: Session, checkpointer: Checkpointer) -> None:
        """The run is open, and every checkpoint says from now on which code there was."""
        self._session, self._checkpointer = session, checkpointer
        checkpointer.provenance = session.provenance.provenance if session.provenance is not None else None

    def compare(self, point: ResumePoint | None) -> list[str]:
        """What is not as it was when the checkpoint was written."""
        session = self._session
        if session is None or session.provenance is None or point is None:
            return []
        self._notes = ResumeNotes(point, session.recorder)
        return self._notes.compare(session.provenance.provenance, session.provenance.code)

    def look(self, step: int) -> list[str]:
        """Modules are imported at any time; every checkpoint says which there were when it was written."""
        if self._session is None or self._session.provenance is None or self._checkpointer is None:
            return []
        keeper = self._session.provenance
        new = keeper.look_again(step, self._session.recorder)
        self._checkpointer.provenance = keeper.provenance
        return self._notes.late_code(new, keeper.code, step) if self._notes is not None else []
