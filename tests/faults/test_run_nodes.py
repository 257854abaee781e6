"""Nodes that go away, the one that hosts the coordinator included, and spares that take their places."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervised import Supervised

from midwatch.audit import verify_ledger
from midwatch.supervise.failover import FolderLock

pytestmark = pytest.mark.procs

OPTIONS = ("--nproc-per-node", "1", "--set", "restart.backoff_s=[0]", "--set", "watch.agent_timeout_s=4")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Supervised]:
    supervised = Supervised(tmp_path)
    yield supervised
    supervised.close()


def start(run: Supervised, name: str, nodes: str, *options: str, steps: int = 2000) -> subprocess.Popen[str]:
    command = [str(run.script), str(run.home), str(steps), "none", "attached"]
    return run.start_command(command, "--nnodes", nodes, "--node-name", name, *OPTIONS, *options)


def start_fleet(run: Supervised, nodes: str, names: tuple[str, ...]) -> dict[str, subprocess.Popen[str]]:
    """The first name hosts the coordinator, the last ones are spares."""
    launchers: dict[str, subprocess.Popen[str]] = {}
    for name in names:
        launchers[name] = start(run, name, nodes)
        run.until(
            f"{name} to join", lambda name=name: any(e["data"]["node"] == name for e in run.events("node.joined"))
        )
    run.until_training(step=8)
    return launchers


def signal_node(launcher: subprocess.Popen[str], number: signal.Signals) -> float:
    """The whole node at once: everything below this launcher, by its children's tags."""
    tag = next(
        word.split("=")[1]
        for pid in _below(launcher.pid)
        for word in Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        if word.startswith("MIDWATCH_TAG=")
    )
    at = time.monotonic()
    for pid in [launcher.pid, *(pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _has(pid, tag))]:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
    return at


def lose(launcher: subprocess.Popen[str]) -> float:
    at = signal_node(launcher, signal.SIGKILL)
    launcher.wait(10)
    return at


def _below(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _has(pid: int, tag: str) -> bool:
    try:
        return f"MIDWATCH_TAG={tag}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def end_on_request(run: Supervised, launchers: dict[str, subprocess.Popen[str]]) -> None:
    for launcher in launchers.values():
        launcher.send_signal(signal.SIGTERM)
    assert {run.wait(launcher) for launcher in launchers.values()} == {75}, run.story()
    report = verify_ledger(run.run_dir / "ledger" / "coordinator.jsonl")
    assert not report.problems, "two coordinators wrote into one ledger"


@pytest.mark.parametrize("lost", ["n0", "n1"])
def test_a_spare_takes_the_place_of_a_lost_node(run: Supervised, lost: str) -> None:
    launchers = start_fleet(run, "2:3", ("n0", "n1", "n2"))
    at = lose(launchers.pop(lost))
    run.until_training(attempt=2, step=1)
    assert time.monotonic() - at < 4 + 6, "the time-out of a node, and the start"
    launched = run.events("attempt.launched")[-1]["data"]
    assert {node for node, _ in launched["placements"]} == {"n0", "n1", "n2"} - {lost}
    survivor = ({"n0", "n1"} - {lost}).pop()
    ranks = dict(launched["placements"])
    assert ranks[survivor] == [int(survivor[1])], "survivors keep their ranks"
    if lost == "n0":
        os.kill(run.pid_of("-m midwatch.supervise.coordinator"), signal.SIGKILL)
        run.until("the coordinator", lambda: run.events("attempt.adopted"))
        assert len(run.events("coordinator.moved")) == 1, "where it has moved to, it is at home"
        assert len(run.events("attempt.launched")) == 2
    end_on_request(run, launchers)


def test_a_frozen_host_is_replaced_and_gives_way_when_it_thaws(run: Supervised) -> None:
    launchers = start_fleet(run, "2:3", ("n0", "n1", "n2"))
    at = signal_node(launchers["n0"], signal.SIGSTOP)
    run.until_training(attempt=2, step=1)
    assert time.monotonic() - at < 4 + 6, "the time-out of a node, and the start"
    signal_node(launchers["n0"], signal.SIGCONT)
    moved_at = run.events("coordinator.moved")[0]["ts_ns"]
    run.until(
        "the old host to come back as a spare",
        lambda: any(e["data"]["node"] == "n0" and e["ts_ns"] > moved_at for e in run.events("node.joined")),
    )
    run.until("its old rank to end", lambda: run.number("pid-a1-r0") not in run.pids())
    assert len(run.events("attempt.launched")) == 2
    assert "another node hosts the coordinator now" in (run.folder / "launcher-0.log").read_text()
    end_on_request(run, launchers)


def test_without_a_spare_the_run_waits_and_then_asks_to_be_requeued(run: Supervised) -> None:
    launchers = {}
    for name in ("n0", "n1"):
        command = [str(run.script), str(run.home), "2000", "none", "attached"]
        options = ("--nnodes", "2", "--node-name", name, *OPTIONS, "--set", "restart.spare_wait_s=1")
        launchers[name] = run.start_command(command, *options)
    run.until_training(step=8)
    lose(launchers.pop("n1"))
    assert run.wait(launchers["n0"]) == 75, run.story()
    assert run.events("run.finished")[-1]["data"]["error"] == "SV114"


def test_a_spare_that_goes_away_disturbs_nobody(run: Supervised) -> None:
    launchers = start_fleet(run, "2:3", ("n0", "n1", "n2"))
    lose(launchers.pop("n2"))
    run.until("its loss to be noted", lambda: run.events("node.lost"))
    assert len(run.events("attempt.launched")) == 1
    end_on_request(run, launchers)


def test_a_node_that_came_while_an_earlier_run_was_ending_hosts_the_next_one(run: Supervised) -> None:
    folder = run.run_dir / "supervisor"
    seat = FolderLock.take(folder, "the run before")
    assert seat is not None
    launcher = start(run, "n0", "2")
    maps = Path(f"/proc/{launcher.pid}/maps")
    run.until("it to look for a coordinator over the network", lambda: "aiohttp" in maps.read_text())
    seat.release()
    run.until("it to host", lambda: run.events("node.joined"))
    launcher.send_signal(signal.SIGTERM)
    assert run.wait(launcher) == 75, run.story()
