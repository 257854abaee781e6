"""Processes as /proc shows them, and how to end exactly those that are ours. Standard library only, for the guardian.

"Ours" is decided by a tag in the environment, by the session of a tagged process and by nothing else: not by "all
descendants", which would hit whoever happens to be below us.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

TAG_VARIABLE: Final = "MIDWATCH_TAG"
ATTEMPT_VARIABLE: Final = "MIDWATCH_ATTEMPT"
SHM: Final = Path("/dev/shm")

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_CLK_TCK: Final = os.sysconf("SC_CLK_TCK")
# Looked up once, before any fork: between fork and exec a child must not load libraries.
_prctl = ctypes.CDLL(None, use_errno=True).prctl


class ProcStat(NamedTuple):
    """The parts of ``/proc/PID/stat`` that matter here."""

    state: str
    ppid: int
    session: int
    cpu_s: float
    """User and system time of all threads so far."""
    start_ticks: int
    """Together with the pid a unique name of the process."""


def read_stat(pid: int) -> ProcStat | None:
    """None when there is no such process any more."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The command in parentheses may itself hold spaces and parentheses.
    fields = text[text.rindex(b")") + 2 :].split()
    ticks = int(fields[11]) + int(fields[12])
    return ProcStat(fields[0].decode(), int(fields[1]), int(fields[3]), ticks / _CLK_TCK, int(fields[19]))


def is_running(pid: int) -> bool:
    """Alive and not merely waiting to be reaped."""
    stat = read_stat(pid)
    return stat is not None and stat.state not in "ZX"


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - twice as fast as pathlib


def tagged(tag: str, attempt: int | None = None, *, but: Iterable[int] = ()) -> set[int]:
    """Running processes that carry this tag (and attempt) in their environment, except ``but``."""
    spared = {os.getpid(), *but}
    return {pid for pid in all_pids() if pid not in spared and _carries(pid, tag, attempt) and is_running(pid)}


def sessions_of(pids: Iterable[int]) -> set[int]:
    """The sessions these processes are in; without our own."""
    found = {stat.session for pid in pids if (stat := read_stat(pid)) is not None}
    return found - {os.getsid(0), 0}


def members(sessions: set[int]) -> set[int]:
    """Running processes of these sessions."""
    if not sessions:
        return set()
    stats = ((pid, read_stat(pid)) for pid in all_pids())
    return {pid for pid, stat in stats if stat and stat.session in sessions and stat.state not in "ZX"}


def children(parent: int) -> dict[int, ProcStat]:
    """Direct children, zombies too. For a subreaper these include adopted orphans."""
    stats = ((pid, read_stat(pid)) for pid in all_pids())
    return {pid: stat for pid, stat in stats if stat is not None and stat.ppid == parent}


def send(pid: int, number: signal.Signals, *, still: Callable[[int], bool] | None = None) -> bool:
    """Signal one process through a pidfd, so that a pid that was reused meanwhile is not hit.

    Args:
        pid: The process.
        number: The signal.
        still: Asked after the pidfd is open: is this still the process meant?

    Returns:
        Whether the signal was delivered.
    """
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if still is not None and not still(pid):
            return False
        signal.pidfd_send_signal(fd, number)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def kill_tagged(tag: str, attempt: int | None = None, *, but: Iterable[int] = ()) -> set[int]:
    """One pass: SIGKILL to everything tagged and to the rest of its sessions.

    Returns:
        The pids that were still running. Call again until it is empty: a process may have forked meanwhile.
    """
    spared = {os.getpid(), *but}
    ours = tagged(tag, attempt, but=spared)
    rest = members(sessions_of(ours) - sessions_of(spared)) - spared
    for pid in ours | rest:
        stat = read_stat(pid)
        if stat is not None:
            send(pid, signal.SIGKILL, still=lambda p, born=stat.start_ticks: _born(p) == born)
    return ours | rest


def sweep_shm(prefix: str, folder: Path = SHM, *, but: str = "") -> list[str]:
    """Remove our own names in shared memory, except ``but``.

    Returns:
        The names removed.
    """
    removed: list[str] = []
    if not prefix or not folder.is_dir():
        return removed
    for entry in os.scandir(folder):
        if (
            entry.name.startswith(prefix)
            and entry.name != but
            and entry.stat(follow_symlinks=False).st_uid == os.getuid()
        ):
            Path(entry.path).unlink(missing_ok=True)
            removed.append(entry.name)
    return removed


def become_subreaper() -> None:
    """Orphans below this process become its children instead of init's, so none can slip away."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> Callable[[], None]:
    """A ``preexec_fn``: the child is killed when the thread that started it ends, also if that is already over."""
    parent = os.getpid()

    def arm() -> None:
        _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return arm


def _born(pid: int) -> int:
    stat = read_stat(pid)
    return -1 if stat is None else stat.start_ticks


def _carries(pid: int, tag: str, attempt: int | None) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    if f"{TAG_VARIABLE}={tag}".encode() not in environ:
        return False
    # A rank that was forked has its number in a place that was kept free with blanks.
    return attempt is None or f"{ATTEMPT_VARIABLE}={attempt}".encode() in (word.rstrip() for word in environ)
