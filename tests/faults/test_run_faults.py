"""Each fault a rank can have, under a real ``midwatch run``: found, the right rank named, trained to the end, swept."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervised import Supervised

pytestmark = pytest.mark.procs


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Supervised]:
    supervised = Supervised(tmp_path)
    yield supervised
    supervised.close()


def assert_recovered(run: Supervised, attempts: int = 2) -> None:
    assert [line["data"]["attempt"] for line in run.events("attempt.launched")] == list(range(1, attempts + 1))
    assert run.number("done-r0") == run.number("done-r1") == attempts
    assert run.number("port-a1-r0") != run.number("port-a2-r0"), "a fresh port for each attempt"
    run.assert_nothing_left()


@pytest.mark.parametrize(
    ("fault", "fault_class"),
    [
        ("kill9", "killed_outside"),
        ("segv", "native_crash"),
        ("raise", "user_exception"),
        ("exit3", "explicit_exit"),
        ("exit0", "early_exit"),
    ],
)
def test_a_rank_that_ends_is_named_and_training_goes_on(run: Supervised, fault: str, fault_class: str) -> None:
    launcher = run.start(fault)
    assert run.wait(launcher) == 0, run.story()
    verdict = run.verdict()
    assert verdict["root_rank"] == 1, run.story()
    assert verdict["fault_class"] == fault_class, run.story()
    assert_recovered(run)


@pytest.mark.parametrize("mode", ["attached", "plain"])
def test_a_stopped_rank_is_named_and_replaced(run: Supervised, mode: str) -> None:
    launcher = run.start("sigstop", mode=mode)
    assert run.wait(launcher) == 0, run.story()
    assert run.verdict()["root_rank"] == 1
    assert_recovered(run)


def test_a_rank_that_sleeps_outside_its_collective_is_named(run: Supervised) -> None:
    # Steps of some milliseconds: on a crowded machine a pause of a second is none, one of three is.
    patient = ("--set", "watch.floor_s=3", "--set", "watch.learned_after=5")
    launcher = run.start("sleep", *patient, mode="attached", steps=30)
    assert run.wait(launcher, 120.0) == 0, run.story()
    assert run.verdict()["root_rank"] == 1
    folder = next((run.run_dir / "incidents").iterdir())
    assert "inject" in (folder / "stacks-r00001.txt").read_text()
    assert_recovered(run)


def test_a_rank_that_hangs_behind_a_shell_is_named(run: Supervised) -> None:
    command = f"{sys.executable} {run.script} {run.home} 400 sleep attached; exit $?"
    settings = ("watch.floor_s=3", "watch.learned_after=5")
    options = [word for setting in settings for word in ("--set", setting)]
    run.start_command(["bash", "-c", command], "--nproc-per-node", "2", *options)
    judged = run.until("a verdict", lambda: run.events("fault.judged"), 60.0)[0]["data"]
    assert (judged["fault_class"], judged["root_rank"], judged["confidence"]) == ("hang", 1, "certain"), run.story()


def test_a_script_without_a_pulse_that_stands_still_is_found(run: Supervised) -> None:
    quick = ("--set", "watch.floor_s=1", "--set", "watch.phase_timeout_s=3")
    sleeper = run.folder / "sleeper.py"
    sleeper.write_text("import os, sys, time\nif os.environ['MIDWATCH_ATTEMPT'] == '1':\n    time.sleep(3600)\n")
    launcher = run.start_command([str(sleeper)], "--nproc-per-node", "2", *quick)
    assert run.wait(launcher) == 0, run.story()
    assert len(run.events("attempt.launched")) == 2
    run.assert_nothing_left()


def test_a_grandchild_in_its_own_session_does_not_stay(run: Supervised) -> None:
    launcher = run.start("grandchild")
    pid = run.until("the grandchild", lambda: run.number("grandchild"))
    run.until("attempt 2", lambda: run.number("pid-a2-r0"))
    assert pid not in run.pids(), "gone before the next attempt starts"
    assert run.wait(launcher) == 0, run.story()
    assert_recovered(run)


def test_the_same_failure_again_stops_the_run(run: Supervised) -> None:
    launcher = run.start("determ")
    assert run.wait(launcher) == 93, run.story()
    assert len(run.events("attempt.launched")) == 2
    assert run.events("run.finished")[0]["data"]["error"] == "SV104"
    run.assert_nothing_left()


def test_an_import_error_on_one_rank_stops_at_once(run: Supervised) -> None:
    launcher = run.start("import")
    assert run.wait(launcher) == 93, run.story()
    assert len(run.events("attempt.launched")) == 1
    assert run.events("run.finished")[0]["data"]["error"] == "SV105"
    assert run.verdict()["root_rank"] == 1
    run.assert_nothing_left()


def test_a_clean_run_is_left_alone(run: Supervised) -> None:
    launcher = run.start("none", mode="attached")
    assert run.wait(launcher) == 0, run.story()
    assert run.events("fault.suspected") == []
    assert len(run.events("resume.proven")) == 1
    assert_recovered_once(run)


def assert_recovered_once(run: Supervised) -> None:
    assert run.number("done-r0") == run.number("done-r1") == 1
    run.assert_nothing_left()


@pytest.mark.parametrize("mode", ["attached", "plain"])
def test_a_stop_request_lets_ranks_save_and_says_come_again(run: Supervised, mode: str) -> None:
    launcher = run.start("none", mode=mode, steps=100_000)
    run.until_training()
    launcher.send_signal(signal.SIGTERM)
    assert run.wait(launcher) == 75, run.story()
    if mode == "attached":
        assert (run.home / "saved-r0").exists()
        assert (run.home / "saved-r1").exists()
    assert run.events("run.finished")[0]["data"]["error"] == "SV109"
    run.assert_nothing_left()
    again = run.start("none", mode=mode, steps=run.number("checkpoint") + 10)
    assert run.wait(again) == 0, run.story()
    assert run.number("pid-a2-r0"), "the attempt counts on over invocations"


SAVER = """
import os, signal, sys, time
from pathlib import Path
home, rank = Path(sys.argv[1]), os.environ["RANK"]

