"""Restarts from a parked process: the ranks are as cold ones are, and where forking is not safe the start is cold."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from supervised import Supervised

pytestmark = pytest.mark.procs

TRAINER = '''
"""Writes down what it finds when it starts, and ends as it is told, once it is told."""
import json, os, signal, sys, time
from pathlib import Path
from midwatch.pulse import writer_from_env
from midwatch.storage import write_json_atomic

home, fault, modules = Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(",")
attempt, rank = int(os.environ["MIDWATCH_ATTEMPT"]), int(os.environ["RANK"])
command = Path("/proc/self/cmdline").read_text().rstrip(chr(0)).split(chr(0))
facts = {
    "argv": sys.argv, "name": __name__, "file": __file__, "first on path": sys.path[0], "command": command,
    "cwd": os.getcwd(), "parent": os.getppid(), "leads its session": os.getsid(0) == os.getpid(),
    "files": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)),
    "descriptors": sorted(fd for fd in map(int, os.listdir("/proc/self/fd")) if Path(f"/proc/self/fd/{fd}").exists()),
    "environment": dict(os.environ), "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "term": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "main": sys.modules["__main__"].__dict__ is globals(),
    "imported": [name for name in modules if name in sys.modules],
}
write_json_atomic(home / f"facts-a{attempt}-r{rank}", facts)
pulse = writer_from_env()
pulse.begin(os.getpid(), attempt)
pulse.resumed(None, "", "c" * 16)
if attempt == 1 and rank == 0:
    write_json_atomic(
        Path(os.environ["MIDWATCH_RUN_DIR"], "supervisor", f"imports-{os.environ['MIDWATCH_NODE']}.json"),
        {"modules": modules},
    )
def fail():
    if fault == "raise": raise ValueError("bad batch 17")
    if fault == "exit3": sys.exit(3)
    os.kill(os.getpid(), signal.SIGKILL)
for step in range(2000):
    pulse.beat(step)
    time.sleep(0.005)
    if (home / f"go-{attempt}").exists():
        if attempt < 3 and rank == 1: fail()
        if attempt == 3: break
pulse.finished()
'''


OFTEN = ("--set", "restart.backoff_s=[0]", "--set", "restart.limits.code=9", "--set", "restart.limits.crash=9")


class Warm(Supervised):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.script.write_text(TRAINER)

    def train(self, fault: str = "kill9", *options: str, modules: str = "colorsys,statistics") -> Any:
        command = [str(self.script), str(self.home), fault, modules]
        return self.start_command(command, "--nproc-per-node", "2", *OFTEN, *options)

    def said(self) -> str:
        return (self.folder / "launcher-0.log").read_text()

    def go_on(self, attempt: int, said: str) -> None:
        """Let this attempt meet its fault, or its end, once the launcher has said that."""
        self.until(f"{said!r} from the launcher", lambda: said in self.said())
        (self.home / f"go-{attempt}").touch()

    def facts(self, attempt: int, rank: int) -> dict[str, Any]:
        path = self.home / f"facts-a{attempt}-r{rank}"
        return json.loads(self.until(f"rank {rank} of attempt {attempt}", lambda: path.exists() and path.read_bytes()))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Warm]:
    supervised = Warm(tmp_path)
    yield supervised
    supervised.close()


CHANGES = {
    "MASTER_PORT",
    "MIDWATCH_ATTEMPT",
    "MIDWATCH_PULSE",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
}
"""From attempt to attempt, warm or cold."""


@pytest.mark.parametrize("fault", ["raise", "exit3"])
def test_a_forked_rank_finds_the_world_of_a_cold_one(run: Warm, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITE_MODULES", "x" * 120_000)  # two of them do not fit into one message
    launcher = run.train(fault)
    run.go_on(1, "the next restart is warm")
    run.go_on(2, "forked from the parked process")
    for rank in (0, 1):
        cold, warm = run.facts(1, rank), run.facts(2, rank)
        assert warm.pop("imported") == ["colorsys", "statistics"]
        assert "colorsys" not in cold.pop("imported")
        of_cold, of_warm = cold.pop("environment"), warm.pop("environment")
        assert {name for name in of_cold | of_warm if of_cold.get(name) != of_warm.get(name)} == CHANGES
        assert [path.replace("a0001", "a0002") for path in cold.pop("files")] == warm.pop("files")
        assert warm == cold
    (run.home / "go-3").touch()
    assert run.wait(launcher) == 0, run.story()
    classes = [line["data"]["fault_class"] for line in run.events("fault.judged")]
    assert classes == [{"raise": "user_exception", "exit3": "explicit_exit"}[fault]] * 2, (
        "the end of a warm rank is read alike"
    )
    if fault == "raise":
        texts = [next((run.run_dir / "logs" / f"a000{n}").glob("*r00001.err")).read_text() for n in (1, 2)]
        assert texts[0] == texts[1], "and its traceback is the interpreter's own"
    for incident in (run.run_dir / "incidents").iterdir():
        ends = {
            rank["rank"]: rank["exit_code"] for rank in json.loads((incident / "evidence.json").read_text())["ranks"]
        }
        assert ends[1] == {"raise": 1, "exit3": 3}[fault], "what was judged stays as it was"
    run.assert_nothing_left()


def test_forked_ranks_die_with_their_agent_and_so_does_the_parked_process(run: Warm) -> None:
    launcher = run.train()
    run.go_on(1, "the next restart is warm")
    parent = run.facts(2, 0)["parent"]
    run.facts(2, 1)
    theirs = {pid for pid, words in run.pids().items() if " run " not in words and ".py" in words}
    assert len(theirs) == 3
    os.kill(parent, signal.SIGKILL)
    run.until("the end of what the agent had started", lambda: theirs.isdisjoint(run.pids()), 1.0)
    (run.home / "go-3").touch()
    assert run.wait(launcher) == 0, run.story()
    run.assert_nothing_left()


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
            "1 thread(s)",
        ),
        ("import os; os.kill(os.getpid(), 9)", "the parked process ended"),
        ("import os; RANK = int(os.environ.get('RANK', 0))", "an import asks for RANK"),
    ],
)
def test_what_is_not_safe_to_fork_is_not_forked(run: Warm, source: str, why: str, monkeypatch: Any) -> None:
    packages = run.folder / "packages"
    packages.mkdir()
    (packages / "spoils_it.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(packages))
    launcher = run.train(modules="colorsys,spoils_it")
    run.go_on(1, "restarts are cold: ")
    (run.home / "go-2").touch()
    (run.home / "go-3").touch()
    assert run.wait(launcher) == 0, run.story()
    assert why in run.said()
    assert run.said().count("restarts are cold") == 1
    assert "forked" not in run.said()
    run.assert_nothing_left()


def test_a_parked_process_that_died_means_a_cold_start(run: Warm) -> None:
    launcher = run.train()
    run.until("the word", lambda: "the next restart is warm" in run.said())
    parked = run.pid_of("supervise/parked.py")
    os.kill(parked, signal.SIGSTOP)  # worse than dead: it does not answer
    for attempt in (1, 2, 3):
        (run.home / f"go-{attempt}").touch()
    assert run.wait(launcher) == 0, run.story()
    assert "restarts are cold: it does not answer" in run.said()
    run.assert_nothing_left()


def test_no_process_is_parked_when_told_not_to(run: Warm) -> None:
    launcher = run.train("kill9", "--set", "restart.warm=false")
    for attempt in (1, 2, 3):
        run.facts(attempt, 1)
        (run.home / f"go-{attempt}").touch()
    assert run.wait(launcher) == 0, run.story()
    assert "warm" not in run.said()
    assert run.facts(3, 0)["imported"] != ["colorsys", "statistics"]
