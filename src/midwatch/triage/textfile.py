"""The lines of a text file of any size, whatever wrote it: encodings, marks at the beginning, a line without an end."""

from __future__ import annotations

import codecs
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from midwatch.core import TriageError

MAX_LINE: Final = 1 << 20
"""Characters; a longer line is no row of numbers (after a power cut a file may end in zeros)."""
TELL_EVERY: Final = 1 << 14
_SNIFF: Final = 4096
_MAX_ZEROS: Final = 0.1

_MARKS: Final = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_BINARY: Final = {b"\x1f\x8b": "a gzip archive", b"PK": "a zip archive", b"PAR1": "a Parquet file", b"\x28\xb5": "zstd"}


class TextFile:
    """A file that is read line by line, as often as wanted.

    Raises:
        TriageError: TR101 when it is not there, not text or no file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            raise TriageError("TR101", f"{path}: no such file", path=str(path))
        if path.is_dir():
            raise TriageError("TR101", f"{path}: is a folder, not a metrics file", path=str(path))
        if not path.is_file():
            message = f"{path}: is a pipe or a device; the file is read twice, so write it to a disk first"
            raise TriageError("TR101", message, path=str(path))
        with path.open("rb") as file:
            self._encoding = _encoding(path, file.read(_SNIFF))
        self._most_lines: int | None = None

    def lines(self, tell: Callable[[int], None] | None = None) -> Iterator[tuple[str, bool]]:
        """Each line without its end, and whether it had one; a line that is too long comes as an empty one.

        What is appended after the file was read to its end the first time is not looked at.

        Args:
            tell: Called now and then with the bytes read since the last call.
        """
        with self.path.open("rb") as raw, io.TextIOWrapper(raw, self._encoding, errors="replace") as file:
            told = count = 0
            while count != self._most_lines and (line := file.readline(MAX_LINE)):
                count += 1
                if tell is not None and count % TELL_EVERY == 0:
                    position = raw.tell()
                    tell(position - told)
                    told = position
                if line.endswith("\n"):
                    yield line[:-1], True
                elif len(line) < MAX_LINE:
                    yield line, False
                else:
                    yield "", _skip_line(file)
        self._most_lines = count


def _skip_line(file: io.TextIOWrapper) -> bool:
    while part := file.readline(MAX_LINE):
        if part.endswith("\n"):
            return True
    return False


def _encoding(path: Path, head: bytes) -> str:
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            return encoding
    for mark, what in _BINARY.items():
        if head.startswith(mark):
            raise TriageError("TR101", f"{path}: is {what}, not text", path=str(path))
    if b"\0" not in head:
        return "utf-8"
    # UTF-16 without its mark: every other byte of digits and Latin letters is zero.
    for offset, encoding in ((1, "utf-16-le"), (0, "utf-16-be")):
        half = head[offset::2]
        if half.count(0) > 0.9 * len(half):
            return encoding
    # A few zeros in a text are what a power cut leaves.
    if head.count(0) > _MAX_ZEROS * len(head):
        raise TriageError("TR101", f"{path}: is not text", path=str(path))
    return "utf-8"