def save(number, frame):
    time.sleep(0.5)
    (home / f"saved-r{rank}").write_text("1")
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
(home / f"ready-r{rank}").write_text("1")
while True:
    time.sleep(0.05)
"""


def test_a_script_behind_a_shell_is_asked_itself_and_has_its_time_to_save(run: Supervised) -> None:
    run.script.write_text(SAVER)
    command = f"{sys.executable} {run.script} {run.home}; exit $?"
    launcher = run.start_command(["bash", "-c", command], "--nproc-per-node", "2")
    run.until("both ranks", lambda: len(list(run.home.glob("ready-*"))) == 2)
    launcher.send_signal(signal.SIGTERM)
    assert run.wait(launcher) == 75, run.story()
    assert len(list(run.home.glob("saved-*"))) == 2, run.story()


def test_a_rank_that_ignores_the_request_is_ended_when_asked_again(run: Supervised) -> None:
    script = run.folder / "deaf.py"
    script.write_text(
        "import signal, sys, time\n"
        "from pathlib import Path\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "Path(sys.argv[1]).write_text('1')\n"
        "time.sleep(600)\n"
    )
    launcher = run.start_command([str(script), str(run.home / "deaf")])
    run.until("the rank", lambda: run.number("deaf"))
    # Three different signals: the same one twice in a moment is one to the kernel.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        launcher.send_signal(number)
    assert run.wait(launcher, 30) == 75, run.story()
    run.assert_nothing_left()


def test_tool_that_is_no_python_is_supervised_as_well(run: Supervised) -> None:
    launcher = run.start_command(["sh", "-c", 'test "$RANK$WORLD_SIZE" = 01 && test -S /dev/null; exit 0'])
    assert run.wait(launcher) == 0, run.story()
    assert os.listdir(run.run_dir / "logs" / "a0001")


def test_a_run_folder_that_takes_no_claim_for_a_while_costs_a_pause_and_not_the_run(run: Supervised) -> None:
    launcher = run.start("none", "--set", "restart.backoff_s=[0.5]", mode="attached", steps=60)
    run.until_training()
    claims, aside = run.run_dir / "attempts", run.run_dir / "aside"
    claims.rename(aside)
    claims.write_text("not a folder")
    os.kill(run.number("pid-a1-r1"), signal.SIGKILL)
    run.until("word of it", lambda: "could not be claimed" in (run.folder / "launcher-0.log").read_text())
    claims.unlink()
    aside.rename(claims)
    assert run.wait(launcher) == 0, run.story()
    assert run.number("done-r0") == run.number("done-r1") > 2
    run.assert_nothing_left()


def test_ranks_train_on_without_logs_where_none_can_be_made(run: Supervised) -> None:
    run.run_dir.mkdir()
    (run.run_dir / "logs").write_text("not a folder")
    launcher = run.start("none", mode="attached")
    assert run.wait(launcher) == 0, run.story()
    assert "output of ranks 0, 1 is lost" in (run.folder / "launcher-0.log").read_text()
    assert_recovered_once(run)
