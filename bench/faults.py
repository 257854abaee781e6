#!/usr/bin/env python3
"""Fault benchmark: midwatch beside torchrun, one fault at a time, measured from outside.

    python bench/faults.py list
    python bench/faults.py run --launcher midwatch --fault kill9
    python bench/faults.py compare [--rounds 3] [--faults kill9,segv]      medians, ratios, bars
    python bench/faults.py restarts [--count 50]                           kill, restart, and again

For each cell: seconds from the fault until every rank of a new attempt finished a step, whom the launcher blames, and
what is left running when it is gone. torchrun runs with its shared-store defect switched off
(``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``): with its defaults two of three restarts never train again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

WORKER = Path(__file__).with_name("fault_worker.py")
FAULT_RANK, FAULT_STEP, STEPS = 1, 40, 80
EXIT_FAULTS = ("kill9", "segv", "raise", "raise_slowpeer", "exit3", "exit0", "oom_as", "oom_cgroup", "orphan")
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
}


@dataclass
class Cell:
    """One launcher, one fault, one run."""

    launcher: str
    fault: str
    rc: int | None = None
    train_s: float | None = None
    detect_s: float | None = None
    blamed: int | None = None
    blamed_node: str | None = None
    confidence: str = ""
    fault_class: str = ""
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
        return self.blamed == FAULT_RANK


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


def events_of(folder: Path) -> list[dict]:
    events = []
    for path in folder.glob("rank*.jsonl"):
        for line in path.read_text().splitlines():
            try:
                events.append(json.loads(line))
            except ValueError:  # a rank died in mid-line
                continue
    return sorted(events, key=lambda e: e["t"])


class Trial:
    """Starts one launcher on one fault and watches it from outside."""

    def __init__(self, launcher: str, fault: str, *, budget_s: float = 90.0, max_restarts: int = 3, nproc: int = 2):
        self.cell = Cell(launcher, fault)
        self.budget_s, self.max_restarts, self.nproc = budget_s, max_restarts, nproc
        self.dir = Path(tempfile.mkdtemp(prefix=f"bench_{launcher}_{fault}_"))
        self.cell.dir = str(self.dir)
        self.run_dir = self.dir / "run"
        self.tag = f"BENCH_FAULTS_TAG={self.dir.name}"
        self.fault_t: float | None = None
        self.midwatch_tag = ""

    def command(self) -> list[str]:
        train = [str(WORKER), "--dir", str(self.dir), "--steps", str(STEPS), "--fault", self.cell.fault]
        train += ["--fault-step", str(FAULT_STEP), "--fault-rank", str(FAULT_RANK)]
        if self.cell.launcher == "torchrun":
            head = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--rdzv-backend=c10d"]
            head += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", f"--max-restarts={self.max_restarts}"]
            return [*head, f"--nproc-per-node={self.nproc}", "--redirects=3", f"--log-dir={self.dir}/logs", *train]
        five_lines = ["--five-lines"] if self.cell.fault in (*HANG_FAULTS, "longpause") else []
        head = [str(Path(sys.executable).with_name("midwatch")), "run", f"--nproc-per-node={self.nproc}"]
        head += ["--run-dir", str(self.run_dir), f"--max-restarts={self.max_restarts}"]
        return [*head, "--set", "restart.backoff_s=[0]", "--", *train, *five_lines]

    def run(self) -> Cell:
        env = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        env["BENCH_FAULTS_TAG"] = self.dir.name
        with (self.dir / "launcher.log").open("wb") as log:
            process = subprocess.Popen(
                self.command(), stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True, cwd=self.dir
            )
            try:
                self.watch(process)
            finally:
                self.clean_up(process)
        self.read_blame()
        return self.cell

    def watch(self, process: subprocess.Popen) -> None:
        end = time.time() + self.budget_s
        while time.time() < end:
            time.sleep(0.02)
            events = events_of(self.dir)
            if events and not self.midwatch_tag:
                self.midwatch_tag = midwatch_tag_of(events[0]["pid"])
            self.hurt_launcher(process, events)
            self.note(events)
            if process.poll() is not None:
                break
        self.cell.rc = process.poll()
        events = events_of(self.dir)
        self.note(events)
        self.cell.finished_ranks = sum(e["ev"] == "done" for e in events)
        self.cell.attempts = len({e["pid"] for e in events if e["ev"] == "proc_start" and e["rank"] == 0})

    def hurt_launcher(self, process: subprocess.Popen, events: list[dict]) -> None:
        if not self.cell.fault.startswith("launcher") or self.fault_t is not None:
            return
        ready = {e["rank"] for e in events if e["ev"] == "step" and e["step"] >= FAULT_STEP}
        if len(ready) >= self.nproc:
            self.fault_t = time.time()
            process.send_signal(signal.SIGKILL if self.cell.fault == "launcher_kill9" else signal.SIGTERM)

    def note(self, events: list[dict]) -> None:
        if self.fault_t is None:
            self.fault_t = next((e["t"] for e in events if e["ev"] == "fault"), None)
        if self.fault_t is None or self.cell.train_s is not None:
            return
        reborn = {e["pid"] for e in events if e["ev"] == "proc_start" and e["t"] > self.fault_t}
        first: dict[int, float] = {}
        for e in events:
            if e["ev"] == "step" and e["pid"] in reborn:
                first.setdefault(e["rank"], e["t"])
        if len(first) >= self.nproc:
            self.cell.train_s = round(max(first.values()) - self.fault_t, 2)

    def clean_up(self, process: subprocess.Popen) -> None:
        if self.cell.rc is not None:
            time.sleep(1.0)  # the promise is: gone within a second of the launcher's end
            self.cell.leftovers = [f"{pid} {command}" for pid, command in tagged(self.tag)]
            if self.midwatch_tag:
                self.cell.leftovers += [str(path) for path in Path("/dev/shm").glob(f"midwatch-{self.midwatch_tag}-*")]
        else:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                pass
        for pid, _ in tagged(self.tag):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        process.wait(10)

    def read_blame(self) -> None:
        if self.cell.launcher == "torchrun":
            self.read_torchrun_blame()
        else:
            self.read_verdict()

    def read_torchrun_blame(self) -> None:
        """The root cause it prints at the end or, where it recovered, the first rank it reports as failed."""
        text = (self.dir / "launcher.log").read_text(errors="replace")
        root = re.search(r"Root Cause \(first observed failure\):.*?rank\s*:\s*(\d+)", text, re.S)
        failed = re.search(r"failed \(exitcode: -?\d+\) local_rank: (\d+)", text)
        match = failed or root
        self.cell.blamed = int(match[1]) if match else None

    def read_verdict(self) -> None:
        verdicts = sorted(self.run_dir.glob("incidents/*/verdict.json"), key=lambda p: p.stat().st_mtime)
        if verdicts:
            verdict = json.loads(verdicts[0].read_text())
            self.cell.blamed, self.cell.confidence = verdict["root_rank"], verdict["confidence"]
            self.cell.fault_class, self.cell.blamed_node = verdict["fault_class"], verdict["root_node"]
        ledger = self.run_dir / "ledger" / "coordinator.jsonl"
        if not ledger.exists() or self.fault_t is None:
            return
        for line in ledger.read_text().splitlines():
            entry = json.loads(line)
            after = entry["ts_ns"] / 1e9 - self.fault_t
            if after < 0:
                continue
            if entry["event"] == "rank.suspected" and self.cell.suspected_s is None:
                self.cell.suspected_s = round(after, 2)
                self.cell.deadline_s = entry["data"]["deadline_s"]
            if entry["event"] in ("fault.suspected", "node.lost") and self.cell.detect_s is None:
                self.cell.detect_s = round(after, 2)
            if entry["event"] == "fault.judged" and self.cell.confirmed_s is None:
                self.cell.confirmed_s = round(after, 2)


def compare(faults: list[str], rounds: int, out: Path) -> int:
    """Interleaves the launchers round by round, prints medians; the exit code says whether every bar holds."""
    cells: list[Cell] = []
    for _ in range(rounds):
        for fault in faults:
            launchers = (
                ["midwatch"] if fault in (*HANG_FAULTS, "node_agent_kill9", "longpause") else ["torchrun", "midwatch"]
            )
            for launcher in launchers:
                cell = Trial(launcher, fault).run()
                cells.append(cell)
                out.parent.mkdir(parents=True, exist_ok=True)
                with out.open("a") as file:
                    file.write(json.dumps(asdict(cell)) + "\n")
                print(
                    f"{launcher:9s} {fault:20s} again {cell.train_s} s, blames {cell.blamed} {cell.fault_class} "
                    f"{cell.confidence}, rc {cell.rc}, left {cell.leftovers}",
                    flush=True,
                )
                if not cell.leftovers:
                    shutil.rmtree(cell.dir, ignore_errors=True)
    return report(cells, faults)


def report(cells: list[Cell], faults: list[str]) -> int:
    head = ("fault", "torchrun: training again s", "midwatch: training again s", "torchrun blames", "midwatch blames")
    print("\n| " + " | ".join((*head, "class", "left", "bars")) + " |")
    print("|---|---|---|---|---|---|---|---|")
    is_good = True
    for fault in faults:
        theirs = [c for c in cells if c.fault == fault and c.launcher == "torchrun"]
        ours = [c for c in cells if c.fault == fault and c.launcher == "midwatch"]
        broken = list(broken_bars(fault, theirs, ours))
        is_good &= not broken
        seconds = ["-" if fault in NOBODY_TO_BLAME else median(c.train_s for c in side) for side in (theirs, ours)]
        print(
            f"| {fault} | {seconds[0]} | {seconds[1]} | {blames(theirs)} | "
            f"{blames(ours)} | {ours[0].fault_class if ours else ''} | {sum(len(c.leftovers) for c in ours)} | "
            f"{'; '.join(broken) or 'ok'} |"
        )
    return 0 if is_good else 1


def broken_bars(fault: str, theirs: list[Cell], ours: list[Cell]) -> Iterator[str]:
    if any(c.leftovers for c in ours):
        yield "left something running"
    if fault in ("none", "longpause"):
        if any(c.attempts != 1 or c.rc != 0 for c in ours):
            yield "false alarm"
        return
    if fault.startswith("launcher"):
        return
    if not all(c.is_culprit_right for c in ours):
        yield "culprit wrong"
    if any(c.train_s is None for c in ours) and fault != "determ":
        yield "did not train again"
    known = [c.train_s for c in theirs if c.train_s is not None]
    mine = [c.train_s for c in ours if c.train_s is not None]
    if known and mine and statistics.median(mine) > statistics.median(known) + 0.5:
        yield "slower than torchrun + 0.5 s"
    if fault in HANG_FAULTS:
        yield from broken_hang_bars(fault, ours)


def broken_hang_bars(fault: str, ours: list[Cell]) -> Iterator[str]:
    for c in ours:
        if c.suspected_s is None or c.confirmed_s is None or c.deadline_s is None:
            yield "never suspected or confirmed"
        elif c.deadline_s > 5.0 or c.suspected_s > c.deadline_s + 1 or c.confirmed_s > c.deadline_s + 2:
            yield f"late: deadline {c.deadline_s}, suspected {c.suspected_s}, confirmed {c.confirmed_s}"
        elif fault == "sigstop" and c.confirmed_s > 2:
            yield f"a stopped rank took {c.confirmed_s} s"


def median(values: Iterator[float | None]) -> str:
    known = list(values)
    if not known:
        return "-"
    numbers = [v for v in known if v is not None]
    never = len(known) - len(numbers)
    text = f"{statistics.median(numbers):.2f}" if numbers else ""
    return text + (f" (never: {never} of {len(known)})" if never else "")


def blames(cells: list[Cell]) -> str:
    named = {c.blamed_node if c.fault == "node_agent_kill9" else c.blamed for c in cells}
    is_right = all(c.is_culprit_right or c.fault in NOBODY_TO_BLAME for c in cells)
    return ", ".join(sorted("-" if who is None else str(who) for who in named)) + ("" if is_right else " WRONG")


def restarts(count: int) -> int:
    """``count`` kills in ``count`` attempts of one run: each must train again."""
    folder = Path(tempfile.mkdtemp(prefix="bench_restarts_"))
    script = folder / "worker.py"
    script.write_text(_RESTART_WORKER)
    command = [
        str(Path(sys.executable).with_name("midwatch")),
        "run",
        "--nproc-per-node=2",
        "--run-dir",
        str(folder / "run"),
    ]
    command += [
        f"--max-restarts={count + 5}",
        "--set",
        "restart.backoff_s=[0]",
        "--",
        str(script),
        str(folder),
        str(count),
    ]
    began = time.time()
    done = subprocess.run(
        command, env=dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"), timeout=60 + 15 * count
    )
    trained = len(list(folder.glob("trained-*")))
    gaps = sorted(json.loads(p.read_text())["gap_s"] for p in folder.glob("trained-*") if p.name != "trained-0")
    print(
        f"{trained - 1} of {count} restarts trained again, exit code {done.returncode}, {time.time() - began:.0f} s, "
        f"kill to training median {statistics.median(gaps):.2f} s, worst {gaps[-1]:.2f} s"
    )
    return 0 if trained == count + 1 and done.returncode == 0 else 1


_RESTART_WORKER = """
import json, os, pathlib, signal, sys, time
import torch, torch.distributed as dist
folder, count = pathlib.Path(sys.argv[1]), int(sys.argv[2])
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
torch.set_num_threads(1)
dist.init_process_group("gloo")
for _ in range(3):
    dist.all_reduce(torch.ones(8))
