"""Which board a save uses, and how a rank that cannot take part tells the others."""

from __future__ import annotations

from pathlib import Path

from midwatch.checkpoint.board import Board, FileBoard
from midwatch.checkpoint.board_wire import NetPlace
from midwatch.checkpoint.jobs import SaveJob, Tier
from midwatch.checkpoint.net_board import NetBoard
from midwatch.core import MidwatchError


def board_of(job: SaveJob, tier: Tier) -> Board:
    """The board that all ranks of this save use in this tier."""
    return _board(Path(job.root), job.name, job.serial, tier, place_of(job))


def place_of(job: SaveJob) -> NetPlace | None:
    """The store the job names; None for files."""
    return net_place(job.board, Path(job.run_dir), job.run, job.attempt)


def net_place(address: str, run_dir: Path, run: str, attempt: int) -> NetPlace | None:
    """The store at ``host:port``; None when there is no address."""
    return NetPlace(address=address, run_dir=run_dir, run=run, attempt=attempt) if address else None


def _board(root: Path, name: str, serial: int, tier: Tier, place: NetPlace | None) -> Board:
    if place is not None:
        return NetBoard(place, f"{name}.{serial}", tier)
    return FileBoard(root, name, serial, tier)


def fail_save(
    root: Path, name: str, serial: int, *, rank: int, error: MidwatchError, place: NetPlace | None = None
) -> None:
    """Tell the other ranks that this one takes no part in a save (its writer died, its state cannot be captured).

    Blocking: by network for ``net_board.FAIL_TIMEOUT_S``, twice at most.
    """
    is_told = True
    for tier in ("local", "shared"):
        board = _board(root, name, serial, tier, place)
        is_told = is_told and board.fail(rank, error)
        board.close()
