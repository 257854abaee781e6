"""Schedulers that are silent, refuse, or have been told already; requests that must outlive the process; topologies."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from midwatch.cluster import (
    LocalDriver,
    Outbox,
    Reply,
    Request,
    SlurmDriver,
    driver_for,
    load_topology,
    parse_slurm_topology,
)
from midwatch.cluster.command import run_command
from midwatch.cluster.slurm import parse_node
from midwatch.core import ConfigError, StorageError

# As scontrol 22.05.8 writes it.
NODE = (
    "NodeName=n1 Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUTot=2 CPULoad=3.05 AvailableFeatures=(null) "
    "NodeAddr=10.77.0.11 NodeHostName=n1 Version=22.05.8 OS=Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=2048 "
    "State={state} ThreadsPerCore=1 Partitions=main  CfgTRES=cpu=2,mem=2G,billing=2 AllocTRES= ExtSensorsTemp=n/s{why}"
)
DRAINED = NODE.format(state="IDLE+DRAIN", why=" Reason=midwatch: fan = broken [a@b] x [root@2026-11-30T06:57:46]")
TREE = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-2]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n3
SwitchName=spine Level=1 LinkSpeed=1 Nodes=n[1-3] Switches=leaf[1-2]
"""
CONF = """\
# leaf switches
SwitchName=leaf1 \\
    Nodes=n[1-2]
switchname=leaf2 Nodes=n3   # one
SwitchName=spine Switches=leaf[1-2]
"""


def scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    """A stand-in; returns the file with the command lines that it was given."""
    said, tool = folder / "said", folder / "bin" / "scontrol"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {said}\n{body}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    return said


def answers(tmp_path: Path, show: str, update: str = "exit 0") -> str:
    (tmp_path / "node").write_text(show)
    return f'case "$1" in show) cat {tmp_path / "node"};; *) {update};; esac'


def test_a_node_as_slurm_describes_it() -> None:
    idle, drained = parse_node(NODE.format(state="IDLE", why="")), parse_node(DRAINED)
    assert idle is not None
    assert drained is not None
    assert (idle.node, idle.is_drained, idle.reason) == ("n1", False, "")
    assert (drained.is_drained, drained.reason) == (True, "midwatch: fan = broken [a@b] x")
    assert parse_node("Node n9 not found") is None


def test_a_node_is_drained_with_a_reason_on_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = scontrol(tmp_path, monkeypatch, answers(tmp_path, NODE.format(state="MIXED", why="")))
    reply = asyncio.run(SlurmDriver().isolate("n1", "XID 79\n$(reboot) \x1b[31m"))
    assert reply.status == "done"
    assert said.read_text().splitlines()[1] == "update nodename=n1 state=drain reason=midwatch: XID 79 $(reboot)  [31m"