stamp = folder / "killed_at"
if rank == 0:
    gap = time.time() - float(stamp.read_text()) if stamp.exists() else 0.0
    (folder / f"trained-{attempt}").write_text(json.dumps({"gap_s": gap}))
dist.all_reduce(torch.ones(8))
if attempt < count and rank == attempt % 2:
    stamp.write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(8))
dist.destroy_process_group()
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list")
    one = verbs.add_parser("run")
    one.add_argument("--launcher", choices=("midwatch", "torchrun"), default="midwatch")
    one.add_argument("--fault", choices=FAULTS, required=True)
    many = verbs.add_parser("compare")
    many.add_argument("--rounds", type=int, default=3)
    default = (*EXIT_FAULTS, "determ", "node_agent_kill9", *LAUNCHER_FAULTS, "sigstop", "hang_sleep", "none")
    many.add_argument("--faults", default=",".join(default))
    many.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "faults.jsonl")
    again = verbs.add_parser("restarts")
    again.add_argument("--count", type=int, default=50)
    args = parser.parse_args()
    if args.verb == "list":
        print("\n".join(f"{name:20s} {text}" for name, text in FAULTS.items()))
    elif args.verb == "run":
        print(json.dumps(asdict(Trial(args.launcher, args.fault).run()), indent=1))
    elif args.verb == "compare":
        return compare(args.faults.split(","), args.rounds, args.out)
    else:
        return restarts(args.count)
    return 0


if __name__ == "__main__":
    sys.exit(main())
