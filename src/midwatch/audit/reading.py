"""Reading ledgers for people and programs; judging them is ``verify``'s business."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec

from midwatch.audit.line import LedgerLine
from midwatch.core import UNREADABLE, LedgerError


def ledger_files(run_dir: Path) -> list[Path]:
    """The ledger files of a run, by name.

    Raises:
        LedgerError: LG103 when the folder has none.
    """
    files = sorted((run_dir / "ledger").glob("*.jsonl"))
    if not files:
        raise LedgerError("LG103", f"no ledger under {run_dir}", path=str(run_dir))
    return files


def read_ledger(path: Path) -> Iterator[LedgerLine]:
    """The lines of one file in order. Damaged lines and a torn end are passed over: ``verify_ledger`` names them.

    Raises:
        LedgerError: LG103 when there is no such file.
    """
    if not path.is_file():
        raise LedgerError("LG103", f"no ledger at {path}", path=str(path))
    return _lines(path)


def merged(run_dir: Path) -> list[LedgerLine]:
    """All lines of all files of a run by wall time; within one file its own order holds even if the clock jumped back.

    Raises:
        LedgerError: LG103 when the run has no ledger.
    """
    streams = [_timed(path) for path in ledger_files(run_dir)]
    return [line for _, _, _, line in heapq.merge(*streams, key=lambda item: item[:3])]


def known_checkpoints(run_dir: Path) -> list[str]:
    """Names of the checkpoints that the ledgers tell of as verified in the shared tier and not pruned, oldest first."""
    try:
        lines = merged(run_dir)
    except LedgerError:
        return []
    names: dict[str, None] = {}
    for line in lines:
        is_shared = line.event == "checkpoint.uploaded" or line.data.get("tier") == "shared"
        is_by_hand = line.event == "checkpoint.pruned"
        if not is_by_hand and (not is_shared or line.event not in ("checkpoint.verified", "checkpoint.uploaded")):
            continue
        if not is_by_hand:
            names[str(line.data.get("name", ""))] = None
        pruned = line.data.get("pruned")
        for name in cast("list[Any]", pruned) if isinstance(pruned, list) else []:
            names.pop(str(name), None)
    return list(names)


def _lines(path: Path) -> Iterator[LedgerLine]:
    with path.open("rb") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                return
            try:
                line = msgspec.json.decode(raw, type=LedgerLine)
            except UNREADABLE:
                continue
            yield msgspec.structs.replace(line, writer=path.stem)


def _timed(path: Path) -> Iterator[tuple[int, str, int, LedgerLine]]:
    newest = 0
    for place, line in enumerate(_lines(path)):
        newest = max(newest, line.ts_ns)
        yield newest, path.stem, place, line
