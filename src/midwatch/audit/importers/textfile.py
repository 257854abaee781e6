"""The lines of a text file of any size, whatever wrote it: encodings, marks at the beginning, a line without an end."""

from __future__ import annotations

import codecs
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from midwatch.storage import open_regular

LONGEST: Final = 1 << 20
"""Characters; a longer line is no row of numbers (after a power cut a file may end in zeros)."""
TELL_EVERY: Final = 1 << 12
_SNIFF: Final = 4096
_FEW_ZEROS: Final = 0.1
_MOST_ZEROS: Final = 0.6
_MOST_CONTROLS: Final = 0.02

_MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_PACKED: Final = {
    b"\x1f\x8b": "a gzip archive: unpack it first",
    b"PK\x03\x04": "a zip archive (or a spreadsheet): unpack it, or save it as CSV",
    b"PAR1": "a Parquet file: write it as CSV",
    b"\x28\xb5\x2f\xfd": "a zstd archive: unpack it first",
    b"\xfd7zXZ\0": "an xz archive: unpack it first",
    b"BZh": "a bzip2 archive: unpack it first",
    b"SQLite format 3\0": "an SQLite database: write it as CSV",
    b"\x89HDF": "an HDF5 file: write it as CSV",
}

Tell = Callable[[int], None]
"""Called now and then with the bytes read since the last call."""


class UnfitFileError(ValueError):
    """A file is not what it was taken for; the message names it and says what it is. Callers give it their own code."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class TextLine(NamedTuple):
    """One line, or a part of one that is too long."""

    number: int
    text: str
    """Without its end."""
    is_ended: bool
    """It had an end: what follows its last character is known."""
    is_part: bool
    """Of a line longer than was asked for."""


class TextFile:
    """A file that is read line by line, as often as wanted.

    Raises:
        UnfitFileError: It is not there, no file, or not text. OSError: It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.encoding = _encoding(path, _head(path))
        self._most_lines: int | None = None

    def lines(self, tell: Tell | None = None, longest: int = LONGEST) -> Iterator[TextLine]:
        """Each line; carriage returns end lines, too, for a progress bar shares its line with what comes after it.

        What is appended after the file was read to its end the first time is not looked at.
        """
        number, is_part = 0, False
        with os.fdopen(open_regular(self.path), "rb") as raw, self._decoded(raw) as file:
            told = 0
            while (is_part or number != self._most_lines) and (text := file.readline(longest)):
                number += not is_part
                if tell is not None and number % TELL_EVERY == 0:
                    tell(raw.tell() - told)
                    told = raw.tell()
                is_ended = text[-1] == "\n"
                is_open = not is_ended and len(text) >= longest
                yield TextLine(number, text[:-1] if is_ended else text, is_ended, is_part or is_open)
                is_part = is_open
            if tell is not None:
                tell(raw.tell() - told)
        self._most_lines = number

    def _decoded(self, raw: io.BufferedReader) -> io.TextIOWrapper:
        return io.TextIOWrapper(raw, self.encoding, errors="replace")


def _head(path: Path) -> bytes:
    if path.is_dir():
        raise UnfitFileError(f"{path}: is a folder, not a metrics file")
    if not path.exists():
        raise UnfitFileError(f"{path}: no such file")
    if not path.is_file():
        raise UnfitFileError(f"{path}: is a pipe or a device; the file is read twice, so write it to a disk first")
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read(_SNIFF)


def _encoding(path: Path, head: bytes) -> str:
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            return encoding
    for mark, what in _PACKED.items():
        if head.startswith(mark):
            raise UnfitFileError(f"{path}: is {what}")
    if b"\0" not in head:
        return "utf-8"
    # UTF-16 without its mark: every other byte of digits and Latin letters is zero.
    for offset, encoding in ((1, "utf-16-le"), (0, "utf-16-be")):
        half, other = head[offset::2], head[1 - offset :: 2]
        if half.count(0) > 0.9 * len(half) and other.count(0) < _FEW_ZEROS * len(other):
            return encoding
    # Zeros between lines of text are what a power cut leaves; a binary file has other control characters as well.
    controls = sum(byte < 9 or 13 < byte < 32 for byte in head) - head.count(0)
    if head.count(0) > _MOST_ZEROS * len(head) or controls > _MOST_CONTROLS * len(head):
        raise UnfitFileError(f"{path}: is not text")
    return "utf-8"
