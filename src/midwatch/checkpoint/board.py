"""How the writers of one save meet: marks that each can post and all can wait for, no collectives.

Two kinds of board: small files in the shared folder (here), or the run's receipt store (``net_board``). Marks are not
durable and need not be: a board serves one save of one attempt, and after a crash nobody reads it.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from midwatch.core import CheckpointError, MidwatchError
from midwatch.storage import canonical_json, ops, read_regular

FIRST_PAUSE_S = 0.002
LONGEST_PAUSE_S = 0.05
"""Between two looks: short enough not to be felt in a save, long enough to cost a file server nothing."""

BOARD_FOLDER = ".board"
MAX_NAMED = 64
"""Missing marks that an error carries."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The first rank's failure, posted so that the others need not wait for their deadline."""

    rank: int
    code: str
    message: str


class RankFailedError(CheckpointError):
    """Another rank gave up this save."""

    @classmethod
    def of(cls, failure: Failure) -> RankFailedError:
        """CK301, naming who failed and why."""
        message = f"rank {failure.rank} failed: [{failure.code}] {failure.message}"
        return cls("CK301", message, rank=failure.rank, origin=failure.code)


def never() -> bool:
    """No other way to know."""
    return False


class Board(Protocol):
    """The marks of one tier of one save. Use it from one thread."""

    def open(self) -> None:
        """Make it ready; every rank may."""
        ...

    def post(self, mark: str, data: bytes = b"") -> None:
        """Show a mark: complete or absent, the last one wins."""
        ...

    def fail(self, rank: int, error: MidwatchError) -> bool:
        """Tell the others that this rank gives up; False when the cause of the failure, or another one, forbids it.

        Never raises.
        """
        ...

    def wait(
        self, marks: Sequence[str], *, timeout_s: float, doing: str, is_settled: Callable[[], bool] = never
    ) -> dict[str, bytes]:
        """Until all ``marks`` are there; returns their data.

        Args:
            is_settled: Another way to know, looked at when the board is gone or has lost its marks: True ends the wait
                with an empty answer.

        Raises:
            RankFailedError: CK301 when a rank posted a failure.
            CheckpointError: CK303 naming the marks still missing at the deadline.

        Blocking: ``timeout_s``, plus one look.
        """
        ...

    def close(self) -> None:
        """Done with this save."""
        ...


class FileBoard:
    """Marks as files: works wherever the ranks share the folder they write to."""

    def __init__(self, root: Path, name: str, serial: int, tier: str) -> None:
        self.folder = root / BOARD_FOLDER / f"{name}.{serial}"
        self._tier = tier

    def open(self) -> None:
        """Create the folder."""
        ops.make_dirs(self.folder.parent.parent)
        ops.mkdir(self.folder.parent)
        ops.mkdir(self.folder)

    def _path(self, mark: str) -> Path:
        return self.folder / f"{self._tier}.{mark}"

    def post(self, mark: str, data: bytes = b"") -> None:
        """Written aside and renamed."""
        path = self._path(mark)
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
        ops.write_file(temporary, data, is_synced=False)
        ops.rename(temporary, path)

    def fail(self, rank: int, error: MidwatchError) -> bool:
        """A disk that may be the cause of the failure may refuse; the others then run into their deadline."""
        failure = Failure(rank=rank, code=error.code, message=error.message)
        try:
            if self._failure() is None:
                self.open()
                self.post("failed", canonical_json(failure))
        except (OSError, msgspec.MsgspecError):
            return False
        return True

    def _failure(self) -> Failure | None:
        try:
            return msgspec.json.decode(read_regular(self._path("failed")), type=Failure)
        except FileNotFoundError:
            return None

    def wait(
        self, marks: Sequence[str], *, timeout_s: float, doing: str, is_settled: Callable[[], bool] = never
    ) -> dict[str, bytes]:
        """Looks again and again, at growing intervals; this board loses no marks."""
        del is_settled
        deadline = time.monotonic() + timeout_s
        pause_s = FIRST_PAUSE_S
        while missing := self._missing(marks):
            if (failure := self._failure()) is not None:
                raise RankFailedError.of(failure)
            if time.monotonic() >= deadline:
                raise late(doing, timeout_s, missing[:MAX_NAMED], len(missing))
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)
        return self._read(marks)

    def _missing(self, marks: Sequence[str]) -> list[str]:
        if len(marks) <= 2:  # most waits of most ranks: two look-ups are cheaper for a file server than a listing
            return [mark for mark in marks if not self._path(mark).exists()]
        try:
            present = {path.name for path in self.folder.iterdir()}
        except FileNotFoundError:
            present = set[str]()
        return [mark for mark in marks if f"{self._tier}.{mark}" not in present]

    def _read(self, marks: Sequence[str]) -> dict[str, bytes]:
        try:
            return {mark: read_regular(self._path(mark)) for mark in marks}
        except FileNotFoundError as error:
            raise CheckpointError("CK301", f"{self.folder.name}: the board was removed during the save") from error

    def close(self) -> None:
        """Nothing is held open."""


def late(doing: str, timeout_s: float, missing: Sequence[str], count: int) -> CheckpointError:
    """CK303: the deadline came before these marks."""
    text = f"{doing}: after {timeout_s:g} s still missing: {_listed(missing, count)}"
    return CheckpointError("CK303", text, missing=list(missing))


def rank_mark(kind: str, rank: int) -> str:
    """``receipt.rank-00003``."""
    return f"{kind}.rank-{rank:05d}"


def _listed(marks: Sequence[str], count: int, most: int = 16) -> str:
    names = [mark.partition(".")[2].replace("-", " ") or mark for mark in marks[:most]]
    return ", ".join(names) + (f" and {count - most} more" if count > most else "")
