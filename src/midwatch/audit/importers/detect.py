"""Which format a file is in, by what it contains rather than by its name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from midwatch.audit import tfrecord
from midwatch.audit.importers.megatron import ITERATION, read_megatron
from midwatch.audit.importers.numbers import without_colour
from midwatch.audit.importers.rows import Notes, Row
from midwatch.audit.importers.table import looks_like_table, read_table
from midwatch.audit.importers.tensorboard import event_files, read_tensorboard
from midwatch.audit.importers.torchtitan import STEP, read_torchtitan
from midwatch.audit.importers.trainer_state import read_trainer_state
from midwatch.core import MetricsError
from midwatch.storage import open_regular

FORMATS: Final = ("tensorboard", "megatron", "torchtitan", "trainer-state", "csv")

_HEAD_BYTES: Final = 1 << 16
_SEARCH_BYTES: Final = 64 << 20
"""How far into a log its first line of metrics may be: frameworks print megabytes of settings first."""

_READERS: Final[dict[str, Callable[[Path, Notes], Iterator[Row]]]] = {
    "megatron": read_megatron,
    "torchtitan": read_torchtitan,
    "trainer-state": read_trainer_state,
}


def reader_of(path: Path, name: str, notes: Notes, *, step_column: str = "", prefix: str = "") -> Iterator[Row]:
    """The rows of one file in a format that is known."""
    if name == "csv":
        return read_table(path, notes, step_column)
    if name == "tensorboard":
        return read_tensorboard(path, notes, prefix)
    return _READERS[name](path, notes)


def expanded(paths: list[Path]) -> list[tuple[Path, str]]:
    """Files, each with the prefix of its metrics' names: folders stand for the event files in them.

    Raises:
        MetricsError: MT101 a folder without event files, or no such file.
    """
    found: list[tuple[Path, str]] = []
    for path in paths:
        if not path.is_dir():
            if not path.exists():
                raise MetricsError("MT101", f"there is no file {path}", path=str(path))
            found.append((path, ""))
            continue
        files = event_files(path)
        if not files:
            raise MetricsError("MT101", f"no TensorBoard event files in the folder {path}", path=str(path))
        is_one = len({file.parent for file in files}) == 1
        found += [(file, "" if is_one else _prefix(file.parent, path)) for file in files]
    return found


def _prefix(folder: Path, root: Path) -> str:
    relative = folder.relative_to(root).as_posix()
    return "" if relative == "." else f"{relative}/"


def format_of(path: Path, step_column: str = "") -> str:
    """One of ``FORMATS``.

    Raises:
        OSError: The file cannot be read. MetricsError: MT101 none of them fits.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        head = file.read(_HEAD_BYTES)
        if not head.strip():
            raise MetricsError("MT101", f"{path} is empty", path=str(path))
        if len(head) >= tfrecord.HEADER_BYTES and tfrecord.length_of(head[: tfrecord.HEADER_BYTES]) is not None:
            return "tensorboard"
        text = head.decode("utf-8", "replace")
        if text.lstrip("\ufeff \t\r\n").startswith("{") and ('"log_history"' in text or _has(path, b'"log_history"')):
            return "trainer-state"
        if looks_like_table(text, step_column):
            return "csv"
        return _log_format(path, head)


def _log_format(path: Path, head: bytes) -> str:
    with os.fdopen(open_regular(path), "rb") as file:
        left = _SEARCH_BYTES
        while left > 0 and (raw := file.readline(_HEAD_BYTES)):
            left -= len(raw)
            # Most lines are none of ours; this is a quick way to see that.
            if b"iteration" not in raw and b"step:" not in raw:
                continue
            line = without_colour(raw.decode("utf-8", "replace"))
            if ITERATION.search(line):
                return "megatron"
            if STEP.search(line):
                return "torchtitan"
    shown = repr(head[:60])[1:]
    raise MetricsError(
        "MT101",
        f"{path} is in no format that is known ({', '.join(FORMATS)}); it begins with {shown}",
        path=str(path),
    )


def _has(path: Path, word: bytes) -> bool:
    with os.fdopen(open_regular(path), "rb") as file:
        before = b""
        while chunk := file.read(1 << 20):
            if word in before + chunk:
                return True
            before = chunk[-len(word) :]
    return False
