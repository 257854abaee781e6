"""A real Slurm cluster of three nodes on this machine, and ``midwatch run`` on it with the questions tests ask."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prerequisites import LAB

ROOT = Path(__file__).resolve().parents[2]
MIDWATCH = str(Path(sys.executable).parent / "midwatch")
TRAINER = str(ROOT / "examples" / "tiny_gpt" / "train.py")
_OURS = ("bin/midwatch", "midwatch.", TRAINER)
"""In the command lines of launchers, of their helpers, and of ranks."""
UP_S = 600.0
"""Covers the download of the packages; with them a cluster is up in a second or two."""


class Lab:
    """Comes with ``up``, goes with ``down``, also when this process is killed in between."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="e2e-lab-"))
        self.folder.chmod(0o755)
        self._state = self.folder / "slurm"
        # Whatever ends this process closes the pipe, and then the cluster ends, too.
        script = 'cat; "$1" -d "$2"; rm -rf --one-file-system "$3"'
        self._guard = subprocess.Popen(
            ["bash", "-c", script, "guard", str(LAB / "slurm-down"), str(self._state), str(self.folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def up(self) -> None:
        extra = self.folder / "extra.conf"
        extra.write_text("KillWait=60\n")  # what a site gives a job between SIGTERM and SIGKILL
        command = [LAB / "slurm-up", "-n", "3", "-d", self._state, "-g", "0", "-c", "2", "-e", extra]
        prefix = f"mw{secrets.token_hex(3)}"
        done = subprocess.run(
            command,
            env={**os.environ, "LAB_PREFIX": prefix},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=UP_S,
            check=False,
        )
        assert done.returncode == 0, f"the cluster did not come up:\n{done.stdout}{done.stderr}"

    def down(self) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        assert self._guard.wait(60) == 0

    def command(self, name: str, *arguments: str) -> list[str]:
        """A Slurm command, to be run as on the login node."""
        return [str(self._state / "bin" / name), *arguments]

    def ask(self, name: str, *arguments: str) -> str:
        return self._run(self.command(name, *arguments))

    def node(self, operation: str, node: str, *arguments: str) -> str:
        """Do something to a node: see ``lab/slurm-node``."""
        return self._run([str(LAB / "slurm-node"), operation, node, *arguments])

    def processes(self, node: str) -> dict[int, tuple[str, dict[str, str]]]:
        """The node's processes: command line and environment, by the process id that the node itself uses."""
        return {
            int(pid): (words, env)
            for pid, (words, env) in json.loads(self.node("exec", node, sys.executable, "-c", _LOOK)).items()
        }

    def _run(self, command: Sequence[str]) -> str:
        env = {**os.environ, "LAB_DIR": str(self._state)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def logs(self) -> str:
        texts = [
            f"--- {path.name}\n{path.read_text()[-1500:]}" for path in sorted((self._state / "log").glob("slurm*"))
        ]
        return "\n".join(texts)


_LOOK = """
import json, pathlib
found = {}
for entry in pathlib.Path("/proc").iterdir():
    if entry.name.isdigit():
        try:
            words = (entry / "cmdline").read_bytes().replace(b"\\0", b" ").decode(errors="replace").strip()
            pairs = [p.partition("=") for p in (entry / "environ").read_bytes().decode(errors="replace").split("\\0")]
        except OSError:
            continue
        found[int(entry.name)] = (words, {n: v for n, _, v in pairs if n in ("RANK", "MIDWATCH_ATTEMPT")})
print(json.dumps(found))
"""


class ClusterRun:
    """One run folder on the shared file system, and the ``srun``s that work on it."""

    def __init__(self, lab: Lab, steps: int) -> None:
        self.lab = lab
        self.steps = steps
        self.nnodes = "2"
        self.trainer: list[str] = []
        """In place of the example's."""
        self.settings = ["checkpoint.interval=10", "run.log_every=1", "restart.backoff_s=[0]"]
        self.run_dir = lab.folder / f"run-{secrets.token_hex(3)}"
        self.result_file = self.run_dir.with_suffix(".json")
        self.sruns: list[subprocess.Popen[bytes]] = []

    def start(self, nodes: str = "n1,n2", *srun_options: str) -> subprocess.Popen[bytes]:
        """The command of the documentation: one launcher a node, no address anywhere."""
        count = len(nodes.split(","))
        launcher = [MIDWATCH, "run", "--nnodes", self.nnodes, "--nproc-per-node", "1", "--run-dir", str(self.run_dir)]
        settings = [f"--set={setting}" for setting in self.settings]
        trainer = self.trainer or [TRAINER, "--steps", str(self.steps), "--out", str(self.result_file)]
        options = [f"-N{count}", "-w", nodes, "--ntasks-per-node=1", *srun_options]
        command = self.lab.command("srun", *options, *launcher, *settings, "--", *trainer)
        with self._log(len(self.sruns)).open("w") as output:
            srun = subprocess.Popen(
                command,
                # As on an installed system, a node's own name means 127.0.1.1; gloo would take that.
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=ROOT,
            )
        self.sruns.append(srun)
        return srun

    def _log(self, number: int) -> Path:
        return self.run_dir.with_suffix(f".srun{number}.log")

    def wait(self, srun: subprocess.Popen[bytes], timeout_s: float) -> int:
        try:
            return srun.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"srun still runs after {timeout_s:g} s:\n{self.story()}") from None

    def until(self, what: str, fact: Callable[[], Any], timeout_s: float = 60.0) -> Any:
        """Wait until ``fact`` is true, and return it."""
        end = time.monotonic() + timeout_s
        while not (value := fact()):
            assert time.monotonic() < end, f"{what} did not come in {timeout_s:g} s:\n{self.story()}"
            time.sleep(0.02)
        return value

    def until_saved(self, step: int, attempt: int = 1) -> None:
        """Wait for a verified checkpoint of this step or a later one."""
        self.until(f"a verified checkpoint of step {step}", lambda: self._newest_verified(attempt) >= step)

    def _newest_verified(self, attempt: int) -> int:
        lines = self.lines(f"a{attempt:04d}-r00000")
        return max((line["step"] for line in lines if line["event"] == "checkpoint.verified"), default=-1)

    def lines(self, writer: str = "coordinator") -> list[dict[str, Any]]:
        """The whole lines of a ledger, so far."""
        path = self.run_dir / "ledger" / f"{writer}.jsonl"
        return (
            [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            if path.exists()
            else []
        )

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line["event"] == name]

    def endpoint(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "supervisor" / "coordinator.json").read_text())

    def verdicts(self) -> list[dict[str, Any]]:
        """The verdict of each incident, in order."""
        return [json.loads(path.read_text()) for path in sorted(self.run_dir.glob("incidents/*/verdict.json"))]

    def agent(self, node: str) -> int:
        """The agent's process id on that node."""
        return self._one(node, lambda words, env: "midwatch.supervise.agent" in words)

    def rank(self, node: str) -> tuple[int, int]:
        """Process id and number of the rank on that node."""
        pid = self._one(node, lambda words, env: "RANK" in env and f"-u {TRAINER}" in words)
        return pid, int(self.lab.processes(node)[pid][1]["RANK"])

    def _one(self, node: str, is_it: Callable[[str, dict[str, str]], bool]) -> int:
        found = [pid for pid, (words, env) in self.lab.processes(node).items() if is_it(words, env)]
        assert len(found) == 1, f"{found} on {node}:\n{self.story()}"
        return found[0]

    def weights(self) -> str:
        return str(json.loads(self.result_file.read_text())["weights_sha256"])

    def assert_nothing_left(self, *nodes: str) -> None:
        """No process of ours on the nodes, and nothing in their shared memory."""
        for node in nodes:
            found = self.lab.processes(node).items()
            left = {pid: words for pid, (words, _) in found if any(mark in words for mark in _OURS)}
            assert left == {}, f"left on {node}: {left}{self.story()}"
            assert "midwatch" not in self.lab.node("exec", node, "ls", "/dev/shm")

    def output(self) -> str:
        """What people saw, of all launchers."""
        return "".join(self._log(number).read_text() for number in range(len(self.sruns)))

    def close(self) -> None:
        """End what a failed test left; what runs on the nodes goes with them."""
        for srun in self.sruns:
            srun.kill()
            srun.wait(10)

    def story(self) -> str:
        """What there is to read when a test fails."""
        logs = [self._log(number) for number in range(len(self.sruns))]
        logs += [*sorted(self.run_dir.glob("supervisor/*.log")), *sorted(self.run_dir.glob("logs/*/*"))]
        texts = [
            f"--- {path.relative_to(self.lab.folder)}\n{path.read_text()[-2500:]}" for path in logs if path.exists()
        ]
        ledger = [f"{line['event']} {line['data']}" for line in self.lines()]
        return "\n".join(["", *texts, "--- ledger", *ledger, self.lab.logs()])
