"""A real ``midwatch run`` around a tiny trainer without torch, and the questions tests ask about it."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIDWATCH = str(Path(sys.executable).parent / "midwatch")

TRAINER = '''
"""Steps in lockstep through files: a rank waits for its peers as in a collective, and fails when one has gone."""
import ctypes, os, signal, subprocess, sys, time
from contextlib import nullcontext
from pathlib import Path

home, steps, fault, mode = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
attempt = int(os.environ["MIDWATCH_ATTEMPT"])

def mark(name, text):
    part = home / f".{name}.part{rank}"
    part.write_text(str(text))
    part.replace(home / name)

def read(name, default):
    try:
        return int((home / name).read_text())
    except (OSError, ValueError):
        return default

def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True

mark(f"pid-a{attempt}-r{rank}", os.getpid())
mark(f"port-a{attempt}-r{rank}", os.environ["MASTER_PORT"])
if fault == "import" and rank == world - 1:
    import no_such_module
done = read("checkpoint", -1)
pulse = None
if mode == "attached":
    from midwatch.pulse import Flag, writer_from_env
    pulse = writer_from_env()
    pulse.begin(os.getpid(), attempt)
    pulse.resumed(None if done < 0 else done, "" if done < 0 else f"{done:016x}", "c" * 16)
    while not pulse.flags() & Flag.GO:
        time.sleep(0.005)

# In stack samples this is the library, so that waiting here is told from being stuck in user code.
exec(compile("""
def all_reduce(step):
    mark(f"at-a{attempt}-r{rank}", step)
    for peer in range(world):
        while read(f"at-a{attempt}-r{peer}", -1) < step:
            pid = read(f"pid-a{attempt}-r{peer}", 0)
            if pid and is_gone(pid) and read(f"at-a{attempt}-r{peer}", -1) < step:
                raise RuntimeError("Connection closed by peer [127.0.0.1]:" + str(peer))
            time.sleep(0.002)
""", "torch/distributed/stand_in.py", "exec"))

def inject():
    if fault == "kill9": os.kill(os.getpid(), signal.SIGKILL)
    if fault == "segv": ctypes.string_at(0)
    if fault in ("raise", "determ"): raise ValueError("bad batch 17")
    if fault == "exit3": sys.exit(3)
    if fault == "exit0": os._exit(0)
    if fault == "sigstop": os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "sleep": time.sleep(3600)
    if fault == "grandchild":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        mark("grandchild", child.pid)
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "park":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        mark("grandchild", child.pid)

for step in range(done + 1, steps):
    if pulse:
        pulse.beat(step)
        # Ranks hear of it at different moments, and leave after the same step, as those with the five lines do.
        if pulse.flags() & Flag.STOP and not read(f"stop-at-a{attempt}", 0):
            mark(f"stop-at-a{attempt}", step + 2)
        if 0 < read(f"stop-at-a{attempt}", 0) <= step:
            mark(f"saved-r{rank}", step)
            sys.exit(0)
    if step == 12 and rank == world - 1 and (attempt == 1 or fault == "determ"):
        inject()
    with pulse.phase("collective") if pulse else nullcontext():
        all_reduce(step)
    time.sleep(0.01)
    if rank == 0 and step % 5 == 0:
        mark("checkpoint", step)
if pulse:
    pulse.finished()
mark(f"done-r{rank}", attempt)
'''


class Supervised:
    """One launcher process (or several, for several nodes) over one run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.home = folder / "home"
        self.home.mkdir(exist_ok=True)
        self.script = folder / "train.py"
        self.script.write_text(TRAINER)
        self.mark = f"midwatch-test-{secrets.token_hex(8)}"
        self.launchers: list[subprocess.Popen[str]] = []

    def start(
        self, fault: str, *options: str, steps: int = 40, mode: str = "plain", nproc: int = 2
    ) -> subprocess.Popen[str]:
        """``midwatch run`` on the trainer; returns at once."""
        command = [str(self.script), str(self.home), str(steps), fault, mode]
        return self.start_command(command, "--nproc-per-node", str(nproc), *options)

    def start_command(self, command: list[str], *options: str) -> subprocess.Popen[str]:
        output = (self.folder / f"launcher-{len(self.launchers)}.log").open("w")
        launcher = subprocess.Popen(
            [MIDWATCH, "run", "--run-dir", str(self.run_dir), *options, "--", *command],
            env={**os.environ, "TEST_MARK": self.mark, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            cwd=self.folder,
        )
        output.close()
        self.launchers.append(launcher)
        return launcher

    def wait(self, launcher: subprocess.Popen[str], timeout_s: float = 60.0) -> int:
        try:
            return launcher.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.story()}") from None

    def until(self, what: str, fact: Callable[[], Any], timeout_s: float = 30.0) -> Any:
        """Wait until ``fact`` is true, and return it."""
        end = time.monotonic() + timeout_s
        while not (value := fact()):
            assert time.monotonic() < end, f"{what} did not come in {timeout_s} s:\n{self.story()}"
            time.sleep(0.005)
        return value

    def number(self, name: str) -> int:
        """A number the trainer wrote; 0 when it has not yet."""
        try:
            return int((self.home / name).read_text())
        except (OSError, ValueError):
            return 0

    def until_training(self, attempt: int = 1, step: int = 8) -> None:
        self.until(f"step {step} of attempt {attempt}", lambda: self.number(f"at-a{attempt}-r0") >= step)

    def ledger(self) -> list[dict[str, Any]]:
        path = self.run_dir / "ledger" / "coordinator.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.ledger() if line["event"] == name]

    def verdict(self) -> dict[str, Any]:
        """The data of the first judgement."""
        return self.events("fault.judged")[0]["data"]

    def pids(self) -> dict[int, str]:
        """Everything alive that this test started, by pid, with its command line."""
        found: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                is_ours = self.mark.encode() in (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if is_ours and state not in "ZX":
                found[int(entry.name)] = words.strip()
        return found

    def pid_of(self, words: str) -> int:
        """The one process whose command line holds these words; 0 when there is none."""
        return next((pid for pid, line in self.pids().items() if words in line), 0)

    def shm(self) -> list[str]:
        """Names in shared memory of this test's invocations."""
        tags = {line["data"]["tag"] for line in self.events("run.started")}
        return [name for name in os.listdir("/dev/shm") if any(tag in name for tag in tags)]

    def assert_nothing_left(self, within_s: float = 0.0) -> None:
        end = time.monotonic() + within_s
        while (left := self.pids()) and time.monotonic() < end:
            time.sleep(0.01)
        assert left == {}
        assert self.shm() == []

    def story(self) -> str:
        """What there is to read when a test fails."""
        logs = [*sorted(self.folder.glob("launcher-*.log")), *sorted((self.run_dir / "supervisor").glob("*.log"))]
        texts = [f"--- {path.name}\n{path.read_text()[-3000:]}" for path in logs]
        lines = self.ledger()
        began_ns = lines[0]["ts_ns"] if lines else 0
        told = (f"{(line['ts_ns'] - began_ns) / 1e9:7.3f} {line['event']} {line['data']}" for line in lines)
        return "\n".join([*texts, *told, str(self.pids())])

    def close(self) -> None:
        """End whatever a failed test left: first the launchers, so that their guardians clean up, then the rest."""
        for launcher in self.launchers:
            launcher.kill()
            launcher.wait(10)
        end = time.monotonic() + 5.0
        while self.pids() and time.monotonic() < end:
            time.sleep(0.01)
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
