"""New lines of all ledgers of a run, each once."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from midwatch.audit.line import LedgerLine, decode_line
from midwatch.audit.tail import opened, read_lines

_MOST_LOOKS: Final = 64
"""Chunks of one file at a time: the rest comes with the next look."""


def skip_history(run_dir: Path, places: dict[str, int]) -> None:
    """Begin behind what the ledgers say already: nobody wants to be told of last week.

    Raises:
        OSError: The folder cannot be read.
    """
    for path in _ledgers(run_dir):
        places[path.name] = path.stat().st_size


def new_lines(run_dir: Path, places: dict[str, int]) -> list[LedgerLine]:
    """The lines since ``places``, which move on, by wall time; within one file its own order holds.

    Raises:
        OSError: The folder cannot be read.
    """
    found: list[tuple[int, str, int, LedgerLine]] = []
    for path in _ledgers(run_dir):
        place = places.get(path.name, 0)
        size = path.stat().st_size
        if size == place:
            continue
        if size < place:
            # A torn end was cut off: what follows is news, what came before is not.
            places[path.name] = place = size
        newest = 0
        for line in _read(path, places):
            newest = max(newest, line.ts_ns)
            found.append((newest, path.stem, line.seq, line))
    return [line for *_, line in sorted(found, key=lambda one: one[:3])]


def _read(path: Path, places: dict[str, int]) -> list[LedgerLine]:
    lines: list[LedgerLine] = []
    with opened(path) as fd:
        for _ in range(_MOST_LOOKS):
            look = read_lines(fd, places.get(path.name, 0))
            places[path.name] = look.end
            for raw in look.lines:
                line = decode_line(raw)
                if line is not None:
                    lines.append(msgspec.structs.replace(line, writer=path.stem))
            if look.is_last:
                break
    return lines


def _ledgers(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "ledger").glob("*.jsonl"))
