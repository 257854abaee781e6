"""A record beside a checkpoint that somebody else wrote, so that damage can be found later. Its files are only read.

The digests are taken from the files as they are: what was damaged before is adopted as it is. From then on a changed
bit, a cut file, a missing one is seen. Nothing of midwatch resumes from, prunes or moves an adopted checkpoint.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Literal

import msgspec

from midwatch.checkpoint.image import read_header
from midwatch.checkpoint.manifest import MANIFEST_FILE, seal
from midwatch.checkpoint.problem import Problem
from midwatch.checkpoint.prove import OnBytes
from midwatch.checkpoint.verify import VerifyReport
from midwatch.core import SYSTEM_CLOCK, UNREADABLE, CheckpointError, StorageError
from midwatch.storage import (
    CHUNK_BYTES,
    canonical_json,
    chunk_digest,
    create_exclusive,
    read_chunks,
    read_regular,
)

ADOPTED_FILE = "ADOPTED.json"
"""In an adopted folder; beside an adopted file it is ``<file>.ADOPTED.json``."""

AdoptedKind = Literal["dcp", "safetensors", "torch"]

_TORCH = (".pt", ".pth", ".bin", ".ckpt")


class AdoptedPart(msgspec.Struct, frozen=True, kw_only=True):
    """One file: its place within the folder, its size, and XXH3-128 of each 8 MiB."""

    name: str
    size_bytes: int
    chunks: tuple[str, ...]


class Adopted(msgspec.Struct, frozen=True, kw_only=True):
    """``ADOPTED.json``. ``digest`` is SHA-256 over the canonical JSON with an empty ``digest``."""

    format: str = "midwatch-adopted"
    format_version: int = 1
    name: str
    kind: AdoptedKind
    step: int | None = None
    adopted_ns: int
    chunk_bytes: int = CHUNK_BYTES
    files: tuple[AdoptedPart, ...]
    digest: str = ""

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.files)


def record_file(path: Path) -> Path:
    """Where the record of an adopted folder or file lies."""
    return path / ADOPTED_FILE if path.is_dir() else path.with_name(f"{path.name}.{ADOPTED_FILE}")


def is_adopted(path: Path) -> bool:
    return record_file(path).is_file()


def kind_of(path: Path) -> AdoptedKind | None:
    """What somebody else's checkpoint is; None for what is none that we know."""
    if (path / ".metadata").is_file():
        return "dcp"
    names = [path.name] if path.is_file() else [name for name, _ in _files(path)]
    if any(name.endswith(".safetensors") for name in names):
        return "safetensors"
    return "torch" if any(name.endswith(_TORCH) for name in names) else None


def look_over(path: Path, step: int | None = None) -> Adopted:
    """The record without digests: what ``adopt`` would read.

    Raises:
        CheckpointError: CK201 no checkpoint that is known, or one of midwatch's own; CK104 a safetensors file whose
            header is broken.
    """
    if (path / MANIFEST_FILE).exists():
        raise CheckpointError("CK201", f"{path} is midwatch's own checkpoint: it has a manifest already")
    kind = kind_of(path)
    if kind is None:
        raise CheckpointError("CK201", f"{path} holds no checkpoint that is known (DCP, safetensors, torch.save)")
    found = list(_files(path))
    for name in (path.name, *(name for name, _ in found)):
        if not _is_text(name):
            raise CheckpointError("CK201", f"{path}: the name {name!r} is not UTF-8, and the record has to hold it")
    for name, file in found:
        if name.endswith(".safetensors"):
            read_header(file)
    files = tuple(AdoptedPart(name=name, size_bytes=file.stat().st_size, chunks=()) for name, file in found)
    step = step if step is not None else _step_of(path.name)
    return Adopted(name=path.name, kind=kind, step=step, adopted_ns=SYSTEM_CLOCK.wall_ns(), files=files)


def adopt(path: Path, step: int | None = None, *, on_bytes: OnBytes | None = None) -> Adopted:
    """Read every file, and write the record.

    Raises:
        As ``look_over``.
        FileExistsError: It is adopted already.
        StorageError: ST104 a file changed while it was read.

    Durability: the record survives power loss when it returns; it is there whole, or not at all.
    """
    if is_adopted(path):
        raise FileExistsError(errno.EEXIST, "adopted already", str(record_file(path)))
    plan = look_over(path, step)
    parts = tuple(_digested(_place(path, part.name), part, on_bytes) for part in plan.files)
    record = msgspec.structs.replace(plan, files=parts)
    record = msgspec.structs.replace(record, digest=seal(record))
    if not create_exclusive(record_file(path), canonical_json(record) + b"\n", mode=0o644):
        raise FileExistsError(errno.EEXIST, "adopted by somebody else meanwhile", str(record_file(path)))
    return record


