"""An import out of the way of a run that begins to record in the same folder: one curve must not be made of both."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from midwatch.audit.journal import Start, decode_journal_line
from midwatch.audit.journals import begin_edition, finish_import, journal_files
from midwatch.core import MetricsError, attempt_name
from midwatch.storage import as_storage_error, locked_if_possible, ops

IMPORT_LOCK: Final = ".import"
"""Beside the journals: one import at a time, and none while one is set aside."""


def is_imported(path: Path) -> bool:
    """All of a journal came from other files. Where a run went on writing behind that, it is the run's own record.

    Raises:
        OSError: It cannot be read. MetricsError: MT101 it is of a later schema.
    """
    is_begun = False
    with path.open("rb") as file:
        for raw in file:
            # Heads alone are decoded: a journal may hold a million records.
            line = decode_journal_line(raw.rstrip(b"\n"), path) if b'"schema"' in raw or not is_begun else None
            if isinstance(line, Start):
                if not line.source:
                    return False  # at its first line, for nearly every journal that is asked about
                is_begun = True
            elif not is_begun:
                return False
    return is_begun


def set_imports_aside(run_dir: Path, attempt: int) -> Path | None:
    """Move imported journals into a folder of their own, where nobody counts them; None where there are none.

    Args:
        attempt: That begins to record now; it names the folder.

    Raises:
        StorageError: ST103 they cannot be moved, or an import is at work here.
    """
    try:
        # An import goes only where nothing is the run's own, so the first journal speaks for all.
        first = next(iter(journal_files(run_dir)), None)
        if first is None or not is_imported(first.path):
            return None
        metrics = run_dir / "metrics"
        folder = metrics / f"imported-before-{attempt_name(attempt)}"
        with locked_if_possible(metrics / IMPORT_LOCK):
            finish_import(run_dir)
            begin_edition(run_dir)
            ops.make_dirs(folder)
            for file in journal_files(run_dir):
                if is_imported(file.path):
                    ops.rename(file.path, folder / file.path.name)
            ops.fsync_dir(metrics)
        return folder
    except MetricsError:
        return None  # of a later version: nothing that this one should touch
    except OSError as error:
        raise as_storage_error(error, f"setting aside what was imported into {run_dir}") from error
