"""Which format a file is in, by what it contains rather than by its name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from midwatch.audit import tfrecord
from midwatch.audit.importers.columns import read_table
from midwatch.audit.importers.header import Header, find_header
from midwatch.audit.importers.lines import LONGEST
from midwatch.audit.importers.megatron import ITERATION, read_megatron
from midwatch.audit.importers.numbers import without_colour
from midwatch.audit.importers.rows import Notes, Row
from midwatch.audit.importers.tensorboard import event_files, read_tensorboard
from midwatch.audit.importers.textfile import TextFile, UnfitFileError
from midwatch.audit.importers.torchtitan import STEP, read_torchtitan
from midwatch.audit.importers.trainer_state import KEY, read_trainer_state
from midwatch.storage import open_regular

FORMATS: Final = ("tensorboard", "megatron", "torchtitan", "trainer-state", "csv")

_HEAD_LINES: Final = 50
_SEARCH_CHARACTERS: Final = 64 << 20
"""How far into a log its first line of metrics may be: frameworks print megabytes of settings first."""

_READERS: Final[dict[str, Callable[[Path, Notes], Iterator[Row]]]] = {
    "megatron": read_megatron,
    "torchtitan": read_torchtitan,
    "trainer-state": read_trainer_state,
}


def reader_of(
    path: Path, name: str, notes: Notes, *, step_column: str = "", run_name: str = "", prefix: str = ""
) -> Iterator[Row]:
    """The rows of one file in a format that is known.

    Raises:
        UnfitFileError: One run is to be taken, and files of this format name none.
    """
    if name == "csv":
        return read_table(path, notes, step_column, run_name)
    if run_name:
        raise UnfitFileError(f"{path} is no table: nothing in it names runs", "Leave --run-name out.")
    if name == "tensorboard":
        return read_tensorboard(path, notes, prefix)
    return _READERS[name](path, notes)


def expanded(paths: list[Path]) -> list[tuple[Path, str]]:
    """Files, each with the prefix of its metrics' names: folders stand for the event files in them.

    Raises:
        UnfitFileError: A folder without event files, or no such file.
    """
    found: list[tuple[Path, str]] = []
    for path in paths:
        if not path.is_dir():
            if not path.exists():
                raise UnfitFileError(f"there is no file {path}")
            found.append((path, ""))
            continue
        files = event_files(path)
        if not files:
            raise UnfitFileError(f"no TensorBoard event files in the folder {path}")
        is_one = len({file.parent for file in files}) == 1
        found += [(file, "" if is_one else _prefix(file.parent, path)) for file in files]
    return found


def _prefix(folder: Path, root: Path) -> str:
    relative = folder.relative_to(root).as_posix()
    return "" if relative == "." else f"{relative}/"


def format_of(path: Path, step_column: str = "") -> str:
    """One of ``FORMATS``.

    Raises:
        OSError: The file cannot be read. UnfitFileError: None of them fits.
    """
    if _is_events(path):
        return "tensorboard"
    file = TextFile(path)
    head = [line.text for line in islice(file.lines(longest=LONGEST), _HEAD_LINES)]
    first = next((text for text in head if text.strip()), None)
    if first is None:
        raise UnfitFileError(f"{path} is empty")
    if first.lstrip("\ufeff \t").startswith("{") and _has(file, KEY):
        return "trainer-state"
    if _is_table(find_header(file.lines(), step_column, preamble=0)):
        return "csv"
    name = _log_format(file)
    # Only now: what is printed before a log's first line may well look like a line of names.
    if not name and _is_table(find_header(file.lines(), step_column)):
        return "csv"
    if not name:
        shown = repr(first[:60])
        raise UnfitFileError(f"{path} is in no format that is known ({', '.join(FORMATS)}); it begins with {shown}")
    return name


def _is_events(path: Path) -> bool:
    if not path.is_file():
        return False
    with os.fdopen(open_regular(path), "rb") as file:
        header = file.read(tfrecord.HEADER_BYTES)
    return len(header) == tfrecord.HEADER_BYTES and tfrecord.length_of(header) is not None


def _is_table(header: Header | None) -> bool:
    return header is not None and len(header.names) > 1


def _log_format(file: TextFile) -> str:
    left = _SEARCH_CHARACTERS
    for line in file.lines(longest=LONGEST):
        left -= len(line.text)
        if left < 0:
            break
        # Most lines are none of ours; this is a quick way to see that.
        if "iteration" not in line.text and "step:" not in line.text:
            continue
        text = without_colour(line.text)
        if ITERATION.search(text):
            return "megatron"
        if STEP.search(text):
            return "torchtitan"
    return ""


def _has(file: TextFile, word: str) -> bool:
    before = ""
    for line in file.lines():
        if word in before + line.text:
            return True
        # A long line comes in parts, and the word may lie across two of them.
        before = line.text[1 - len(word) :] if line.is_part else ""
    return False
