"""Small files that are either the old one or the new one, never a mixture, whenever the power goes."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from midwatch.core import UNREADABLE, StorageError
from midwatch.storage import ops
from midwatch.storage.reading import read_regular

T = TypeVar("T")


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace ``path`` by ``data``.

    Durability: survives power loss when it returns. If we die before the rename a reader sees the old file (and a
    ``.tmp`` beside it); after it, the new one.
    """
    temporary = _temporary(path)
    try:
        ops.write_file(temporary, data, mode=mode)
        ops.rename(temporary, path)
    except OSError:
        _discard(temporary)
        raise
    ops.fsync_dir(path.parent)


def create_exclusive(path: Path, data: bytes, *, mode: int = 0o600) -> bool:
    """Create ``path`` with ``data`` unless it exists: complete or absent, and exactly one of several callers wins.

    Returns:
        True for the winner; False when the file existed already.
    """
    temporary = _temporary(path)
    try:
        ops.write_file(temporary, data, mode=mode)
        is_mine = _link_once(temporary, path)
    finally:
        _discard(temporary)
    ops.fsync_dir(path.parent)
    return is_mine


def _link_once(temporary: Path, path: Path) -> bool:
    try:
        ops.link(temporary, path)
    except FileExistsError:
        # NFS may repeat a link whose answer was lost; the link count then tells that the first one worked.
        return temporary.stat().st_nlink == 2
    return True


def replace_symlink(link: Path, target: str) -> None:
    """Point ``link`` to ``target`` (relative to the link's folder) in one step.

    Durability: as ``write_atomic``; a reader sees the old target or the new one.
    """
    temporary = _temporary(link)
    try:
        ops.symlink(temporary, target)
        ops.rename(temporary, link)
    except OSError:
        _discard(temporary)
        raise
    ops.fsync_dir(link.parent)


def _discard(temporary: Path) -> None:
    try:
        ops.unlink(temporary)
    except OSError:
        # Already on an error path: the stray .tmp is harmless and must not hide the first error.
        pass


def canonical_json(value: Any) -> bytes:
    """One spelling per value: sorted keys, no white space, so that equal content means equal bytes."""
    return msgspec.json.encode(value, order="sorted")


def write_json_atomic(path: Path, value: Any, *, mode: int = 0o644) -> None:
    """``write_atomic`` of the canonical JSON, with a newline at the end."""
    write_atomic(path, canonical_json(value) + b"\n", mode=mode)


def read_json(path: Path, type: type[T]) -> T:  # noqa: A002 - the word msgspec uses
    """Read and validate.

    Raises:
        StorageError: ST103 when the file is missing, unreadable or not of that type.
    """
    try:
        return msgspec.json.decode(read_regular(path), type=type)
    except (OSError, *UNREADABLE) as error:
        raise StorageError("ST103", f"cannot read {path}: {error}", path=str(path)) from error
