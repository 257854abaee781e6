"""The supervisors themselves die, freeze, meet twice or meet strangers; training survives or ends cleanly."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervised import Supervised

from midwatch.core import CODES, SuperviseError
from midwatch.supervise import fetch_status

pytestmark = pytest.mark.procs

AGENT = "-m midwatch.supervise.agent"
COORDINATOR = "-m midwatch.supervise.coordinator"
GUARDIAN = "-m midwatch.supervise.guardian"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Supervised]:
    supervised = Supervised(tmp_path)
    yield supervised
    supervised.close()


@pytest.mark.parametrize("mode", ["attached", "plain"])
def test_sigkill_of_the_launcher_leaves_nothing_after_a_second(run: Supervised, mode: str) -> None:
    launcher = run.start("park", mode=mode, steps=100_000)
    run.until("the grandchild", lambda: run.number("grandchild"))
    run.until_training(step=14)
    assert len(run.pids()) >= 7, "launcher, guardian, coordinator, agent, two ranks, grandchild"
    launcher.kill()
    run.assert_nothing_left(within_s=1.0)


def test_sigkill_of_the_agent_starts_a_new_attempt(run: Supervised) -> None:
    launcher = run.start("park", mode="attached", steps=400)
    run.until_training(step=14)
    grandchild = run.number("grandchild")
    os.kill(run.pid_of(AGENT), signal.SIGKILL)
    run.until("attempt 2", lambda: run.number("pid-a2-r0"))
    assert grandchild not in run.pids()
    assert run.wait(launcher) == 0, run.story()
    assert len(run.events("attempt.launched")) == 2
    assert run.number("done-r0") == run.number("done-r1") == 2
    run.assert_nothing_left()


def test_sigkill_of_the_coordinator_does_not_disturb_training(run: Supervised) -> None:
    launcher = run.start("none", mode="attached", steps=300)
    run.until_training()
    os.kill(run.pid_of(COORDINATOR), signal.SIGKILL)
    assert run.wait(launcher) == 0, run.story()
    assert len(run.events("attempt.launched")) == 1, run.story()
    assert len(run.events("coordinator.restarted")) == 1
    assert len(run.events("attempt.adopted")) == 1
    assert run.number("done-r0") == run.number("done-r1") == 1
    run.assert_nothing_left()


def test_a_rank_that_dies_while_the_coordinator_is_away_is_not_missed(run: Supervised) -> None:
    launcher = run.start("none", steps=300)
    run.until_training()
    coordinator = run.pid_of(COORDINATOR)
    # Stopped first, so that the death cannot be told to it.
    os.kill(coordinator, signal.SIGSTOP)
    os.kill(run.number("pid-a1-r1"), signal.SIGKILL)
    os.kill(coordinator, signal.SIGKILL)
    assert run.wait(launcher) == 0, run.story()
    assert len(run.events("attempt.launched")) == 2
    assert run.verdict()["root_rank"] == 1
    run.assert_nothing_left()


def test_a_supervisor_that_keeps_dying_ends_the_run_cleanly(run: Supervised) -> None:
    launcher = run.start("none", steps=100_000)
    for count in range(5):
        known = run.number("killed")
        pid = run.until(f"agent {count}", lambda old=known: (p := run.pid_of(AGENT)) != old and p)
        (run.home / "killed").write_text(str(pid))
        os.kill(pid, signal.SIGKILL)
    assert run.wait(launcher) == 70, run.story()
    run.assert_nothing_left()


def test_an_agent_that_was_frozen_past_its_time_is_refused_and_its_ranks_end(run: Supervised) -> None:
    launcher = run.start("none", "--set", "watch.agent_timeout_s=1.5", mode="attached", steps=350)
    run.until_training()
    agent = run.pid_of(AGENT)
    os.kill(agent, signal.SIGSTOP)
    run.until("the loss", lambda: run.events("node.lost"))
    os.kill(agent, signal.SIGCONT)
    run.until("attempt 2", lambda: run.number("pid-a2-r0"))
    assert run.number("pid-a1-r0") not in run.pids()
    assert "PR103" in next((run.run_dir / "supervisor").glob("agent-*.log")).read_text()
    assert run.wait(launcher) == 0, run.story()
    run.assert_nothing_left()


def test_an_agent_that_stays_frozen_is_replaced(run: Supervised) -> None:
    launcher = run.start("none", "--set", "watch.agent_timeout_s=1.5", mode="attached", steps=600)
    run.until_training()
    os.kill(run.pid_of(AGENT), signal.SIGSTOP)
    run.until("attempt 2", lambda: run.number("pid-a2-r0"))
    assert run.number("pid-a1-r0") not in run.pids()
    assert run.wait(launcher) == 0, run.story()
    run.assert_nothing_left()


def test_a_frozen_coordinator_does_not_hold_up_a_stop(run: Supervised) -> None:
    launcher = run.start("none", "--set", "watch.agent_timeout_s=1.5", mode="attached", steps=100_000)
    run.until_training()
    os.kill(run.pid_of(COORDINATOR), signal.SIGSTOP)
    launcher.send_signal(signal.SIGTERM)
    assert run.wait(launcher) == 75, run.story()
    assert (run.home / "saved-r0").exists()
    run.assert_nothing_left()


def test_a_guardian_that_was_killed_is_replaced_before_it_is_needed(run: Supervised) -> None:
    launcher = run.start("park", mode="attached", steps=100_000)
    run.until("the grandchild", lambda: run.number("grandchild"))
    old = run.pid_of(GUARDIAN)
    os.kill(old, signal.SIGKILL)
    run.until("another guardian", lambda: run.pid_of(GUARDIAN) not in (0, old))
    launcher.kill()
    run.assert_nothing_left(within_s=3.0)


@pytest.mark.parametrize("name", ["../../x", "a/b", "..", "a b", "[red]", "x\n[midwatch] all is well", "n" * 300])
def test_a_node_name_that_would_leave_the_run_folder_is_refused(run: Supervised, name: str) -> None:
    launcher = run.start("none", "--node-name", name)
    assert run.wait(launcher) == 78, run.story()
    assert not run.run_dir.exists()


def test_a_second_run_on_the_folder_is_refused_and_named(run: Supervised) -> None:
    first = run.start("none", steps=100_000)
    run.until_training()
    second = run.start("none")
    assert run.wait(second) == 73
    output = (run.folder / "launcher-1.log").read_text()
    assert "SV102" in output
    assert f"process {first.pid} " in output
    first.send_signal(signal.SIGTERM)
    assert run.wait(first) == 75
    run.assert_nothing_left()


def test_a_live_run_answers_its_owner_and_an_ended_one_nobody(run: Supervised) -> None:
    launcher = run.start("none", steps=100_000, mode="attached")
    run.until_training()
    run.until("a step in the status", lambda: fetch_status(run.run_dir)["step"])
    status = fetch_status(run.run_dir)
    assert (status["state"], status["attempt"]) == ("running", 1)
    assert [rank["rank"] for rank in status["agents"][0]["ranks"]] == [0, 1]
    launcher.send_signal(signal.SIGTERM)
    assert run.wait(launcher) == 75
    with pytest.raises(SuperviseError) as refusal:
        fetch_status(run.run_dir)
    assert refusal.value.code == "SV110"
    run.assert_nothing_left()


def test_a_command_that_does_not_exist_starts_and_writes_nothing(run: Supervised) -> None:
    launcher = run.start_command(["no-such-program", "--lr", "1"])
    assert run.wait(launcher) == 2
    assert "SV101" in (run.folder / "launcher-0.log").read_text()
    assert not run.run_dir.exists()


def test_a_dry_run_says_what_it_would_do_and_does_nothing(run: Supervised) -> None:
    launcher = run.start("none", "--dry-run", "--json")
    assert run.wait(launcher) == 0
    planned = json.loads((run.folder / "launcher-0.log").read_text())
    assert [rank["RANK"] for rank in planned["ranks"]] == ["0", "1"]
    assert not run.run_dir.exists()


def test_with_json_stdout_is_one_document(run: Supervised) -> None:
    import subprocess

    from supervised import MIDWATCH

    script = run.folder / "three.py"
    script.write_text("import sys; print('noise'); sys.exit(3)")
    command = [MIDWATCH, "run", "--json", "--max-restarts", "0", "--run-dir", str(run.run_dir), "--", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    result = json.loads(ended.stdout)
    assert result["exit_code"] == ended.returncode != 0
    assert result["error"]
    assert result["verdict"]["exit_code"] == 3
    assert "noise" in ended.stderr


NODES = ("--nnodes", "2")


def test_two_launchers_train_together_and_survive_an_agent(run: Supervised) -> None:
    one = run.start("none", *NODES, mode="attached", steps=200, nproc=1)
    two = run.start("none", *NODES, mode="attached", steps=200, nproc=1)
    run.until_training()
    names = {line["data"]["node"] for line in run.events("node.joined")}
    assert len(names) == 2
    agents = [pid for pid, words in run.pids().items() if AGENT in words]
    os.kill(agents[-1], signal.SIGKILL)
    assert run.wait(one) == 0, run.story()
    assert run.wait(two) == 0, run.story()
    assert len(run.events("attempt.launched")) == 2
    assert run.number("done-r0") == run.number("done-r1") == 2
    run.assert_nothing_left()


def test_a_third_node_and_a_node_with_another_command_are_refused(run: Supervised) -> None:
    one = run.start("none", *NODES, steps=100_000, nproc=1)
    run.until("the first node", lambda: run.events("node.joined"))
    other = run.start("raise", *NODES, steps=100_000, nproc=1)
    assert run.wait(other) == 78, run.story()
    two = run.start("none", *NODES, steps=100_000, nproc=1)
    run.until_training()
    third = run.start("none", *NODES, steps=100_000, nproc=1)
    assert run.wait(third) == 73, run.story()
    two.send_signal(signal.SIGTERM)
    assert run.wait(one) == run.wait(two) == 75, run.story()
    run.assert_nothing_left()


def test_a_node_that_cannot_reach_a_living_host_gives_up_once_its_ranks_have_ended(run: Supervised) -> None:
    # The host's launcher lives and keeps its seat, so nobody may take over; only its coordinator does not answer.
    host = run.start("none", *NODES, steps=100_000, nproc=1)
    run.until("the first node", lambda: run.events("node.joined"))
    other = run.start("none", *NODES, "--set", "restart.join_timeout_s=2", steps=100_000, nproc=1)
    run.until_training()
    coordinator = run.pid_of(COORDINATOR)
    os.kill(coordinator, signal.SIGSTOP)
    for rank in (0, 1):
        os.kill(run.number(f"pid-a1-r{rank}"), signal.SIGKILL)
    assert run.wait(other) == CODES["PR104"].exit_code, run.story()
    os.kill(coordinator, signal.SIGCONT)
    host.send_signal(signal.SIGTERM)
    assert run.wait(host) == 75, run.story()
    run.assert_nothing_left()


def test_a_node_whose_host_is_gone_does_not_hold_its_devices_for_ranks_that_wait_forever(run: Supervised) -> None:
    quick = ("--set", "restart.spare_wait_s=1", "--set", "watch.floor_s=1", "--set", "watch.phase_timeout_s=3")
    script = run.folder / "waits.py"
    script.write_text(
        "import os, sys, time\nopen(f'{sys.argv[1]}/up-r{os.environ[\"RANK\"]}', 'w').write('1')\ntime.sleep(3600)\n"
    )
    host = run.start_command([str(script), str(run.home)], *NODES)
    run.until("the first node", lambda: run.events("node.joined"))
    other = run.start_command([str(script), str(run.home)], *NODES, *quick)
    run.until("both ranks", lambda: run.number("up-r0") and run.number("up-r1"))
    host.kill()
    assert run.wait(other) == CODES["SV114"].exit_code, run.story()
    run.assert_nothing_left()


def test_a_node_that_nobody_joins_gives_up(run: Supervised) -> None:
    launcher = run.start("none", *NODES, "--set", "restart.join_timeout_s=1", nproc=1)
    assert run.wait(launcher) == 1, run.story()
    assert run.events("run.finished")[0]["data"]["error"] == "SV106"
    run.assert_nothing_left()
