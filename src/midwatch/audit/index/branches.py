"""Which branch counts up to where, and what goes when a journal is gone. All inside a transaction."""

from __future__ import annotations

import sqlite3
from typing import Final

from midwatch.audit.index.schema import NEVER

_OF_BRANCH: Final = "WHERE series IN (SELECT id FROM series WHERE rank = ?) AND branch = ?"
"""By the primary key's prefix, of which a branch alone is none."""


def settle_branches(db: sqlite3.Connection) -> None:
    """Say of each branch where a later one took over. Those of one attempt and part (its ranks) leave each other be.

    Looks at every branch: once a transaction, and not once an attempt.
    """
    rows = db.execute("SELECT id, attempt, part, start, stop FROM branch ORDER BY attempt DESC, part DESC").fetchall()
    changed: list[tuple[int, int]] = []
    later = lowest = NEVER
    place: tuple[int, int] | None = None
    for branch, attempt, part, start, stop in rows:
        if (attempt, part) != place:
            later, place = lowest, (attempt, part)
        lowest = min(lowest, start)
        if stop != later:
            changed.append((later, branch))
    db.executemany("UPDATE branch SET stop = ? WHERE id = ?", changed)


def forget_source(db: sqlite3.Connection, name: str) -> None:
    """Remove what a journal had said. Branches are to be settled afterwards."""
    row = db.execute("SELECT id, rank FROM source WHERE name = ?", (name,)).fetchone()
    if row is None:
        return  # another process has just done so
    source, rank = row
    for (branch,) in db.execute("SELECT id FROM branch WHERE source = ?", (source,)).fetchall():
        db.execute(f"DELETE FROM point {_OF_BRANCH}", (rank, branch))
        db.execute(f"DELETE FROM block {_OF_BRANCH}", (rank, branch))
        db.execute("DELETE FROM moment WHERE branch = ?", (branch,))
    db.execute("DELETE FROM branch WHERE source = ?", (source,))
    db.execute("DELETE FROM source WHERE id = ?", (source,))
