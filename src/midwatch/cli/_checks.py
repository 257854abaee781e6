"""The examinations of ``midwatch doctor``: each looks at one thing a run will need and says what to do about it."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

from midwatch.audit import merged
from midwatch.core import LedgerError, MidwatchError, format_bytes
from midwatch.storage import create_exclusive, free_space, ops, write_atomic

State = Literal["ok", "warning", "problem"]

SHM = Path("/dev/shm")
SLOW_SYNC_S = 0.2
"""A ledger line waits this long for its sync; a healthy local disk needs milliseconds, busy network storage tens."""
CLOCK_APART_S = 5.0
"""Between this host and the file server: more makes the order of records of several nodes misleading."""
_PY_SPY_S = 15.0
"""Covers one stack of this small process, also on a machine under full load."""
_MIN_TORCH = (2, 6)
_MIN_SHM_BYTES = 64 * 10**6
_MIN_INODES = 1024
"""A save needs a dozen a rank: fewer than this are soon gone."""
_MIN_OPEN_FILES = 1024
"""The usual limit; a rank with its data loaders needs hundreds."""
_OLDEST_NS = 1_700_000_000 * 10**9
"""A clock before this version of midwatch was written is wrong."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One examination's result; ``todo`` is empty when all is well."""

    check: str
    state: State
    found: str
    todo: str = ""


def examine(run_dir: Path, checkpoint_dir: Path, *, checkpoint_bytes: int, keep_last: int) -> Iterator[Finding]:
    """All examinations; writes and removes a few small files where the run will write.

    Args:
        checkpoint_bytes: Size of one checkpoint; 0 when it is not known.

    Blocking: some seconds; py-spy at most 15 s.
    """
    yield check_python()
    yield check_torch()
    yield check_shared_memory(checkpoint_bytes)
    for name, folder in (("run folder", run_dir), ("checkpoint folder", checkpoint_dir)):
        if name == "run folder" or not folder.is_relative_to(run_dir):
            yield check_writable(name, folder)
    yield check_space(checkpoint_dir, checkpoint_bytes, keep_last)
    yield check_clock(run_dir)
    yield check_py_spy()
    yield check_open_files()


def check_python() -> Finding:
    version = sys.version.split()[0]
    if sys.version_info < (3, 11) or not sys.platform.startswith("linux"):
        todo = "Use Python 3.11 or newer on Linux."
        return Finding(check="python", state="problem", found=f"{version} on {sys.platform}", todo=todo)
    return Finding(check="python", state="ok", found=f"{version}, {sys.executable}")


