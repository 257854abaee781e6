"""What the ranks tell each other during a save, and what the committer remembers from one save to the next.

A rank's mark is a note of a few hundred bytes, never its list of tensors: that is in the receipt file. Who reads the
receipts, and when, is the whole point: the first save of a structure is checked tensor by tensor, later ones by
comparing one layout digest a rank with what was checked before.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from midwatch.checkpoint.image import Owned
from midwatch.checkpoint.manifest import RankNote, TensorRecord
from midwatch.core import UNREADABLE, CheckpointError

Layouts = Mapping[int, str]
"""Layout digest by rank."""

MAX_NAMED = 16
"""Tensors named in a note."""


class CommitNote(msgspec.Struct, frozen=True, kw_only=True):
    """The folder is committed. ``baseline`` is the checkpoint to compare statistics with; empty: there is none."""

    digest: str
    baseline: str = ""


class ProofNote(Owned, frozen=True, kw_only=True):
    """A rank has read its part back from the medium, and this is what it found there."""

    size_bytes: int
    receipt_digest: str
    layout: str
    nonfinite: tuple[str, ...] = ()
    """Model tensors with non-finite values that are not known to have had any before."""
    is_worse: bool = False
    """One of them is known to have had none in the baseline."""


Note = TypeVar("Note", RankNote, CommitNote, ProofNote)
RanksNote = TypeVar("RanksNote", RankNote, ProofNote)


def encode_note(note: RankNote | CommitNote | ProofNote) -> bytes:
    return msgspec.msgpack.encode(note)


def decode_note(data: bytes, kind: type[Note]) -> Note:
    """Raises CheckpointError CK301 for what is none."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UNREADABLE as error:
        raise CheckpointError("CK301", f"a mark on the board is not one of ours: {error}") from error


def decode_all(marks: Mapping[str, bytes], kind: type[RanksNote], owner: tuple[str, int, int, int]) -> list[RanksNote]:
    """The notes, in the marks' order, each of this very save: ``owner`` is run, attempt, step and world size.

    Raises:
        CheckpointError: CK105 for another save's note, CK301 as ``decode_note``.
    """
    notes = [decode_note(data, kind) for data in marks.values()]
    for mark, note in zip(marks, notes, strict=True):
        run, attempt, step, rank, world_size = note.owner
        if (run, attempt, step, world_size) != owner or not mark.endswith(f".rank-{rank:05d}"):
            raise CheckpointError("CK105", f"{mark} belongs to {note.owner}")
    return notes


def layouts_of(notes: Sequence[RankNote] | Sequence[ProofNote]) -> dict[int, str]:
    return {note.rank: note.layout for note in notes}


class LayoutCache:
    """Structures that were checked tensor by tensor since this writer process began. Safe from several threads.

    It grows with ranks plus tensors, not with their product.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._layouts: dict[int, str] = {}
        self._tensors: dict[str, TensorRecord] = {}
        self._shown: dict[str, dict[int, str]] = {}

    def tensors(self, layouts: Layouts) -> dict[str, TensorRecord] | None:
        """The table of whole tensors that these layouts make; None when they have not been checked."""
        with self._lock:
            return self._tensors if self._layouts == layouts else None

    def keep_tensors(self, layouts: Layouts, tensors: dict[str, TensorRecord]) -> None:
        """These layouts make these tensors, without holes and overlaps."""
        with self._lock:
            self._layouts, self._tensors = dict(layouts), tensors

    def is_shown(self, tier: str, layouts: Layouts) -> bool:
        """Whether a folder of this structure was examined in this tier: records, headers, coverage."""
        with self._lock:
            return self._shown.get(tier) == layouts

    def keep_shown(self, tier: str, layouts: Layouts) -> None:
        """A folder of this structure was examined and found good."""
        with self._lock:
            self._shown[tier] = dict(layouts)
