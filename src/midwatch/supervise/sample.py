"""Evidence about the ranks of one node: slots, process states, stacks, last words, kernel facts. Parallel, bounded."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import msgspec

from midwatch.config import redact_text
from midwatch.faults import is_fetching
from midwatch.faults.types import CollectiveCount, Frame, RankEvidence
from midwatch.pulse import Slot
from midwatch.supervise.activity import NOTHING, Activity, activity, waits_for_disk
from midwatch.supervise.error_file import read_error_file
from midwatch.supervise.flight import ANSWER_S, FlightFiles, collect
from midwatch.supervise.kernel import KernelLog, oom_victims
from midwatch.supervise.last_words import read_tail
from midwatch.supervise.procs import read_stat
from midwatch.supervise.waiting import wait_process
from midwatch.supervise.wire import Sampled, SampleRanks

_STACK_FRAMES: Final = 100
_KILLED: Final = (-9, 137)
"""By SIGKILL, also where a shell between us and the script tells of it."""
_THREADS: Final = 256
Stack = tuple[Frame, ...]


class Stacks(NamedTuple):
    """Of one process."""

    main: Stack = ()
    others: tuple[Stack, ...] = ()


class RankView(msgspec.Struct, kw_only=True):
    """What the agent already knows about a rank when it is sampled."""

    rank: int
    pid: int
    """Of who does the work."""
    root: int
    """Of who was started for it: the same, or a shell around it."""
    slot: Slot
    exit_code: int | None
    exit_mono_ns: int | None
    signalled_by_us: bool
    is_overdue: bool
    is_oom_counted: bool
    err_path: Path
    error_path: Path
    flight: FlightFiles
    counts: tuple[CollectiveCount, ...] = ()
    position: str = ""
    state_s: float | None = None
    stands_still: bool | None = None


class _Look(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of one rank."""

    slot: Slot
    state: str = "?"
    done: Activity | None = None
    disk_wait: bool = False
    wchan: str = ""
    stack: Stack = ()
    remark: str = ""


class Sampler:
    """Gathers this node's part of an incident.

    Args:
        node: Its name, for the evidence.
        kernel: The kernel log.
    """

    def __init__(self, node: str, kernel: KernelLog) -> None:
        self.node = node
        self._kernel = kernel
        self._py_spy = find_py_spy()
        self.helpers: set[int] = set()
        """Our own children at work; a teardown must spare them."""

    async def gather(self, order: SampleRanks, reread: Callable[[], Sequence[RankView]], since_ns: int) -> Sampled:
        """Take the samples and put them together.

        Args:
            order: How many samples, how far apart, and the time for all of it.
            reread: Returns the ranks as they are now; asked before each sample.
            since_ns: Monotonic start of the attempt, for the kernel log.

        Blocking: no; ends after ``order.cap_s`` at the latest.
        """
        end = time.monotonic() + order.cap_s
        first_at, views = time.monotonic(), reread()
        # Where training stands still anyway nobody waits for a list: those that are there already are read.
        is_asking = order.cap_s > ANSWER_S and not order.is_quick
        # Where an answer is wanted at once they are left for later: an exit is judged without them.
        listed = [] if order.is_quick and not order.is_late else [view.flight for view in views]
        flight = asyncio.create_task(collect(listed, end, is_asking=is_asking))
        # Before anybody is looked at, which makes a thread run for a moment.
        still = {view.rank: view.stands_still for view in views}
        # One that cannot be traced must not take the time of the second look.
        middle = first_at + (end - first_at) / order.samples
        first = await self._look_all(views, middle, has_stacks=not order.is_quick)
        last, window_s = first, 0.0
        for _ in range(order.samples - 1):
            await asyncio.sleep(max(0.0, min(first_at + order.gap_s, end) - time.monotonic()))
            views = reread()
            window_s = time.monotonic() - first_at
            last = await self._look_all(views, end, has_stacks=not order.is_quick)
        calls, unheard = await flight
        kernel_lines = self._kernel.lines(since_ns)
        victims = oom_victims(kernel_lines)
        evidence = (
            msgspec.structs.replace(
                _evidence(self.node, view, [first[view.rank], last[view.rank]][: order.samples], victims),
                calls=calls.get(view.rank, ()),
                stands_still=still.get(view.rank),
            )
            for view in views
            if view.rank in first
        )
        looks = [*first.values(), *last.values()]
        remarks = {look.remark for look in looks if look.remark} | {self._kernel.remark} - {""}
        waits = {f"rank {rank} waits in {look.wchan}" for rank, look in last.items() if look.wchan}
        return Sampled(
            attempt=order.attempt,
            incident=order.incident,
            ranks=tuple(evidence),
            kernel_lines=tuple(redact_text(line) for line in kernel_lines),
            window_s=window_s,
            remarks=tuple(sorted(remarks | waits | set(unheard))),
        )

    async def _look_all(self, views: Sequence[RankView], end: float, *, has_stacks: bool) -> dict[int, _Look]:
        looks = await asyncio.gather(*(self._look(view, end, has_stacks=has_stacks) for view in views))
        return {view.rank: look for view, look in zip(views, looks, strict=True)}

    async def _look(self, view: RankView, end: float, *, has_stacks: bool) -> _Look:
        stat = read_stat(view.pid) or read_stat(view.root) if view.exit_code is None else None
        if stat is None or stat.state in "ZX":
            return _Look(slot=view.slot, state=stat.state if stat else "X")
        wchan = _read_text(Path(f"/proc/{view.pid}/wchan"))
        stacks, remark = await self._stacks(view, stat.state, end) if has_stacks else (Stacks(), "")
        return _Look(
            slot=view.slot,
            state=stat.state if stat.state in "RSDTZXI" else "?",
            done=activity(view.root),
            disk_wait=waits_for_disk(view.root, view.pid) or any(is_fetching(stack) for stack in stacks.others),
            wchan=wchan if wchan != "0" else "",
            stack=stacks.main,
            remark=remark,
        )

    async def _stacks(self, view: RankView, state: str, end: float) -> tuple[Stacks, str]:
        if self._py_spy is None:
            return Stacks(), "no stacks: py-spy is not installed"
        command = [self._py_spy, "dump", "--json", "--pid", str(view.pid)]
        # One that is stopped or in the kernel cannot be stopped by ptrace; read while it stands still is as good.
        command += ["--nonblocking"] if state in "TD" else []
        output = os.memfd_create("midwatch-py-spy", os.MFD_CLOEXEC)
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL)
            self.helpers.add(process.pid)
            code = await wait_process(process, max(0.05, end - time.monotonic()))
            if code is None:
                process.kill()
                await wait_process(process, 1.0)
            self.helpers.discard(process.pid)
            if code is None:
                return Stacks(), f"rank {view.rank}: no stack in time"
            if code != 0:
                why = "py-spy: no permission to trace, or the process just ended"
                return Stacks(), f"rank {view.rank}: no stack ({why})"
            return parse_stacks(os.pread(output, os.fstat(output).st_size, 0), view.pid), ""
        finally:
            os.close(output)


