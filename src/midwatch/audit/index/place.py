"""Where an index may lie: on a disk of this host. Its locks do not work between hosts, and it can be made anew."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from midwatch.core import MetricsError
from midwatch.storage import ops, sha256_hex

SHARED_KINDS: Final = frozenset(
    (
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "9p", "virtiofs", "vboxsf", "dvs"),
        *("lustre", "gpfs", "mmfs", "beegfs", "ceph", "glusterfs", "panfs", "pvfs2", "orangefs"),
        *("wekafs", "wekafsgw", "ocfs2", "gfs2", "acfs", "stornext", "daos", "quobyte"),
    )
)
"""File systems that several hosts may write to at a time. Those in user space (``fuse.*``) count, too: nobody knows."""

_MOUNTS: Final = Path("/proc/self/mountinfo")


def index_folder(configured: Path | None) -> Path:
    """The folder for indexes, made if need be: the configured one, else one of this user's on a local disk.

    Raises:
        MetricsError: MT105 the configured folder is shared between hosts or not usable, or there is no local one.
    """
    if configured is not None:
        if kind := shared_kind(configured):
            raise MetricsError(
                "MT105",
                f"metrics.index_dir = {configured} is on a {kind} file system, where SQLite's locks do not work",
                path=str(configured),
                kind=kind,
            )
        if _is_usable(configured, [configured.resolve()]):
            return configured
        return _refuse(f"metrics.index_dir = {configured} cannot be written to, or others may write to it", configured)
    candidates = list(_candidates())
    for folder in candidates:
        if not shared_kind(folder) and _is_usable(folder, [folder.parent, folder]):
            return folder
    tried = ", ".join(str(folder) for folder in candidates)
    return _refuse(f"no local folder for the index of metrics; tried {tried}", candidates[0])


def index_name(run_dir: Path) -> str:
    """One name for each run folder, whatever it is called; another folder of the same name is another run."""
    return sha256_hex(os.fsencode(os.path.realpath(run_dir)))[:20]


def shared_kind(path: Path) -> str:
    """The kind of the file system below ``path``, which need not exist, if hosts share it; else empty."""
    try:
        mounts = _MOUNTS.read_text(errors="surrogateescape")
    except OSError:
        return ""
    kind = mounted_kind(os.path.realpath(path), mounts)
    return kind if kind in SHARED_KINDS or kind.startswith("fuse") else ""


def mounted_kind(path: str, mountinfo: str) -> str:
    """The kind of file system that a path without links lies on, by the kernel's list of mounts.

    Source: ``proc(5)``, /proc/pid/mountinfo: the mount point is field 5, its kind comes after a lone dash.
    """
    best, found = -1, ""
    for line in mountinfo.splitlines():
        before, dash, after = line.partition(" - ")
        fields = before.split(" ")
        if not dash or len(fields) < 5:
            continue
        point = _unescape(fields[4])
        is_above = path == point or path.startswith(point.rstrip("/") + "/")
        # Of two mounts on one place the later one is seen.
        if is_above and len(point) >= best:
            best, found = len(point), after.split(" ")[0]
    return found


def _unescape(text: str) -> str:
    for octal, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(octal, char)
    return text


def _candidates() -> Iterator[Path]:
    name = f"midwatch-{os.getuid()}"
    yield Path("/var/tmp") / name / "metrics"
    yield Path(tempfile.gettempdir()) / name / "metrics"
    yield Path("/dev/shm") / name / "metrics"


def _is_usable(folder: Path, ours: list[Path]) -> bool:
    """The folder can be written to, and it and those named are ours alone: everybody makes names in ``/var/tmp``."""
    try:
        ops.make_dirs(folder, mode=0o700)
        return all(_is_ours(path) for path in ours) and os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        return False


def _is_ours(path: Path) -> bool:
    facts = path.lstat()
    others = stat.S_IWGRP | stat.S_IWOTH
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & others


def _refuse(message: str, path: Path) -> Path:
    raise MetricsError("MT105", message, path=str(path))
