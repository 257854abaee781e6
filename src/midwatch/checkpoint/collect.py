"""What the committer does with the ranks' notes: see that they make whole tensors, and make the manifest of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from midwatch.checkpoint.board import Board, rank_mark
from midwatch.checkpoint.coverage import tensor_table
from midwatch.checkpoint.image import layout_digest
from midwatch.checkpoint.jobs import SaveJob
from midwatch.checkpoint.manifest import (
    Manifest,
    RankNote,
    Receipt,
    TensorRecord,
    build_manifest,
    decode_receipt,
    receipt_file,
)
from midwatch.checkpoint.notes import LayoutCache, decode_all, layouts_of
from midwatch.core import CheckpointError
from midwatch.storage import read_uncached, sha256_hex

CALL_MARK = "call"
"""Posted by the committer where receipts lie on other nodes: whether it needs to see them."""

RECEIPTS = b"receipts"


def answer_call(board: Board, job: SaveJob, receipt: bytes) -> None:
    """A rank whose receipt the committer cannot read: show it, if the committer asks.

    Raises and blocks as ``Board.wait``.
    """
    found = board.wait([CALL_MARK], timeout_s=job.commit_timeout_s, doing="waiting for the committer")
    if found[CALL_MARK] == RECEIPTS:
        board.post(rank_mark("full", job.rank), receipt)


class Collector:
    """The committer's side of one save."""

    def __init__(self, job: SaveJob, board: Board, layouts: LayoutCache) -> None:
        self._job = job
        self._board = board
        self._layouts = layouts

    def manifest(self, folder: Path | None, own_receipt: bytes) -> Manifest:
        """Wait for all ranks' notes and join them, unsigned.

        Only when the layout of a rank is another than in the last save are the receipts looked at, tensor by tensor.

        Args:
            folder: Where all ranks' receipts lie; None: on their own nodes, and they are asked for them.

        Raises:
            CheckpointError: CK303 ranks missing, CK107 holes, CK301 another rank failed, CK104 and CK105 a receipt
                that is not what its rank said.

        Blocking: ``commit_timeout_s``, twice when the receipts lie elsewhere.
        """
        job = self._job
        notes = decode_all(self._wait("receipt"), RankNote, (job.run, job.attempt, job.step, job.world_size))
        _check_alike(notes)
        layouts = layouts_of(notes)
        tensors = self._layouts.tensors(layouts)
        if folder is None:
            self._board.post(CALL_MARK, RECEIPTS if tensors is None else b"")
        if tensors is None:
            tensors = self._examine(notes, folder, own_receipt)
            self._layouts.keep_tensors(layouts, tensors)
        assert job.manifest is not None
        return build_manifest(job.manifest, notes, tensors)

    def _wait(self, kind: str) -> dict[str, bytes]:
        marks = [rank_mark(kind, rank) for rank in range(self._job.world_size)]
        doing = f"commit of {self._job.name}"
        return self._board.wait(marks, timeout_s=self._job.commit_timeout_s, doing=doing)

    def _examine(self, notes: Sequence[RankNote], folder: Path | None, own_receipt: bytes) -> dict[str, TensorRecord]:
        if folder is not None:
            return tensor_table(_from_folder(notes, folder))
        self._board.post(rank_mark("full", self._job.rank), own_receipt)
        return tensor_table(_checked(note, data) for note, data in zip(notes, self._wait("full").values(), strict=True))


def _check_alike(notes: Sequence[RankNote]) -> None:
    first = notes[0]
    for note in notes:
        if (note.digest_kind, note.chunk_bytes) != (first.digest_kind, first.chunk_bytes):
            message = f"rank {note.rank} hashes with {note.digest_kind} in pieces of {note.chunk_bytes} bytes"
            raise CheckpointError("CK301", f"{message}, rank 0 with {first.digest_kind}, {first.chunk_bytes}")


def _from_folder(notes: Sequence[RankNote], folder: Path) -> Iterator[Receipt]:
    for note in notes:
        path = folder / receipt_file(note.rank)
        try:
            data = read_uncached(path)
        except OSError as error:
            raise CheckpointError("CK104", f"{path} cannot be read: {error}") from error
        yield _checked(note, data)


def _checked(note: RankNote, data: bytes) -> Receipt:
    if sha256_hex(data) != note.receipt_digest:
        raise CheckpointError("CK104", f"the receipt of rank {note.rank} is not the one that it told of")
    receipt = decode_receipt(data)
    if receipt.owner != note.owner or layout_digest(receipt.entries) != note.layout:
        raise CheckpointError("CK105", f"the receipt of rank {note.rank} does not say what its note says")
    return receipt