def find_py_spy() -> str | None:
    """The py-spy of this installation, else the one on PATH."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def parse_stacks(document: bytes, pid: int) -> Stacks:
    """What ``py-spy dump --json`` says, innermost frames first; nothing for anything unreadable."""
    main: Stack = ()
    others: list[Stack] = []
    try:
        for thread in json.loads(document):
            frames = [Frame(str(f["name"]), str(f["filename"]), int(f["line"])) for f in thread["frames"]]
            is_main = thread.get("thread_name") == "MainThread" or thread.get("os_thread_id") == pid
            if is_main and not main:
                main = tuple(frames[:_STACK_FRAMES])
            else:
                others.append(tuple(frames[:_STACK_FRAMES]))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return Stacks()
    return Stacks(main, tuple(others[:_THREADS]))


def _evidence(node: str, view: RankView, looks: Sequence[_Look], oom: set[int]) -> RankEvidence:
    first, last, slot = looks[0], looks[-1], view.slot
    has_two = len(looks) > 1 and first.done is not None and last.done is not None
    then, now = first.done or NOTHING, last.done or NOTHING
    is_killed = view.exit_code in _KILLED and not view.signalled_by_us
    return RankEvidence(
        rank=view.rank,
        node=node,
        pid=view.pid,
        exit_code=view.exit_code,
        exit_mono_ns=view.exit_mono_ns,
        signalled_by_us=view.signalled_by_us,
        is_attached=slot.is_attached,
        step=slot.step,
        phase=slot.phase if slot.is_attached else "",
        phase_age_s=slot.phase_age_s(time.monotonic_ns()) if slot.is_attached else None,
        is_finished=slot.is_finished,
        is_overdue=view.is_overdue,
        proc_state=cast("Any", last.state),
        # A child that ended between its parent's count and its own is counted late.
        cpu_delta_s=max(0.0, now.cpu_s - then.cpu_s) if has_two else None,
        io_delta=max(0, now.io_bytes - then.io_bytes) if has_two else None,
        state_s=view.state_s,
        steps_advanced=max(0, last.slot.beats - first.slot.beats) if len(looks) > 1 else 0,
        stacks=tuple(look.stack for look in looks if look.stack),
        stderr_tail=read_tail(view.err_path, has_failed=view.exit_code not in (None, 0)),
        error_file=read_error_file(view.error_path),
        oom_killed=is_killed and (not oom.isdisjoint((view.pid, view.root)) or view.is_oom_counted),
        is_oom_counted=view.is_oom_counted,
        disk_wait=has_two and first.disk_wait and last.disk_wait,
        counts=view.counts,
        position=redact_text(view.position),
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
