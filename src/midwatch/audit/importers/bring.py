"""Foreign files into a run folder: read through, written beside the journals, and put in place at the end.

If we die before the end, the run's metrics are as they were, and a hidden folder is left that the next import removes.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Final

import msgspec

from midwatch.audit.aside import IMPORT_LOCK, is_imported
from midwatch.audit.importers.attempts import Attempt, Attempts
from midwatch.audit.importers.columns import OF_OTHER_RUNS, UNPLACED
from midwatch.audit.importers.detect import expanded, format_of, reader_of
from midwatch.audit.importers.output import JournalOutput
from midwatch.audit.importers.rows import Notes, Row
from midwatch.audit.importers.textfile import UnfitFileError
from midwatch.audit.journals import finish_import, journal_files, put_in_place
from midwatch.audit.runfile import ensure_run
from midwatch.core import MetricsError, printable
from midwatch.storage import as_storage_error, locked, ops

MOST_OPEN: Final = 200
"""Files that are merged by their times; more are read one after the other, for a process may hold 1024."""

_HINTS: Final = {
    UNPLACED: "Write attempts and ranks as numbers (3, a0003, rank3), or give their column another name.",
    OF_OTHER_RUNS: "Give --run-name a name that is in the column of runs.",
}
"""What to do where nothing was left but this."""


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """What an import did, or would do."""

    run_dir: str
    files: list[dict[str, str]]
    """``path`` (a name that is no UTF-8 with escapes) and ``format``."""
    attempts: list[Attempt]
    rows: int
    points: int
    passed_over: dict[str, int]
    notes: list[str]
    """What was not taken, in words, with the first places."""
    replaced: list[str]
    """Journals of an earlier import that made room."""
    dry_run: bool


def import_metrics(
    paths: list[Path],
    run_dir: Path,
    *,
    format: str = "auto",  # noqa: A002 - the word on the command line
    step_column: str = "",
    run_name: str = "",
    is_replacing: bool = False,
    is_rehearsal: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Imported:
    """Read foreign files and write them as journals of this run.

    Args:
        format: One of ``FORMATS``, or ``auto``: by what is in each file.
        step_column: Of a table, where its name is none of the usual.
        run_name: Of tables with a column that names runs: the one to take.
        is_replacing: Remove what was imported before. What midwatch recorded itself is never removed.

    Raises:
        MetricsError: MT101 unreadable, MT102 several runs mixed, MT104 there are metrics already.
        StorageError: ST101 to ST103; ST103 also while another import is at work here.

    Durability: survives power loss when it returns; before, the run folder is as it was.
    """
    notes = Notes(progress)
    try:
        files = [
            (path, prefix, format if format != "auto" else format_of(path, step_column))
            for path, prefix in expanded(paths)
        ]
        old = _make_room(run_dir, is_replacing)
        if is_rehearsal:
            attempts = Attempts(JournalOutput(None, "", _source(files)), notes)
            found = _read(files, attempts, notes, step_column, run_name)
        else:
            with _workplace(run_dir) as folder:
                run = ensure_run(run_dir, name=printable(paths[0].name)).run
                attempts = Attempts(JournalOutput(folder, run, _source(files)), notes)
                found = _read(files, attempts, notes, step_column, run_name)
                put_in_place(folder, run_dir, _make_room(run_dir, is_replacing))
    except UnfitFileError as error:
        raise MetricsError("MT101", str(error), hint=error.hint, path=str(paths[0])) from error
    except OSError as error:
        raise as_storage_error(error, "the import was broken off") from error
    return Imported(
        run_dir=str(run_dir),
        files=[{"path": printable(path), "format": name} for path, _, name in files],
        attempts=found,
        rows=notes.rows,
        points=attempts.points,
        passed_over=notes.counts,
        notes=notes.sentences(),
        replaced=[path.name for path in old],
        dry_run=is_rehearsal,
    )


def _source(files: list[tuple[Path, str, str]]) -> str:
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{printable(files[0][0].name)}{more}"


def _read(
    files: list[tuple[Path, str, str]], attempts: Attempts, notes: Notes, step_column: str, run_name: str
) -> list[Attempt]:
    with ExitStack() as stack:
        readers: list[Iterator[Row]] = []
        for path, prefix, name in files:
            reader = reader_of(path, name, notes, step_column=step_column, run_name=run_name, prefix=prefix)
            if isinstance(reader, Generator):
                stack.enter_context(closing(reader))
            readers.append(reader)
        for row in _in_order(readers):
            attempts.add(row)
    found = attempts.close()
    if not attempts.points:
        names = ", ".join(str(path) for path, _, _ in files[:5])
        message = f"no numbers by step in {names}" + "".join(f"; {sentence}" for sentence in notes.sentences())
        hint = next((hint for what, hint in _HINTS.items() if what in notes.counts), "")
        raise MetricsError("MT101", message, hint=hint, path=str(files[0][0]))
    return found


def _in_order(readers: list[Iterator[Row]]) -> Iterator[Row]:
    """Rows of several files by time where all of them tell it; else one file after the other, as they were named."""
    if len(readers) == 1 or len(readers) > MOST_OPEN:
        return chain.from_iterable(readers)
    begun: list[Iterator[Row]] = []
    is_timed = True
    for reader in readers:
        first = next(reader, None)
        if first is not None:
            is_timed = is_timed and first.ts_ns > 0
            begun.append(chain((first,), reader))
    if not is_timed:
        return chain.from_iterable(begun)
    return (row for _, _, row in heapq.merge(*map(_stamped, range(len(begun)), begun), key=lambda item: item[:2]))


def _stamped(number: int, rows: Iterator[Row]) -> Iterator[tuple[int, int, Row]]:
    """Rows with a time that never goes back within a file, so that each file keeps its own order."""
    newest = 0
    for row in rows:
        newest = max(newest, row.ts_ns)
        yield newest, number, row


def _make_room(run_dir: Path, is_replacing: bool) -> list[Path]:
    """The journals that an import has to take away first.

    Raises:
        MetricsError: MT104 there are some, and they may not be taken away.
    """
    there = [file.path for file in journal_files(run_dir)]
    own = [path for path in there if not is_imported(path)]
    if own:
        message = f"{own[0]} is midwatch's own record of this run"
        raise MetricsError("MT104", message, hint="Import into another --run-dir.", path=str(own[0]))
    if there and not is_replacing:
        raise MetricsError("MT104", f"{run_dir / 'metrics'} holds an import already", path=str(run_dir))
    return there


@contextmanager
def _workplace(run_dir: Path) -> Generator[Path]:
    """A hidden folder beside the journals, for one import at a time; gone at the end, whatever happens."""
    metrics = run_dir / "metrics"
    with locked(metrics / IMPORT_LOCK):
        folder = metrics / f"{IMPORT_LOCK}-{os.getpid()}"
        finish_import(run_dir)
        for left in metrics.glob(f"{IMPORT_LOCK}-*"):
            ops.remove_tree(left)
        ops.mkdir(folder)
        try:
            yield folder
        finally:
            ops.remove_tree(folder)
