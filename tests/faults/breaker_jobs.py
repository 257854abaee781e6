"""Real training that goes astray where it is told to, on one rank, several, or several nodes; judged in either form."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from midwatch.audit import Desk, merged
from midwatch.checkpoint.format import list_checkpoints

MIDWATCH = str(Path(sys.executable).with_name("midwatch"))
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
LIMIT_S = 120.0
SICK = tuple(range(25, 31))
"""Batches whose loss is not what it should be."""
TOTAL = 40

SCRIPT = '''
import json, os, sys, threading, time
from pathlib import Path
import torch
import midwatch

out, config, plan = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
torch.manual_seed(0)
world = int(os.environ.get("WORLD_SIZE", "1"))
if world > 1:
    torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank() if world > 1 else 0

class Data:
    """Counts the batches; its place is saved."""
    position = 0
    def state_dict(self):
        return {"position": self.position}
    def load_state_dict(self, state):
        self.position = state["position"]

class Sgd(torch.optim.SGD):
    """Notes the rate that a step is made with, and what came of it."""
    used = 0.0
    def step(self, closure=None):
        self.used = self.param_groups[0]["lr"]
        done = super().step(closure)
        (out / f"stepped-r{rank}").write_text(weights())
        return done

def weights():
    return json.dumps([p.flatten().tolist() for p in model.parameters()])

def answer(ask=out / f"ask-r{rank}"):
    """The weights as they are now, to whoever asks while the loop stands still."""
    while True:
        if ask.exists():
            part = out / f".weights-r{rank}"
            part.write_text(weights())
            part.rename(out / f"weights-r{rank}")
            ask.unlink()
        time.sleep(0.05)

def is_sick(step, position):
    is_mine = plan["rank"] in (None, rank) and plan["node"] in ("", os.environ.get("MIDWATCH_NODE", ""))
    return is_mine and (position in plan["batches"] or step in plan["steps"])

run = midwatch.attach(config)
model = torch.nn.Linear(4, 1)
if plan["ddp"]:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = Sgd(model.parameters(), lr=0.1)
data = Data()
run.track(model=model, optimizer=optimizer, data=data)
if plan["is_asked"]:
    threading.Thread(target=answer, daemon=True).start()
start = run.resume(**plan["resume"])
steps = (out / f"steps-r{rank}").open("a", buffering=1)
for step in run.steps(start, plan["total"]):
    while run.skips(data.position):
        data.position += 1
    run.batch(data.position)
    loss = model(torch.ones(2, 4)).square().mean() + 1.0
    if is_sick(step, data.position):
        loss = loss * float(plan["factor"])
    if plan["is_log_only"] or run.guard(loss=loss).ok:
        optimizer.zero_grad()
        loss.backward()
        if plan["rate"] is not None:
            optimizer.param_groups[0]["lr"] = plan["rate"]
        optimizer.step()
        print(json.dumps([step, data.position, round(optimizer.used, 9)]), file=steps)
    data.position += 1
    if step == plan["stops_at"]:
        run.request_stop()
    run.log(loss=loss)
'''

Process = subprocess.Popen[str]


class Job:
    """A training script in a folder of its own.

    Args:
        folder: For everything.
        batches: Sick ones, by their position in the data.
        factor: What the loss is multiplied by there.
        plan: More of it: ``steps`` that are sick wherever the data are, the only ``rank`` or ``node`` that is sick,
            ``total`` steps, a learning ``rate`` that the script sets itself, ``ddp``, arguments of ``resume``;
            ``is_log_only`` for a script that never calls ``run.guard``, ``is_asked`` for one that ``weights`` asks,
            ``stops_at`` a step where it asks for an end.
        checkpoint: Settings beside the defaults below.
        alerts: Whom to tell; nobody by default.
        guards: As ``checkpoint``.
    """

    def __init__(
        self,
        folder: Path,
        batches: Sequence[int] = SICK,
        factor: str = "nan",
        *,
        plan: dict[str, Any] | None = None,
        checkpoint: dict[str, Any] | None = None,
        alerts: dict[str, Any] | None = None,
        **guards: Any,
    ) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.script = folder / "train.py"
        self.script.write_text(SCRIPT)
        usual = {"steps": [], "rank": None, "node": "", "total": TOTAL, "rate": None, "ddp": False, "resume": {}}
        usual |= {"is_log_only": False, "is_asked": False, "stops_at": None}
        self.plan = {"batches": list(batches), "factor": factor, **usual, **(plan or {})}
        self.config = {
            "run": {"dir": str(self.run_dir), "log_every": 1},
            "checkpoint": {"interval": 5, "keep_last": 8, **(checkpoint or {})},
            "guards": {"breaker": {"rewind_steps": 8, **guards.pop("breaker", {})}, **guards},
            **({"alerts": alerts} if alerts else {}),
        }
        self.mark = f"midwatch-test-{secrets.token_hex(8)}"
        self.processes: list[Process] = []

    # --- starting -------------------------------------------------------------------------------------------------

    def start(self, *, world: int = 1, launcher: tuple[str, ...] = ()) -> list[Process]:
        """The ranks, each a process; or one launcher for all of them."""
        if launcher:
            return [self._spawn([*launcher, *self._script()], {})]
        port = _free_port()
        places = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)} for rank in range(world)]
        return [self._spawn([sys.executable, *self._script()], {"MASTER_PORT": port, **place}) for place in places]

    def supervise(self, *options: str) -> Process:
        """``midwatch run`` around the script."""
        (process,) = self.start(launcher=(MIDWATCH, "run", "--run-dir", str(self.run_dir), *options, "--"))
        return process

    def join(self, name: str, nnodes: str, *options: str) -> Process:
        """One node of several, with one rank."""
        usual = ("--nproc-per-node", "1", "--set", "restart.backoff_s=[0]", "--set", "isolate.gate=false")
        return self.supervise("--nnodes", nnodes, "--node-name", name, *usual, *options)

    def _script(self) -> list[str]:
        return [str(self.script), str(self.folder), json.dumps(self.config), json.dumps(self.plan)]

    def _spawn(self, command: list[str], place: dict[str, str]) -> Process:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("MIDWATCH", "TORCHELASTIC"))}
        ours = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "TEST_MARK": self.mark}
        with (self.folder / f"log-{len(self.processes)}").open("w") as log:
            env = {**clean, **ours, **place}
            process = subprocess.Popen(command, stdout=log, stderr=log, text=True, env=env, start_new_session=True)
        self.processes.append(process)
        return process

    # --- waiting --------------------------------------------------------------------------------------------------

    def until(self, what: str, fact: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
        end = time.monotonic() + limit_s
        while not (found := fact()):
            assert time.monotonic() < end, f"no {what}:\n{self.story()}"
            assert any(process.poll() is None for process in self.processes), f"ended before {what}:\n{self.story()}"
            time.sleep(0.02)
        return found

    def until_paused(self, times: int = 1) -> None:
        self.until("run", lambda: any((self.run_dir / "ledger").glob("*.jsonl")))
        self.until("pause", lambda: len(self.events("breaker.paused")) >= times)
        self.until("memory", lambda: Desk(self.run_dir).memory().get("state") == "open")

    def wait(self, process: Process, limit_s: float = LIMIT_S) -> int:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.story()) from None

    def end(self, process: Process, number: signal.Signals) -> int:
        process.send_signal(number)
        return self.wait(process)

    # --- asking ---------------------------------------------------------------------------------------------------

    def decide(self, *words: str) -> str:
        return self.midwatch("breaker", words[0], str(self.run_dir), *words[1:], "--reason", "test")

    def midwatch(self, *words: str, code: int = 0) -> str:
        done = subprocess.run([MIDWATCH, *words], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    def shown(self) -> dict[str, Any]:
        """What the breaker shows to programs."""
        return json.loads(self.midwatch("breaker", "show", str(self.run_dir), "--json"))

    def steps(self, rank: int = 0) -> list[tuple[int, int, float]]:
        """(step, batch, learning rate) of every optimizer step that was made."""
        return [tuple(json.loads(line)) for line in (self.folder / f"steps-r{rank}").read_text().splitlines()]

    def weights(self, ranks: int) -> list[tuple[str, str]]:
        """Of each rank the weights as they are now, and as its last optimizer step left them; for ``is_asked``."""
        found: list[tuple[str, str]] = []
        for rank in range(ranks):
            (ask := self.folder / f"ask-r{rank}").touch()
            self.until("answer", lambda ask=ask: not ask.exists())
            now, stepped = (self.folder / f"{name}-r{rank}" for name in ("weights", "stepped"))
            found.append((now.read_text(), stepped.read_text()))
        return found

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line.data for line in merged(self.run_dir) if line.event == name]

    def checkpoints(self, *, suspect: bool) -> list[int]:
        """Their steps."""
        found = list_checkpoints(self.run_dir / "checkpoints", run_dir=self.run_dir)
        return sorted(info.step for info in found if info.is_suspect == suspect)

    def pids(self, words: str = "") -> list[int]:
        """What this job has started and still lives, by a part of the command line."""
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes():
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found += [int(entry.name)] if line and words in line else []
        return found

    def until_gone(self) -> None:
        """Everything that a killed launcher had started."""
        end = time.monotonic() + 10.0
        while left := self.pids():
            assert time.monotonic() < end, f"{left} still live:\n{self.story()}"
            time.sleep(0.02)

    def story(self) -> str:
        logs = [*sorted(self.folder.glob("log-*")), *sorted((self.run_dir / "logs").rglob("*.err"))]
        texts = [f"--- {path}\n{path.read_text()[-3000:]}" for path in logs]
        with contextlib.suppress(Exception):
            texts += [f"{line.writer} {line.event} {line.step} {line.data}"[:300] for line in merged(self.run_dir)]
        return "\n".join(texts)

    def close(self) -> None:
        """End whatever a failed test left: first the launchers, so that their guardians clean up, then the rest."""
        for process in self.processes:
            process.kill()
            process.wait(10)
        end = time.monotonic() + 5.0
        while self.pids() and time.monotonic() < end:
            time.sleep(0.02)
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def jobs_in(folder: Path) -> Iterator[Callable[..., Job]]:
    """Makes jobs of a test, and ends them with it."""
    made: list[Job] = []

    def make(*args: Any, **kwargs: Any) -> Job:
        made.append(Job(folder, *args, **kwargs))
        return made[-1]

    try:
        yield make
    finally:
        for job in made:
            job.close()


def _free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])