def check_torch() -> Finding:
    """By its metadata: importing it would take seconds and memory, and may fail on a login node."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        todo = "Fine on a login node; where ranks run, install PyTorch 2.6 or newer."
        return Finding(check="torch", state="warning", found="not installed in this environment", todo=todo)
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers < _MIN_TORCH:
        return Finding(check="torch", state="problem", found=version, todo="Install PyTorch 2.6 or newer.")
    return Finding(check="torch", state="ok", found=version)


def check_shared_memory(checkpoint_bytes: int) -> Finding:
    """Each rank copies its part of a checkpoint there before it is written."""
    todo = "Enlarge /dev/shm (containers: --shm-size; Kubernetes: an emptyDir with medium Memory)."
    try:
        free = free_space(SHM).free_bytes
    except OSError as error:
        return Finding(check="shared memory", state="problem", found=f"{SHM}: {error.strerror}", todo=todo)
    if not os.access(SHM, os.W_OK | os.X_OK):
        return Finding(check="shared memory", state="problem", found=f"{SHM} is not writable", todo=todo)
    need = max(checkpoint_bytes, _MIN_SHM_BYTES)
    found = f"{format_bytes(free)} free, {format_bytes(need)} needed if all ranks run here"
    if free < need:
        # With several nodes each holds only its share, so this need not be fatal.
        state: State = "problem" if free < _MIN_SHM_BYTES else "warning"
        return Finding(check="shared memory", state=state, found=found, todo=todo)
    return Finding(check="shared memory", state="ok", found=found)


def check_writable(name: str, folder: Path) -> Finding:
    """Does what a run does: exclusive create, atomic replace, link, sync, in the folder or where it will be made."""
    place = nearest_existing(folder)
    probe = place / f".midwatch-doctor-{os.getpid()}-{secrets.token_hex(4)}"
    todo = f"Make {place} writable for this user, on a file system with hard links and symbolic links."
    try:
        seconds = _exercise(probe)
    except (OSError, MidwatchError) as error:
        return Finding(check=name, state="problem", found=f"{place}: {error}", todo=todo)
    finally:
        _clean(probe)
    found = f"{place} is writable, a synced write takes {seconds * 1000:.1f} ms"
    if seconds > SLOW_SYNC_S:
        todo = "The storage is slow or busy: expect slow saves; keep checkpoint.interval long or use a local tier."
        return Finding(check=name, state="warning", found=found, todo=todo)
    return Finding(check=name, state="ok", found=found)


def _exercise(probe: Path) -> float:
    """Seconds for one atomic, synced write."""
    ops.mkdir(probe)
    if not create_exclusive(probe / "claim", b"x") or create_exclusive(probe / "claim", b"x"):
        raise OSError("exclusive creation does not hold: two attempts could own the run")
    ops.symlink(probe / "latest", "claim")
    began = time.monotonic()
    write_atomic(probe / "file", b"x" * 4096)
    seconds = time.monotonic() - began
    if (probe / "file").read_bytes() != b"x" * 4096:
        raise OSError("what was written is not what is read")
    return seconds


def _clean(probe: Path) -> None:
    try:
        ops.remove_tree(probe)
    except OSError:
        # Named .midwatch-doctor-*: harmless, and the finding above has said what is wrong with the place.
        pass


def check_space(folder: Path, checkpoint_bytes: int, keep_last: int) -> Finding:
    """Room for the checkpoints that are kept and the one being written."""
    place = nearest_existing(folder)
    try:
        space = free_space(place)
    except OSError as error:
        todo = "Look at the mount."
        return Finding(check="disk space", state="problem", found=f"{place}: {error.strerror}", todo=todo)
    if space.free_inodes is not None and space.free_inodes < _MIN_INODES:
        todo = "Remove files that are not needed: the file system can hold no more of them."
        return Finding(
            check="disk space", state="problem", found=f"{place}: {space.free_inodes} inodes left", todo=todo
        )
    if not checkpoint_bytes:
        found = f"{format_bytes(space.free_bytes)} free at {place}; the size of a checkpoint is not known yet"
        return Finding(check="disk space", state="ok", found=found, todo="Give --model-params to check the need.")
    need = (keep_last + 1) * checkpoint_bytes
    found = f"{format_bytes(space.free_bytes)} free at {place}, {format_bytes(need)} for {keep_last} + 1 checkpoints"
    if space.free_bytes < need:
        todo = "Free space, lower checkpoint.keep_last, or point checkpoint.dir elsewhere."
        return Finding(check="disk space", state="problem", found=found, todo=todo)
    return Finding(check="disk space", state="ok", found=found)


def check_clock(run_dir: Path) -> Finding:
    """This host's clock against common sense, the run's newest record and the file server."""
    now = time.time_ns()
    todo = "Set the clock and let NTP keep it: records of several nodes are ordered by it."
    if now < _OLDEST_NS:
        return Finding(check="clock", state="problem", found=f"says {time.ctime(now / 1e9)}", todo=todo)
    newest = _newest_record_ns(run_dir)
    if newest > now + CLOCK_APART_S * 1e9:
        found = f"{(newest - now) / 1e9:.0f} s behind the newest record of this run"
        return Finding(check="clock", state="warning", found=found, todo=todo)
    apart = _apart_from_files(nearest_existing(run_dir))
    if apart is not None and abs(apart) > CLOCK_APART_S:
        found = f"{abs(apart):.0f} s {'behind' if apart > 0 else 'ahead of'} the file server of the run folder"
        return Finding(check="clock", state="warning", found=found, todo=todo)
    return Finding(check="clock", state="ok", found="agrees with the run folder's")


def _newest_record_ns(run_dir: Path) -> int:
    try:
        return max((line.ts_ns for line in merged(run_dir)), default=0)
    except LedgerError:
        return 0


def _apart_from_files(place: Path) -> float | None:
    """Seconds by which the file system's clock is ahead of ours; None when nothing can be written there."""
    probe = place / f".midwatch-doctor-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        ops.write_file(probe, b"x")
        apart = probe.stat().st_mtime - time.time()
        ops.unlink(probe)
    except OSError:
        return None
    return apart


def check_py_spy() -> Finding:
    """Takes a stack of this very process, as the agent takes those of hanging ranks."""
    from midwatch.supervise.sample import find_py_spy

    program = find_py_spy()
    if program is None:
        todo = "Install py-spy beside midwatch: without it a hang is found, but its place in the code is not shown."
        return Finding(check="py-spy", state="warning", found="not found", todo=todo)
    command = [program, "dump", "--json", "--pid", str(os.getpid())]
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=_PY_SPY_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(
            check="py-spy", state="warning", found=f"does not run: {error}", todo=f"Try: {program} --version"
        )
    if done.returncode != 0:
        todo = "Allow tracing: kernel.yama.ptrace_scope=0, or the capability SYS_PTRACE for the container."
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"])[-1]
        return Finding(check="py-spy", state="warning", found=f"may not look into processes: {last}", todo=todo)
    return Finding(check="py-spy", state="ok", found=f"{program} can look into processes")


def check_open_files() -> Finding:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _MIN_OPEN_FILES:
        todo = f"ulimit -n {min(max(hard, soft), 65536)} in the job script."
        return Finding(check="open files", state="warning", found=f"limit {soft}", todo=todo)
    return Finding(check="open files", state="ok", found=f"limit {soft}")


def nearest_existing(folder: Path) -> Path:
    """The folder, or the closest one above it that exists."""
    return next((place for place in (folder, *folder.parents) if place.is_dir()), Path("/"))
