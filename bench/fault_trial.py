"""One launcher, one fault: started, watched from outside, cleaned up."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fault_cells import (
    FAULT_RANK,
    FAULT_STEP,
    HANG_FAULTS,
    STEPS,
    Cell,
    events_of,
    free_port,
    is_running,
    midwatch_tag_of,
    tagged,
)

WORKER = Path(__file__).with_name("fault_worker.py")


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
        self.exit_t: float | None = None
        self.midwatch_tag = ""

    def command(self) -> list[str]:
        train = [str(WORKER), "--dir", str(self.dir), "--steps", str(STEPS), "--fault", self.cell.fault]
        train += ["--fault-step", str(FAULT_STEP), "--fault-rank", str(FAULT_RANK)]
        if self.cell.launcher == "torchrun":
            head = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--rdzv-backend=c10d"]
            head += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", f"--max-restarts={self.max_restarts}"]
            return [*head, f"--nproc-per-node={self.nproc}", "--redirects=3", f"--log-dir={self.dir}/logs", *train]
        five_lines = ["--five-lines"] if self.cell.fault in (*HANG_FAULTS, "longpause", "mismatch") else []
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
            if process.poll() is not None or self.is_over():
                break
        self.cell.rc = process.poll()
        events = events_of(self.dir)
        self.note(events)
        self.cell.finished_ranks = sum(e["ev"] == "done" for e in events)
        self.cell.attempts = len({e["pid"] for e in events if e["ev"] == "proc_start" and e["rank"] == 0})

    def is_over(self) -> bool:
        """Nothing more is to be seen, though the launcher goes on."""
        return False

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
        if self.fault_t is None:
            return
        self.note_stop(events)
        if self.cell.train_s is not None:
            return
        reborn = {e["pid"] for e in events if e["ev"] == "proc_start" and e["t"] > self.fault_t}
        first: dict[int, float] = {}
        for e in events:
            if e["ev"] == "step" and e["pid"] in reborn:
                first.setdefault(e["rank"], e["t"])
        if len(first) >= self.nproc:
            self.cell.train_s = round(max(first.values()) - self.fault_t, 2)
            self.cell.again_s = round(max(first.values()) - (self.exit_t or self.fault_t), 2)

    def note_stop(self, events: list[dict]) -> None:
        hurt = {e["pid"] for e in events if e["ev"] == "proc_start" and e["t"] <= self.fault_t}
        if self.cell.stopped_s is not None or len(hurt) < self.nproc:
            return
        alive = sum(is_running(pid) for pid in hurt)
        if alive < len(hurt) and self.exit_t is None:
            self.exit_t = time.time()
        if not alive:
            self.cell.stopped_s = round(time.time() - self.exit_t, 2)

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
            text = (self.dir / "launcher.log").read_text(errors="replace")
            self.cell.is_warm = "forked from the parked process" in text

    def read_torchrun_blame(self) -> None:
        """The root cause it prints at the end or, where it recovered, the first rank it reports as failed."""
        text = (self.dir / "launcher.log").read_text(errors="replace")
        root = re.search(r"Root Cause \(first observed failure\):.*?rank\s*:\s*(\d+)", text, re.S)
        failed = re.search(r"failed \(exitcode: -?\d+\) local_rank: (\d+)", text)
        match = failed or root
        self.cell.blamed = int(match[1]) if match else None

    def read_verdict(self) -> None:
        verdicts = sorted(self.run_dir.glob("incidents/*/verdict.json"))
        if verdicts:
            verdict = json.loads(verdicts[0].read_text())
            self.cell.blamed, self.cell.confidence = verdict["root_rank"], verdict["confidence"]
            self.cell.fault_class, self.cell.blamed_node = verdict["fault_class"], verdict["root_node"]
            self.cell.suspects = [one["rank"] for one in verdict["suspects"] if one["rank"] is not None]
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
            if entry["event"] in ("collectives.differed", "fault.judged") and self.cell.differed_at is None:
                self.cell.differed_at = entry.get("step")
