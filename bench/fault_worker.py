"""The training program of the fault benchmark: a data-parallel loop on gloo that hurts itself once, at a fixed step.

Without ``--five-lines`` it knows nothing of any launcher (an unchanged script); with it, it is the same loop under
``midwatch.attach``. It reports what happens to it in ``rank<N>.jsonl`` files of ``--dir``, wall time in each line.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

MEBIBYTE = 1 << 20


class Worker:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.dir = Path(args.dir)

    def say(self, event: str, **facts: object) -> None:
        line = json.dumps({"ev": event, "rank": self.rank, "pid": os.getpid(), "t": time.time(), **facts})
        with (self.dir / f"rank{self.rank}.jsonl").open("a") as file:
            file.write(line + "\n")

    def main(self) -> None:
        self.say("proc_start", attempt=os.environ.get("TORCHELASTIC_RESTART_COUNT"))
        if self.args.fault == "launcher_term_stuck" and self.rank == self.args.fault_rank:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        self.weights = torch.nn.Linear(32, 32, bias=False)
        torch.nn.init.zeros_(self.weights.weight)
        for step in self.steps_of_midwatch() if self.args.five_lines else self.plain_steps():
            self.train_one_step(step)
        self.say("done")
        dist.destroy_process_group()

    def plain_steps(self) -> Iterator[int]:
        saved = self.dir / "ckpt.json"
        start = json.loads(saved.read_text())["step"] + 1 if saved.exists() else 0
        self.say("ready", start=start)
        for step in range(start, self.args.steps):
            yield step
            if self.rank == 0 and step % 5 == 0:
                fresh = saved.with_suffix(".tmp")
                fresh.write_text(json.dumps({"step": step}))
                fresh.replace(saved)

    def steps_of_midwatch(self) -> Iterator[int]:
        import midwatch

        self.run = run = midwatch.attach({"checkpoint": {"interval": 5}})
        run.track(model=self.weights)
        start = run.resume()
        self.say("ready", start=start)
        for step in run.steps(start, self.args.steps):
            yield step
            run.log(loss=1.0 / (step + 1))

    def train_one_step(self, step: int) -> None:
        import torch
        import torch.distributed as dist

        if self.is_time(step) and self.rank == self.args.fault_rank and self.is_due():
            self.say("fault", fault=self.args.fault, step=step)
            # A pause that is no fault says what it is; that is the whole difference to a hang.
            with self.run.phase("custom:pause") if self.args.fault == "longpause" else nullcontext():
                inject(self.args.fault, self.args)
            if self.args.fault == "mismatch":
                return  # the all-reduce of this step is skipped, and nothing fails of it
        with torch.no_grad():
            self.weights.weight += 1
            try:
                dist.all_reduce(self.weights.weight)
            except BaseException as error:
                self.say("secondary", err=f"{type(error).__name__}: {error}"[:200])
                raise
            self.weights.weight /= self.world
        time.sleep(0.05)
        self.say("step", step=step)

    def is_time(self, step: int) -> bool:
        if self.args.on:
            return step >= self.args.fault_step and Path(self.args.on).exists()
        return step == self.args.fault_step

    def is_due(self) -> bool:
        if self.args.fault == "none" or self.args.fault.startswith("launcher"):
            return False
        marker = self.dir / "fault_fired"
        if marker.exists() and self.args.fault != "determ":
            return False
        marker.write_text("1")
        return True


def inject(fault: str, args: argparse.Namespace) -> None:  # one branch a fault reads best
    if fault == "orphan":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    if fault in ("kill9", "orphan"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "node_agent_kill9":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    elif fault == "segv":
        ctypes.string_at(0)
    elif fault in ("raise", "determ"):
        raise RuntimeError("injected fault: bad batch")
    elif fault == "raise_slowpeer":
        import torch.distributed as dist

        dist.destroy_process_group()  # the peers see a closed connection first
        time.sleep(2.0)  # and the culprit takes its time to unwind
        raise RuntimeError("injected fault: bad batch (root cause, raised late)")
    elif fault == "exit3":
        sys.exit(3)
    elif fault == "exit0":
        os._exit(0)
    elif fault == "sigstop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "hang_sleep":
        while True:
            time.sleep(3600)
    elif fault == "hang_gil":
        ctypes.PyDLL(None).sleep(36000)
    elif fault == "hang_hbthread":
        threading.Thread(target=lambda: [time.sleep(0.1) for _ in iter(int, 1)], daemon=True).start()
        threading.Event().wait()
    elif fault == "oom_as":
        resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
        hog = [bytearray(256 * MEBIBYTE) for _ in iter(int, 1)]
        del hog
    elif fault == "oom_cgroup":
        exhaust_cgroup()
    elif fault == "longpause":
        time.sleep(args.pause)


def exhaust_cgroup() -> None:
    """Moves this process into a memory cgroup of 512 MB and fills it until the kernel kills it (v1 or v2, root)."""
    v1 = Path("/sys/fs/cgroup/memory")
    group = (v1 if v1.is_dir() else Path("/sys/fs/cgroup")) / f"bench{os.getpid()}"
    group.mkdir()
    limit = "memory.limit_in_bytes" if v1.is_dir() else "memory.max"
    (group / limit).write_text(str(512 * MEBIBYTE))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    hog: list[bytearray] = []
    while True:
        block = bytearray(64 * MEBIBYTE)
        for offset in range(0, len(block), 4096):
            block[offset] = 1
        hog.append(block)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--fault", required=True)
    parser.add_argument("--fault-step", type=int, required=True)
    parser.add_argument("--fault-rank", type=int, required=True)
    parser.add_argument("--on", default="", help="hurt yourself at the first step that finds this file")
    parser.add_argument("--pause", type=float, default=15.0)
    parser.add_argument("--five-lines", action="store_true")
    Worker(parser.parse_args()).main()


if __name__ == "__main__":
    main()
