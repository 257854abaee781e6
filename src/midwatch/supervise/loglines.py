"""Read ranks' output back: which files an attempt has, their newest lines, what has been added since.

A file may be longer than what it holds (its middle was given back) and hold any bytes at all: holes are skipped, what
is not UTF-8 is shown as such, and no line is longer than a screen can bear.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from midwatch.core import attempt_name
from midwatch.supervise.tee import next_data

Stream = Literal["out", "err"]

LINE_BYTES: Final = 4096
"""What is shown of one line; progress bars without a line end would make one of a whole file."""
NEWEST_BYTES: Final = 512 * 1024
"""Read of each file from its end; a thousand ranks are half a gigabyte, some seconds."""
FIRST_BYTES: Final = 64 * 1024
"""Read of a longer file from its beginning: there ranks say what they found and with what they work."""
_CHUNK: Final = 256 * 1024

_COLOUR: Final = re.compile(rb"\x1b\[[0-9;:]*m")
_NAME: Final = re.compile(r"(?P<node>.+)\.r(?P<rank>\d{5,})\.(?P<stream>out|err)")
_ATTEMPT: Final = re.compile(r"a(\d{4,})")


class LogFile(msgspec.Struct, frozen=True, kw_only=True):
    """One stream of one rank of one attempt."""

    path: Path
    attempt: int
    node: str
    rank: int
    stream: Stream


def attempts_with_logs(run_dir: Path) -> list[int]:
    """Numbers of the attempts that left output, oldest first."""
    try:
        names = [entry.name for entry in (run_dir / "logs").iterdir()]
    except OSError:
        return []
    return sorted(int(found[1]) for name in names if (found := _ATTEMPT.fullmatch(name)))


def log_files(run_dir: Path, attempt: int) -> list[LogFile]:
    """What the ranks of an attempt write or wrote to, by rank; stderr behind stdout."""
    folder = run_dir / "logs" / attempt_name(attempt)
    found: list[LogFile] = []
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        name = _NAME.fullmatch(entry.name)
        # Not through a link: the folder is shared, and what is shown is read with the rights of whoever looks.
        if name is not None and entry.is_file() and not entry.is_symlink():
            stream: Stream = "out" if name["stream"] == "out" else "err"
            file = LogFile(path=entry, attempt=attempt, node=name["node"], rank=int(name["rank"]), stream=stream)
            found.append(file)
    return sorted(found, key=lambda file: (file.rank, file.stream == "err", file.node))


def parse_ranks(text: str) -> list[range]:
    """``0-7,12`` as ranges.

    Raises:
        ValueError: It is not such a list.
    """
    ranges: list[range] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        ranges.append(range(int(first), int(last or first) + 1))
        if not ranges[-1]:
            raise ValueError(part)
    return ranges


def rank_ranges(ranks: Sequence[int]) -> str:
    """Sorted numbers as people write them: ``0-7,12``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


class LogReader:
    """Lines of one file, from near its end on.

    Args:
        file: Which.
        newest_bytes: How far before the end to begin; 0: at the beginning.
    """

    def __init__(self, file: LogFile, newest_bytes: int = NEWEST_BYTES) -> None:
        self.file = file
        self._at = 0
        self._rest = b""
        self._is_in_line = False
        """What comes next is the end of a line whose beginning was not read."""
        if newest_bytes:
            self._at = max(0, self._size() - newest_bytes)
            self._is_in_line = self._at > 0

    def lines(self, *, is_last: bool = False) -> Iterator[str]:
        """What has been written since the last call, whole lines only; ``is_last``: the unfinished one, too."""
        while data := self._read():
            yield from self._split(data)
        if is_last and self._rest:
            yield _text(self._rest)
            self._rest = b""

    def _size(self) -> int:
        try:
            return self.file.path.stat().st_size
        except OSError:
            return 0

    def _read(self) -> bytes:
        try:
            fd = os.open(self.file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return b""
        try:
            at = next_data(fd, self._at)
            if at != self._at:
                # Behind a hole, or in a file that was cut: what was begun has no end any more.
                self._rest = b""
            data = os.pread(fd, _CHUNK, at)
            self._at = at + len(data)
            return data
        except OSError:
            return b""
        finally:
            os.close(fd)

    def _split(self, data: bytes) -> Iterator[str]:
        if self._is_in_line:
            _, end, data = data.partition(b"\n")
            self._is_in_line = not end
        *lines, self._rest = (self._rest + data).split(b"\n")
        yield from (_text(line) for line in lines)
        if len(self._rest) > LINE_BYTES:
            yield _text(self._rest)
            self._rest, self._is_in_line = b"", True


def first_lines(file: LogFile) -> list[str]:
    """The beginning of a file that ``LogReader`` does not begin at; empty for a shorter one."""
    try:
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return []
    try:
        # Never into what is read from the end anyway, or lines would count twice.
        data = os.pread(fd, min(FIRST_BYTES, max(0, os.fstat(fd).st_size - NEWEST_BYTES)), 0)
        return [_text(line) for line in data.split(b"\n")[:-1]]
    except OSError:
        return []
    finally:
        os.close(fd)


def _text(line: bytes) -> str:
    """The line as text, without colours. What a progress bar drew over is left out, as it would be on a screen."""
    drawn = line.replace(b"\0", b"").rstrip(b"\r")
    last = _COLOUR.sub(b"", drawn[drawn.rfind(b"\r") + 1 :])
    return last[:LINE_BYTES].decode(errors="replace").expandtabs(4)
