"""The tables of an index, and whether a file is one of ours and whole.

A point's place is (series, branch, step). A series is a metric of a rank; a branch is what one attempt recorded from
its start on; ``stop`` is where a later branch took over: a branch's steps from ``start`` to ``stop`` are live.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

APPLICATION_ID: Final = 0x4D49444D
VERSION: Final = 1

NEVER: Final = 2**63 - 1
"""The ``stop`` of a branch that nothing took over."""

BUSY_S: Final = 30.0
"""How long to wait while another process writes: its transactions are of a few megabytes, about a second at most."""

_ABOUT: Final = "CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID"

_SOURCE: Final = """CREATE TABLE source (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    attempt INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    imported TEXT NOT NULL DEFAULT '',
    position INTEGER NOT NULL DEFAULT 0,
    size_bytes INTEGER NOT NULL DEFAULT -1,
    mtime_ns INTEGER NOT NULL DEFAULT -1,
    proof TEXT NOT NULL DEFAULT '',
    part INTEGER NOT NULL DEFAULT -1,
    damaged INTEGER NOT NULL DEFAULT 0
)"""
"""One journal file, and how far it was read."""

_BRANCH: Final = """CREATE TABLE branch (
    id INTEGER PRIMARY KEY,
    source INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    part INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    start INTEGER NOT NULL,
    is_stated INTEGER NOT NULL,
    stop INTEGER NOT NULL,
    UNIQUE (source, part)
)"""
_BY_RANK: Final = "CREATE INDEX branch_by_rank ON branch (rank, attempt, part)"

_SERIES: Final = """CREATE TABLE series (
    id INTEGER PRIMARY KEY,
    metric TEXT NOT NULL,
    rank INTEGER NOT NULL,
    UNIQUE (metric, rank)
)"""

_POINT: Final = """CREATE TABLE point (
    series INTEGER NOT NULL,
    branch INTEGER NOT NULL,
    step INTEGER NOT NULL,
    value REAL,
    PRIMARY KEY (series, branch, step)
) WITHOUT ROWID"""
"""NULL is NaN: SQLite has no other. Infinity it has."""

_BLOCK: Final = """CREATE TABLE block (
    series INTEGER NOT NULL,
    branch INTEGER NOT NULL,
    width INTEGER NOT NULL,
    begin INTEGER NOT NULL,
    first INTEGER NOT NULL,
    last INTEGER NOT NULL,
    points INTEGER NOT NULL,
    nonfinite INTEGER NOT NULL,
    low REAL,
    low_step INTEGER NOT NULL,
    high REAL,
    high_step INTEGER NOT NULL,
    mean REAL,
    PRIMARY KEY (series, branch, width, begin)
) WITHOUT ROWID"""

_MOMENT: Final = """CREATE TABLE moment (
    branch INTEGER NOT NULL,
    step INTEGER NOT NULL,
    ts_ns INTEGER NOT NULL,
    PRIMARY KEY (branch, step)
) WITHOUT ROWID"""
"""Every record, and when it was written; 0 where nothing tells."""

_TABLES: Final = (_ABOUT, _SOURCE, _BRANCH, _BY_RANK, _SERIES, _POINT, _BLOCK, _MOMENT)


def connect(path: Path) -> sqlite3.Connection:
    """An open database in WAL mode; transactions are begun by hand.

    Raises:
        sqlite3.Error: It is no database, or damaged so that this shows at once.
    """
    db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        # A kill loses nothing; after a power cut the last transactions may be missing, and are read again.
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA cache_size = -32768")
    except BaseException:
        db.close()
        raise
    return db


def create(db: sqlite3.Connection, run_dir: str) -> None:
    """Make the tables, unless another process has just done so."""
    db.execute("BEGIN IMMEDIATE")
    try:
        if db.execute("PRAGMA user_version").fetchone()[0] == 0 and not _names(db):
            for table in _TABLES:
                db.execute(table)
            db.execute("INSERT INTO about VALUES ('run_dir', ?)", (run_dir,))
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {VERSION}")
        db.execute("COMMIT")
    except BaseException:
        roll_back(db)
        raise


def why_not_ours(db: sqlite3.Connection, run_dir: str) -> str:
    """Why this file must not be believed; empty if it may be. Reads the whole file: 5 ms for each megabyte.

    Raises:
        sqlite3.Error: Damaged.
    """
    if db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        return "it is another program's"
    if (version := db.execute("PRAGMA user_version").fetchone()[0]) != VERSION:
        return f"it has format {version}"
    if _names(db) != _expected():
        return "its tables are not ours"
    row = db.execute("SELECT value FROM about WHERE name = 'run_dir'").fetchone()
    if row is None or row[0] != run_dir:
        return "it is another run's"
    found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    return "" if found == "ok" else f"it is damaged ({found})"


def roll_back(db: sqlite3.Connection) -> None:
    """End a transaction that failed, if the failure has not ended it."""
    if db.in_transaction:
        db.execute("ROLLBACK")


def _names(db: sqlite3.Connection) -> set[str]:
    rows = db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    return {row[0] for row in rows}


def _expected() -> set[str]:
    return set(_TABLES)
