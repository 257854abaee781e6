"""What git says of the code: the commit checked out, and what differs from it. Bounded in time and in size.

Looking must not write and must not start programs: no optional locks, no monitor of the file system, no external diff
and no text conversion that the repository names.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import threading
from pathlib import Path

import msgspec

from midwatch.config import redact_text

GIT_TIMEOUT_S = 3.0
"""Covers one local git query; a repository on a sick network mount must not hold up the start of training."""
MAX_DIFF_BYTES = 256 * 1024
"""Of the text that is kept; the digest is over all of it."""
MAX_NAMED_BYTES = 8 * 1024
"""Of the names of files that differ. Every manifest carries them."""
_MARGIN = 16 * 1024
"""Read beyond the bound, so that a secret on it is seen whole and hidden."""
_PIECE = 64 * 1024
_CALM = ("--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false", "-c", "diff.relative=false")
_QUERY = ("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty")
_DIFF = (*_QUERY, "--no-color", "--full-index")
_NAMES = (*_QUERY, "--name-only", "--no-renames", "-z")


class GitState(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a work tree."""

    commit: str = ""
    is_dirty: bool | None = None
    """Tracked files differ from the commit; None: git could not tell in time."""
    diff_digest: str = ""
    """16 hex digits over the whole difference; empty where there is none, or it was not read to its end."""
    diff: str = ""
    """Secrets hidden, at most ``MAX_DIFF_BYTES``."""
    is_diff_cut: bool = False
    changed_files: tuple[str, ...] = ()
    """Paths within the repository of what differs, as far as ``MAX_NAMED_BYTES`` goes."""
    changed_count: int = 0
    """How many there are; 0 where git could not tell."""


NO_GIT = GitState()


def look_at_git(folder: Path) -> GitState:
    """The state of the work tree around ``folder``; ``NO_GIT`` without one, or without git.

    Blocking: at most three queries of ``GIT_TIMEOUT_S`` each.
    """
    answer = _ask(folder, "rev-parse", "--verify", "HEAD")
    commit = answer.kept.decode("ascii", "replace").strip()
    if not answer.is_whole or not commit:
        return NO_GIT
    answer = _ask(folder, *_DIFF)
    if not answer.is_whole and not answer.kept:
        return GitState(commit=commit)
    text = redact_text(answer.kept.decode("utf-8", "replace"))
    is_cut = not answer.is_whole or answer.size > len(answer.kept) or len(text.encode()) > MAX_DIFF_BYTES
    names = _ask(folder, *_NAMES) if answer.size else _Answer()
    return GitState(
        commit=commit,
        is_dirty=answer.size > 0,
        diff_digest=answer.digest if answer.is_whole and answer.size else "",
        diff=_whole_lines(text) if is_cut else text,
        is_diff_cut=is_cut,
        changed_files=_first_names(names.kept),
        changed_count=names.zeros,
    )


class _Answer(msgspec.Struct):
    kept: bytes = b""
    size: int = 0
    zeros: int = 0
    """Bytes of value 0: with ``-z`` the number of names."""
    digest: str = ""
    is_whole: bool = False
    """Git ended by itself and was content."""


def _ask(folder: Path, *query: str) -> _Answer:
    command = ["git", *_CALM, "-C", str(folder), *query]
    try:
        git = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
    except OSError:
        return _Answer()
    # The thread of a timer, because a pipe cannot be read with a time limit.
    timer = threading.Timer(GIT_TIMEOUT_S, _kill, (git,))
    timer.daemon = True
    timer.start()
    try:
        return _read(git)
    finally:
        timer.cancel()


def _kill(git: subprocess.Popen[bytes]) -> None:
    # With all that it started: a filter would hold the pipe open.
    try:
        os.killpg(git.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _read(git: subprocess.Popen[bytes]) -> _Answer:
    total, kept, size, zeros = hashlib.sha256(), bytearray(), 0, 0
    assert git.stdout is not None
    with git, git.stdout as pipe:
        while piece := pipe.read1(_PIECE):  # pyright: ignore[reportAttributeAccessIssue]
            total.update(piece)
            size += len(piece)
            zeros += piece.count(0)
            kept += piece[: MAX_DIFF_BYTES + _MARGIN - len(kept)]
    return _Answer(bytes(kept), size, zeros, total.hexdigest()[:16], git.returncode == 0)


def _first_names(answer: bytes) -> tuple[str, ...]:
    *whole, _ = answer.split(b"\0")
    left, kept = MAX_NAMED_BYTES, list[str]()
    for name in (redact_text(raw.decode("utf-8", "backslashreplace")) for raw in whole):
        left -= len(name.encode()) + 3
        if left < 0:
            break
        kept.append(name)
    return tuple(kept)


def _whole_lines(text: str) -> str:
    cut = text.encode()[:MAX_DIFF_BYTES].decode("utf-8", "ignore")
    return cut[: cut.rfind("\n") + 1]
