"""What the fault benchmark knows of faults, what it writes down of one trial, and how it looks at processes."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

FAULT_RANK, FAULT_STEP, STEPS = 1, 40, 80
LAUNCHER_FAULTS = ("launcher_kill9", "launcher_term", "launcher_term_stuck")
HANG_FAULTS = ("sigstop", "hang_sleep", "hang_gil", "hang_hbthread")
NOBODY_TO_BLAME = ("none", "longpause", *LAUNCHER_FAULTS)
FAULTS = {
    "none": "no fault: must finish without a restart",
    "kill9": "SIGKILL to self",
    "segv": "null dereference",
    "raise": "uncaught RuntimeError",
    "raise_slowpeer": "uncaught RuntimeError; the peers die first of a closed connection",
    "exit3": "sys.exit(3)",
    "exit0": "clean exit of one rank while its peers still train",
    "oom_as": "RLIMIT_AS reached: MemoryError",
    "oom_cgroup": "memory cgroup limit: kernel OOM kill (root)",
    "orphan": "SIGKILL with a grandchild in a session of its own",
    "determ": "RuntimeError at the same step in every attempt",
    "longpause": "legitimate pause, not a fault",
    "node_agent_kill9": "SIGKILL to the parent of the rank (midwatch: the node agent)",
    "launcher_kill9": "SIGKILL to the launcher: what lives on?",
    "launcher_term": "SIGTERM to the launcher",
    "launcher_term_stuck": "SIGTERM to the launcher while one rank ignores SIGTERM",
    "sigstop": "SIGSTOP to self (five lines)",
    "hang_sleep": "sleep for ever outside a collective (five lines)",
    "hang_gil": "C call that sleeps for ever holding the GIL (five lines)",
    "hang_hbthread": "main thread stuck, a side thread alive (five lines)",
    "mismatch": "one rank skips one all-reduce and trains on (five lines)",
}

CLASSES = {
    "kill9": ("killed_outside",),
    "segv": ("native_crash",),
    "raise": ("user_exception",),
    "raise_slowpeer": ("user_exception", "rank_left"),
    "exit3": ("explicit_exit",),
    "exit0": ("early_exit",),
    "oom_as": ("memory_error",),
    "oom_cgroup": ("host_out_of_memory",),
    "orphan": ("killed_outside",),
    "determ": ("user_exception",),
    "node_agent_kill9": ("agent_lost",),
    "sigstop": ("frozen",),
    "mismatch": ("collective_mismatch",),
    **dict.fromkeys(("hang_sleep", "hang_gil", "hang_hbthread"), ("hang",)),
}
"""What each is to be called; of a culprit that takes its time to unwind either is true at its moment."""


@dataclass
class Cell:
    """One launcher, one fault, one run."""

    launcher: str
    fault: str
    rc: int | None = None
    form: str = ""
    """``five`` when the script uses the library: a verified checkpoint is loaded and the resume proved."""
    train_s: float | None = None
    again_s: float | None = None
    """The same from the end of the first process: an exception takes up to half a second to unwind, which is the
    script's own time with any launcher."""
    stopped_s: float | None = None
    """From the end of the first process of the hurt attempt until all of its processes had ended."""
    is_warm: bool | None = None
    """The new ranks were forked from a parked process."""
    detect_s: float | None = None
    blamed: int | None = None
    blamed_node: str | None = None
    confidence: str = ""
    fault_class: str = ""
    suspects: list[int] = field(default_factory=list)
    differed_at: int | None = None
    """The step at which ranks were seen to be out of step."""
    deadline_s: float | None = None
    suspected_s: float | None = None
    confirmed_s: float | None = None
    attempts: int = 0
    finished_ranks: int = 0
    leftovers: list[str] = field(default_factory=list)
    dir: str = ""

    @property
    def is_culprit_right(self) -> bool:
        if self.fault == "node_agent_kill9":
            return self.blamed is None and bool(self.blamed_node)
        if self.blamed is None:  # nobody is named, but the guilty one is among few
            return self.suspects == [FAULT_RANK] or (self.confidence == "weak" and FAULT_RANK in self.suspects)
        return self.blamed == FAULT_RANK

    @property
    def is_class_right(self) -> bool:
        return self.fault_class in CLASSES.get(self.fault, (self.fault_class,))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def tagged(tag: str) -> Iterator[tuple[int, str]]:
    """(pid, command line) of the living processes that carry our tag in their environment."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if tag.encode() not in (entry / "environ").read_bytes():
                continue
            if (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                yield int(entry.name), (entry / "cmdline").read_text().replace("\0", " ")[:100]
        except OSError:
            continue


def midwatch_tag_of(pid: int) -> str:
    """What this launcher's processes and shared memory are named by, read off a living rank."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((word.decode().partition("=")[2] for word in words if word.startswith(b"MIDWATCH_TAG=")), "")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def events_of(folder: Path) -> list[dict]:
    events = []
    for path in folder.glob("rank*.jsonl"):
        for line in path.read_text().splitlines():
            try:
                events.append(json.loads(line))
            except ValueError:  # a rank died in mid-line
                continue
    return sorted(events, key=lambda e: e["t"])