def read_adopted(path: Path) -> Adopted:
    """The record of an adopted folder or file.

    Raises:
        CheckpointError: CK106 damaged, CK108 from a newer midwatch.
    """
    where = record_file(path)
    try:
        record = msgspec.json.decode(read_regular(where), type=Adopted)
    except (OSError, *UNREADABLE) as error:
        raise CheckpointError("CK106", f"{where} is damaged: {error}") from error
    if record.format_version > 1:
        raise CheckpointError("CK108", f"{where} has format {record.format_version}, this midwatch reads up to 1")
    if record.digest != seal(record) or record.chunk_bytes <= 0 or not all(map(_is_inside, record.files)):
        raise CheckpointError("CK106", f"{where} is damaged: its contents do not match its digest")
    return record


def verify_adopted(path: Path, *, deep: bool = True, on_bytes: OnBytes | None = None) -> VerifyReport:
    """Compare an adopted checkpoint with its record; never raises for what it finds.

    Args:
        deep: Read every byte from the medium; False compares names and sizes only.
    """
    problems: list[Problem] = []
    size = 0
    try:
        record = read_adopted(path)
    except CheckpointError as error:
        problems.append(Problem(code=error.code, file=record_file(path).name, message=error.message))
    else:
        for part in record.files:
            found = list(
                _part_problems(_place(path, part.name), part, record.chunk_bytes, on_bytes if deep else None, deep=deep)
            )
            problems += found
            size += part.size_bytes if deep and not found else 0
    return VerifyReport(name=path.name, path=str(path), is_deep=deep, problems=tuple(problems), bytes_read=size)


def list_adopted(root: Path) -> list[tuple[Path, Adopted | None]]:
    """Adopted checkpoints directly in a folder, by name; None where the record is damaged."""
    found: list[tuple[Path, Adopted | None]] = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if not path.name.endswith(ADOPTED_FILE) and is_adopted(path):
            try:
                found.append((path, read_adopted(path)))
            except CheckpointError:
                found.append((path, None))
    return found


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    """All files below, by their place; folders behind links are not entered."""
    if path.is_file():
        yield path.name, path
        return
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            file = Path(folder) / name
            if name != ADOPTED_FILE and not name.endswith(".tmp"):
                yield file.relative_to(path).as_posix(), file


def _is_text(name: str) -> bool:
    try:
        return bool(name.encode())
    except UnicodeEncodeError:
        return False


def _place(path: Path, name: str) -> Path:
    return path / name if path.is_dir() else path


def _is_inside(part: AdoptedPart) -> bool:
    # A name from a record is never a way out of the folder.
    place = PurePosixPath(part.name)
    return not place.is_absolute() and ".." not in place.parts and part.name not in ("", ".")


def _step_of(name: str) -> int | None:
    numbers = re.findall(r"\d+", name)
    return int(numbers[-1]) if numbers else None


def _digested(file: Path, part: AdoptedPart, on_bytes: OnBytes | None) -> AdoptedPart:
    before = file.stat()
    chunks = tuple(digest for digest, _ in _read(file, CHUNK_BYTES, on_bytes))
    after = file.stat()
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or after.st_size != part.size_bytes:
        raise StorageError("ST104", f"{file} changed while it was read: is somebody still writing it?", path=str(file))
    return msgspec.structs.replace(part, chunks=chunks)


def _read(file: Path, chunk_bytes: int, on_bytes: OnBytes | None) -> Iterator[tuple[str, int]]:
    for chunk in read_chunks(file, chunk_bytes):
        yield chunk_digest(chunk), len(chunk)
        if on_bytes is not None:
            on_bytes(len(chunk))


def _part_problems(
    file: Path, part: AdoptedPart, chunk_bytes: int, on_bytes: OnBytes | None, *, deep: bool
) -> Iterator[Problem]:
    try:
        size = file.stat().st_size
        if size != part.size_bytes:
            yield Problem(code="CK103", file=part.name, message=f"{size} bytes, {part.size_bytes} when it was adopted")
            return
        position = 0
        for index, (digest, count) in enumerate(_read(file, chunk_bytes, on_bytes) if deep else ()):
            begin, position = position, position + count
            if index >= len(part.chunks) or digest != part.chunks[index]:
                message = f"bytes {begin} to {position} are not what they were when it was adopted"
                yield Problem(code="CK104", file=part.name, message=message, begin=begin, end=position, chunk=index)
    except FileNotFoundError:
        yield Problem(code="CK102", file=part.name, message="file is missing")
    except OSError as error:
        yield Problem(code="ST103", file=part.name, message=f"cannot be read: {error}")
