"""Hangs seen in time, and pauses that are none left alone: real processes, with the five lines and without."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from supervised import Supervised
from watch_jobs import JOB

pytestmark = pytest.mark.procs

PAUSES = ("eval", "compile", "checkpoint", "gc", "storage", "prefetch", "declared")
BETWEEN = 12
"""Steps between two pauses."""
LEARNED = 40
"""Steps before anything happens; scripts that tell nothing are learned by their waits, which some steps lack."""


class SlowStore(BaseHTTPRequestHandler):
    """Answers after as many seconds as the path says."""

    def do_GET(self) -> None:
        time.sleep(float(self.path[1:]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"data")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), SlowStore)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("TEST_STORE", f"http://127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[dict[str, Supervised]]:
    both: dict[str, Supervised] = {}
    for form in ("plain", "five"):
        (tmp_path / form).mkdir()
        both[form] = Supervised(tmp_path / form)
        both[form].script.write_text(JOB)
    yield both
    for run in both.values():
        run.close()


def start(run: Supervised, form: str, events: list[list[Any]], steps: int, floor_s: float) -> Any:
    plan = json.dumps({"steps": steps, "events": events})
    return run.start_command(
        [str(run.script), str(run.home), form, plan], "--nproc-per-node", "2", "--set", f"watch.floor_s={floor_s}"
    )


def see_hang(run: Supervised, form: str, fault: str, floor_s: float, slack_s: float = 0.0) -> str:
    """Suspected within the deadline and a second, confirmed within another; returns what to print."""
    start(run, form, [[LEARNED, 1, fault, 0]], 100_000, floor_s)
    judged = run.until("a verdict", lambda: run.events("fault.judged"), 60.0 + 3 * floor_s)[0]
    hurt_ns = json.loads((run.home / "hurt").read_text())
    suspected = run.events("rank.suspected")[0]
    deadline_s = suspected["data"]["deadline_s"]
    seen_s, sure_s = ((line["ts_ns"] - hurt_ns) / 1e9 for line in (suspected, judged))
    assert judged["data"]["root_rank"] == 1, run.story()
    assert deadline_s <= max(floor_s, 10 * 0.2), f"a step takes 0.06 s\n{run.story()}"
    assert seen_s <= deadline_s + 1.0 + slack_s, run.story()
    assert sure_s <= deadline_s + 2.0 + slack_s, run.story()
    return f"{form:6s}{fault:8s} deadline {deadline_s:.2f} s, suspected {seen_s:.2f} s, confirmed {sure_s:.2f} s"


@pytest.mark.parametrize(
    ("form", "fault"), [("plain", "sleep"), ("plain", "gil"), ("plain", "thread"), ("five", "gil"), ("five", "thread")]
)
def test_a_hang_is_seen_in_time_and_its_culprit_named(runs: dict[str, Supervised], form: str, fault: str) -> None:
    # The figures are taken on a quiet machine; here others may be at work.
    print(see_hang(runs[form], form, fault, floor_s=1.0, slack_s=3.0))


def rest(run: Supervised, form: str, seed: int, seconds: float, floor_s: float, rounds: int = 1) -> Any:
    """Every pause on one rank or all of them, in an order of the seed's."""
    dice = random.Random(f"{form}-{seed}")
    events: list[list[Any]] = []
    step = LEARNED
    for _ in range(rounds):
        for what in dice.sample(PAUSES, len(PAUSES)):
            events.append([step, dice.choice([0, 1, -1]), what, round(seconds * dice.uniform(0.9, 1.2), 2)])
            step += BETWEEN
    return start(run, form, events, step, floor_s)


def assert_no_alarm(run: Supervised, launcher: Any, timeout_s: float) -> int:
    assert run.wait(launcher, timeout_s) == 0, run.story()
    assert run.events("fault.judged") == [], run.story()
    assert len(run.events("attempt.launched")) == 1
    return len(run.events("watch.near_miss"))


def test_pauses_that_are_no_hang_raise_no_alarm(runs: dict[str, Supervised]) -> None:
    launchers = {form: rest(run, form, 1, seconds=2.0, floor_s=1.0) for form, run in runs.items()}
    missed = {form: assert_no_alarm(run, launchers[form], 90.0) for form, run in runs.items()}
    assert missed["five"] > 0, "the pauses were too short to be mistaken for a hang"


@pytest.mark.stress
@pytest.mark.parametrize("form", ["plain", "five"])
@pytest.mark.parametrize("fault", ["sigstop", "sleep", "gil", "thread"])
def test_a_hang_is_seen_in_time_with_the_default_deadline(
    runs: dict[str, Supervised], form: str, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = see_hang(runs[form], form, fault, floor_s=5.0)
    with capsys.disabled():
        print(f"\n{line}")


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
def test_long_pauses_raise_no_alarm_with_the_default_deadline(
    runs: dict[str, Supervised], seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    launchers = {form: rest(run, form, seed, seconds=12.0, floor_s=5.0, rounds=2) for form, run in runs.items()}
    missed = {form: assert_no_alarm(run, launchers[form], 600.0) for form, run in runs.items()}
    with capsys.disabled():
        print(f"\nseed {seed}: {2 * 2 * len(PAUSES)} pauses of 11 to 14 s, near-misses {missed}, alarms 0")


def test_after_a_restart_a_hang_is_seen_as_soon_as_before_it(runs: dict[str, Supervised]) -> None:
    """In the next attempt's first steps, which would be watched with the patience for the unknown."""
    run = runs["five"]
    start(run, "five", [[30, 1, "exit3", 0], [12, 1, "sleep", 0, 2]], 100_000, 1.0)
    judged = run.until("two verdicts", lambda: run.events("fault.judged")[1:], 60.0)[0]
    assert (judged["data"]["fault_class"], judged["data"]["root_rank"]) == ("hang", 1), run.story()
    assert run.events("rank.suspected")[0]["data"]["deadline_s"] <= 2.0
