"""The preloaded fault library from Python: build it, arm it inside a child, read its log (see ``iotrap.c``).

A child is started with ``environment()``; it and all it starts then share one plan, which ``arm`` sets.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("iotrap.c")
CREATE, TRUNCATE, WRITE, ALLOCATE, FSYNC, FSYNC_DIR = 1, 2, 4, 8, 16, 32
RENAME, LINK, UNLINK, MKDIR, RMDIR, SYMLINK = 64, 128, 256, 512, 1024, 2048
ALL = 4095
NEEDS_SPACE = CREATE | WRITE | ALLOCATE | MKDIR | LINK | SYMLINK
"""What a full disk refuses; it still lets one rename, shorten and remove."""
KILL, FAIL = 1, 2

_RECORD = struct.Struct("=IIIIQQ")


def build(folder: Path) -> Path:
    """Compile the library into ``folder``.

    Raises:
        RuntimeError: No C compiler, or it failed; the rows that need the library then say why they are empty.
    """
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        raise RuntimeError("no C compiler on this machine")
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "iotrap.so"
    done = subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{compiler} failed: {done.stderr.strip().splitlines()[-1:]}")
    return library


def environment(library: Path, state: Path) -> dict[str, str]:
    """What a process needs to be under the library; children inherit it."""
    return dict(os.environ, LD_PRELOAD=str(library), IOTRAP_STATE=str(state))


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.iotrap_counted.restype = library.iotrap_fired.restype = ctypes.c_int64
    library.iotrap_fired_path.restype = ctypes.c_char_p
    return library


def is_loaded() -> bool:
    """Whether this process runs under the library."""
    return hasattr(ctypes.CDLL(None), "iotrap_arm")


def arm(
    watch: Path,
    *,
    at: int = 0,
    action: int = 0,
    error: int = errno.ENOSPC,
    classes: int = ALL,
    is_sticky: bool = False,
    log: Path | None = None,
) -> None:
    """Watch the files below ``watch``; at the ``at``-th operation of ``classes`` kill the process group, or fail it.

    A killed or sticky write is torn: half of its bytes go out first.
    """
    _library().iotrap_arm(
        os.fsencode(watch),
        os.fsencode(log or ""),
        ctypes.c_int64(classes),
        ctypes.c_int64(at),
        ctypes.c_int(action),
        ctypes.c_int(error),
        ctypes.c_int(is_sticky),
    )


def disarm() -> None:
    arm(Path(""))


def bad_sector(path: Path, begin: int, end: int) -> None:
    """Reading these bytes of ``path`` fails from now on (EIO; SIGBUS where the file is mapped). Needs ``arm`` first."""
    _library().iotrap_bad_sector(os.fsencode(path), ctypes.c_int64(begin), ctypes.c_int64(end))


def counted() -> int:
    return int(_library().iotrap_counted())


def fired() -> int:
    return int(_library().iotrap_fired())


def fired_path() -> Path:
    return Path(os.fsdecode(_library().iotrap_fired_path()))


@dataclass(frozen=True)
class Operation:
    """One line of the log: an operation that was done."""

    kind: int
    path: str
    other: str
    offset: int
    """Of a write; of a truncation or allocation the size afterwards."""
    data: bytes


def read_log(path: Path) -> list[Operation]:
    data, at, found = path.read_bytes() if path.exists() else b"", 0, []
    while at + _RECORD.size <= len(data):
        kind, path_bytes, other_bytes, _, offset, data_bytes = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        name = os.fsdecode(data[at : at + path_bytes])
        at += path_bytes
        other = os.fsdecode(data[at : at + other_bytes])
        at += other_bytes
        found.append(Operation(kind, name, other, offset, data[at : at + data_bytes]))
        at += data_bytes
    return found