@pytest.mark.parametrize("name", ["ALL", "all", "n[1-100]", "n1,n2", "-n1", "n1 state=down", ""])
def test_what_is_not_one_node_is_never_drained(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = scontrol(tmp_path, monkeypatch, "exit 0")
    driver = SlurmDriver()
    assert asyncio.run(driver.isolate(name, "x")).status == "refused"
    assert driver.by_hand(name, "x") == ""
    assert not said.exists()


def test_what_somebody_else_drained_stays_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = DRAINED.replace("midwatch: fan", "fan")
    said = scontrol(tmp_path, monkeypatch, answers(tmp_path, theirs))
    assert asyncio.run(SlurmDriver().isolate("n1", "x")).status == "unneeded"
    assert asyncio.run(SlurmDriver().release("n1")).status == "refused"
    assert "update" not in said.read_text()


def test_our_own_drain_is_taken_back_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = scontrol(tmp_path, monkeypatch, answers(tmp_path, DRAINED))
    assert asyncio.run(SlurmDriver().release("n1")).status == "done"
    assert said.read_text().splitlines()[1] == "update nodename=n1 state=undrain"
    (tmp_path / "node").write_text(NODE.format(state="IDLE", why=""))
    assert asyncio.run(SlurmDriver().release("n1")).status == "unneeded"


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("slurm_update error: Invalid user id", "refused"),
        ("slurm_update error: Invalid node name specified", "refused"),
        ("slurm_update error: Unable to contact slurm controller (connect failure)", "silent"),
        ("slurm_update error: Socket timed out on send/recv operation", "silent"),
    ],
)
def test_a_refusal_is_told_from_silence(
    words: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = f"echo '{words}' >&2; exit 1"
    scontrol(tmp_path, monkeypatch, answers(tmp_path, NODE.format(state="IDLE", why=""), update))
    assert asyncio.run(SlurmDriver().isolate("n1", "x")) == Reply(status=status, text=words)  # type: ignore[arg-type]


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    started = tmp_path / "pid"
    answer = asyncio.run(run_command(["sh", "-c", f"sleep 60 & echo $! > {started}; wait"], deadline_s=0.3))
    assert answer.code is None
    assert "within 0.3 s" in answer.err
    child = Path("/proc") / started.read_text().strip() / "stat"
    assert not child.exists() or child.read_text().split()[2] == "Z"


def test_a_scheduler_that_is_not_installed_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    driver = driver_for("slurm")
    assert isinstance(driver, LocalDriver)
    assert asyncio.run(driver.isolate("n1", "x")).status == "unneeded"
    assert asyncio.run(run_command(["scontrol"], deadline_s=1.0)).code is None


@pytest.mark.parametrize("text", [TREE, CONF], ids=["scontrol", "topology.conf"])
def test_switches_of_switches(text: str) -> None:
    assert parse_slurm_topology(text) == (
        ("n1", ("switch:leaf1", "switch:spine")),
        ("n2", ("switch:leaf1", "switch:spine")),
        ("n3", ("switch:leaf2", "switch:spine")),
    )


def test_blocks_rings_and_rubbish() -> None:
    blocks = "BlockName=b1 BlockIndex=0 Nodes=n[01-02] BlockSize=2\nBlockSizes=2,4\nBlockName=b2 Nodes=(null)"
    assert parse_slurm_topology(blocks) == (("n01", ("block:b1",)), ("n02", ("block:b1",)))
    ring = parse_slurm_topology("SwitchName=a Switches=b\nSwitchName=b Switches=a Nodes=n1")
    assert ring == (("n1", ("switch:a", "switch:b")),)
    assert parse_slurm_topology("scontrol: error: No topology information available") == ()
    with pytest.raises(ConfigError):
        parse_slurm_topology("SwitchName=a Nodes=n[1-999999999]")


def test_topology_without_a_controller_comes_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol(tmp_path, monkeypatch, "echo 'slurm_load_topo error: Unable to contact slurm controller' >&2")
    (tmp_path / "topology.conf").write_text(CONF)
    assert dict(asyncio.run(SlurmDriver(str(tmp_path / "slurm.conf")).topology()))["n3"] == (
        "switch:leaf2",
        "switch:spine",
    )


@pytest.mark.parametrize(
    ("script", "topology"),
    [("echo 'No topology information available' >&2; exit 1", ()), ("sleep 60", None)],
    ids=["it has none", "it does not answer, and is asked again"],
)
def test_no_topology(script: str, topology: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midwatch.cluster.slurm.ASK_S", 0.3)
    scontrol(tmp_path, monkeypatch, script)
    assert asyncio.run(SlurmDriver(str(tmp_path / "slurm.conf")).topology()) == topology


def test_a_users_topology(tmp_path: Path) -> None:
    file = tmp_path / "topology.toml"
    file.write_text('[domains]\n"rack:1" = ["n[1-2]"]\n"pdu:7" = ["n2", "n3"]\n')
    assert load_topology(file) == (("n1", ("rack:1",)), ("n2", ("pdu:7", "rack:1")), ("n3", ("pdu:7",)))
    for text in ("[racks]\n", "domains = 3\n", "[domains]\na = [1]\n", "= x"):
        file.write_text(text)
        with pytest.raises(ConfigError) as refused:
            load_topology(file)
        assert str(file) in refused.value.message
    with pytest.raises(ConfigError):
        load_topology(tmp_path / "none")


def test_requests_outlive_the_process_and_are_tried_again_later_and_later(tmp_path: Path) -> None:
    path = tmp_path / "supervisor" / "requests.json"
    Outbox(path).put(Request(verb="isolate", node="n1", until_s=1000.0))
    (request,) = Outbox(path).pending(0.0)
    for now_s, due_s in ((0.0, 2.0), (2.0, 7.0), (7.0, 22.0)):
        assert not Outbox(path).settle(request, Reply(status="silent", text="no answer"), now_s)
        (request,) = Outbox(path).pending(now_s)
        assert request.not_before_s == due_s
    assert (request.tries, request.last) == (3, "no answer")
    assert Outbox(path).pending(1000.0) == [], "nobody wants it any more"
    assert Outbox(path).settle(request, Reply(status="done"), 30.0)
    assert json.loads(path.read_text())["requests"] == []


def test_the_newest_request_for_a_node_counts(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "requests.json")
    first = Request(verb="isolate", node="n1", until_s=1000.0)
    outbox.put(first)
    outbox.put(Request(verb="isolate", node="n2", until_s=1000.0))
    outbox.put(Request(verb="release", node="n1", until_s=1000.0))
    outbox.settle(first, Reply(status="done"), 1.0)
    assert [(one.verb, one.node) for one in outbox.pending(1.0)] == [("isolate", "n2"), ("release", "n1")]


def test_a_damaged_outbox_is_said_so(tmp_path: Path) -> None:
    path = tmp_path / "requests.json"
    path.write_text("{")
    with pytest.raises(StorageError) as refused:
        Outbox(path).put(Request(verb="isolate", node="n1", until_s=1.0))
    assert refused.value.code == "ST104"


def test_a_machine_without_room_for_temporary_files_asks_nothing_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nowhere/at/all")
    answered = asyncio.run(run_command(["true"], deadline_s=5.0))
    assert answered.code is None
    assert "true cannot be started: No such file or directory" in answered.err
