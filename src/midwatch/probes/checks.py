"""The probes that need no special hardware. Each is a function of the run folder and may block: it can be killed."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import psutil

from midwatch.probes.answers import Answer, Status
from midwatch.probes.surroundings import clock, network

MIN_DISK_BYTES: Final = 64 * 2**20
LOW_DISK_BYTES: Final = 1024 * 2**20
MIN_SHM_BYTES: Final = 8 * 2**20
LOW_SHM_BYTES: Final = 64 * 2**20
"""Between the two a run may start all the same (a container's /dev/shm has 64 MB): a failed probe can hold a run, so it
must mean that ranks cannot work there."""
MIN_INODES: Final = 1000
MIN_MEMORY_SHARE: Final = 0.02
SLOW_STORAGE_S: Final = 2.0
"""One small durable write on a healthy shared file system takes milliseconds."""
D_STATE_S: Final = 1.0
_KERNEL_BYTES: Final = 8192
_KERNEL_WINDOW_S: Final = 600.0
_FATAL: Final = re.compile(
    r"NVRM: Xid .*?: (?:46|48|62|64|74|79|95|109|110|119|120|136|140|143|155|156|158)\b"
    r"|Machine check events logged|Hardware Error.*(?:Uncorrected|fatal)|EDAC .*\bUE\b"
    r"|I/O error, dev (?:nvme|sd|vd|md|dm-)|nvme .*: (?:controller is down|I/O .*timeout, disable)"
    r"|Remounting filesystem read-only",
    re.IGNORECASE,
)
"""Kernel lines after which a node is not to be trusted (XIDs that ask for a reset, a reboot or a new part)."""
_WORRYING: Final = re.compile(
    r"NVRM: Xid |EDAC .*\bCE\b|mlx5_core .*: (?:Link down|health)|blocked for more than \d+ s"
)


def disk(run_dir: Path) -> Answer:
    """Room and inodes where runs write."""
    for place in (run_dir, Path("/tmp")):
        usage, numbers = shutil.disk_usage(place), os.statvfs(place)
        if usage.free < LOW_DISK_BYTES:
            status: Status = "fail" if usage.free < MIN_DISK_BYTES else "warn"
            return Answer(probe="disk", status=status, text=f"{usage.free >> 20} MB free in {place}")
        if numbers.f_files and numbers.f_favail < MIN_INODES:
            return Answer(probe="disk", status="fail", text=f"{numbers.f_favail} inodes free in {place}")
    return Answer(probe="disk", status="ok")


def shm(run_dir: Path) -> Answer:
    """Room in shared memory; a full one kills ranks by SIGBUS."""
    del run_dir
    place = Path("/dev/shm")
    if not place.is_dir():
        return Answer(probe="shm", status="unknown", text="no /dev/shm here", is_blind=True)
    free = shutil.disk_usage(place).free
    status: Status = "ok" if free >= LOW_SHM_BYTES else "warn" if free >= MIN_SHM_BYTES else "fail"
    return Answer(probe="shm", status=status, text=f"{free >> 20} MB free in /dev/shm")


def storage(run_dir: Path) -> Answer:
    """Write, sync, rename and read back a few bytes in the run folder."""
    began = time.monotonic()
    data = secrets.token_bytes(512)
    part = run_dir / f".probe-{os.getpid()}-{secrets.token_hex(4)}"
    whole = part.with_suffix(".done")
    try:
        with part.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.rename(whole)
        is_same = whole.read_bytes() == data
    except OSError as error:
        return Answer(probe="storage", status="fail", text=f"{run_dir}: {error.strerror}")
    finally:
        for path in (part, whole):
            path.unlink(missing_ok=True)
    took_s = time.monotonic() - began
    if not is_same:
        return Answer(probe="storage", status="fail", text=f"{run_dir} gives back other bytes than were written")
    status: Status = "warn" if took_s > SLOW_STORAGE_S else "ok"
    return Answer(probe="storage", status=status, text=f"a durable write took {took_s:.3f} s")


def checkpoints(place: Path) -> Answer:
    """The same where checkpoints lie, if that is elsewhere: what cannot save is not well."""
    if not place.is_dir():
        return Answer(probe="checkpoints", status="unknown", text=f"{place} is not there", is_blind=True)
    return msgspec.structs.replace(storage(place), probe="checkpoints")


def memory(run_dir: Path) -> Answer:
    """Memory that a new rank could have."""
    del run_dir
    now = psutil.virtual_memory()
    status: Status = "ok" if now.available >= MIN_MEMORY_SHARE * now.total else "fail"
    return Answer(probe="memory", status=status, text=f"{now.available >> 20} of {now.total >> 20} MB available")


def stuck(run_dir: Path) -> Answer:
    """Processes in uninterruptible sleep, seen twice: a driver or a mount hangs."""
    del run_dir
    first = set(_in_state_d())
    time.sleep(D_STATE_S)
    still = sorted(first & set(_in_state_d()))
    if not still:
        return Answer(probe="stuck", status="ok")
    names = ", ".join(f"{pid} ({name})" for pid, name in still[:4])
    return Answer(probe="stuck", status="warn", text=f"{len(still)} processes in state D: {names}")


def kernel(run_dir: Path) -> Answer:
    """What the kernel said in the last ten minutes."""
    del run_dir
    try:
        lines = list(_kernel_lines(_KERNEL_WINDOW_S))
    except OSError as error:
        return Answer(probe="kernel", status="unknown", text=f"/dev/kmsg: {error.strerror}", is_blind=True)
    for pattern, status in ((_FATAL, "fail"), (_WORRYING, "warn")):
        found = next((line for line in reversed(lines) if pattern.search(line)), None)
        if found is not None:
            return Answer(probe="kernel", status="fail" if status == "fail" else "warn", text=found[:200])
    return Answer(probe="kernel", status="ok")


def _in_state_d() -> Iterator[tuple[int, str]]:
    for process in psutil.process_iter(["status", "name"]):
        # Kernel threads rest in D by design.
        if process.info["status"] == psutil.STATUS_DISK_SLEEP and process.ppid() != 2:
            yield process.pid, str(process.info["name"])


def _kernel_lines(window_s: float) -> Iterator[str]:
    fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    try:
        since_us = (time.clock_gettime(time.CLOCK_MONOTONIC) - window_s) * 1e6
        while True:
            try:
                head, _, text = os.read(fd, _KERNEL_BYTES).decode(errors="replace").partition(";")
            except BlockingIOError:
                return
            except BrokenPipeError:
                continue  # lines were overwritten while we read
            if int(head.split(",")[2]) >= since_us:
                yield text.partition("\n")[0]
    finally:
        os.close(fd)


CHECKS: Final[dict[str, Callable[[Path], Answer]]] = {
    "disk": disk,
    "shm": shm,
    "storage": storage,
    "memory": memory,
    "stuck": stuck,
    "kernel": kernel,
    "clock": clock,
    "network": network,
}

OF_PLACES: Final[dict[str, Callable[[Path], Answer]]] = {"checkpoints": checkpoints}
"""Asked of folders beside the run folder."""
