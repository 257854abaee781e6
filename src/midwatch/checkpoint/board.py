"""How the writers of one save meet: small files in a shared folder, no sockets and no collectives.

Marks are not durable and need not be: a board serves one save of one attempt, and after a crash nobody reads it.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from midwatch.core import CheckpointError, MidwatchError
from midwatch.storage import canonical_json, ops

FIRST_PAUSE_S = 0.002
LONGEST_PAUSE_S = 0.05
"""Between two looks: short enough not to be felt in a save, long enough to cost a file server nothing."""

BOARD_FOLDER = ".board"


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The first rank's failure, posted so that the others need not wait for their deadline."""

    rank: int
    code: str
    message: str


class RankFailedError(CheckpointError):
    """Another rank gave up this save."""


class Board:
    """The marks of one tier of one save."""

    def __init__(self, root: Path, name: str, serial: int, tier: str) -> None:
        self.folder = root / BOARD_FOLDER / f"{name}.{serial}"
        self._tier = tier

    def open(self) -> None:
        """Create the folder; every rank may."""
        ops.make_dirs(self.folder.parent.parent)
        ops.mkdir(self.folder.parent)
        ops.mkdir(self.folder)

    def _path(self, mark: str) -> Path:
        return self.folder / f"{self._tier}.{mark}"

    def post(self, mark: str, data: bytes = b"") -> None:
        """Show a mark: complete or absent, the last one wins."""
        path = self._path(mark)
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
        ops.write_file(temporary, data, is_synced=False)
        ops.rename(temporary, path)

    def read(self, mark: str) -> bytes | None:
        """The mark's data; None while it is not there."""
        try:
            return self._path(mark).read_bytes()
        except FileNotFoundError:
            return None

    def fail(self, rank: int, error: MidwatchError) -> None:
        """Tell the others, as well as a disk that may be the cause of the failure allows."""
        failure = Failure(rank=rank, code=error.code, message=error.message)
        try:
            if self.failure() is None:
                self.open()
                self.post("failed", canonical_json(failure))
        except OSError:
            pass  # the others then run into their deadline, which is what it is for

    def failure(self) -> Failure | None:
        """The failure that somebody posted."""
        data = self.read("failed")
        return None if data is None else msgspec.json.decode(data, type=Failure)

    def wait(self, marks: Sequence[str], *, timeout_s: float, doing: str) -> None:
        """Until all ``marks`` are there.

        Raises:
            RankFailedError: CK301 when a rank posted a failure.
            CheckpointError: CK303 naming the marks still missing at the deadline.

        Blocking: ``timeout_s``, plus one listing of the folder.
        """
        deadline = time.monotonic() + timeout_s
        pause_s = FIRST_PAUSE_S
        while missing := self._missing(marks):
            failure = self.failure()
            if failure is not None:
                raise RankFailedError(
                    "CK301",
                    f"rank {failure.rank} failed: [{failure.code}] {failure.message}",
                    rank=failure.rank,
                    origin=failure.code,
                )
            if time.monotonic() >= deadline:
                raise CheckpointError(
                    "CK303", f"{doing}: after {timeout_s:g} s still missing: {_listed(missing)}", missing=missing[:64]
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)

    def _missing(self, marks: Sequence[str]) -> list[str]:
        if len(marks) <= 2:  # most waits of most ranks: two look-ups are cheaper for a file server than a listing
            return [mark for mark in marks if not self._path(mark).exists()]
        try:
            present = {path.name for path in self.folder.iterdir()}
        except FileNotFoundError:
            present = set[str]()
        return [mark for mark in marks if f"{self._tier}.{mark}" not in present]


def fail_save(root: Path, name: str, serial: int, *, rank: int, error: MidwatchError) -> None:
    """Tell the other ranks that this one takes no part in a save (its writer died, its state cannot be captured)."""
    for tier in ("local", "shared"):
        Board(root, name, serial, tier).fail(rank, error)


def rank_mark(kind: str, rank: int) -> str:
    """``receipt.rank-00003``."""
    return f"{kind}.rank-{rank:05d}"


def _listed(marks: Sequence[str], most: int = 16) -> str:
    names = [mark.partition(".")[2].replace("-", " ") or mark for mark in marks[:most]]
    return ", ".join(names) + (f" and {len(marks) - most} more" if len(marks) > most else "")
