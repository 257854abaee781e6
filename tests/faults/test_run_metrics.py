"""A live run sends its metrics and answers Prometheus, whoever dies, hangs or moves meanwhile. Without PyTorch."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from metrics_receiver import Receiver
from supervised import MIDWATCH, Supervised

from midwatch.audit import Journal, read_journal
from midwatch.supervise import fetch_status

pytestmark = pytest.mark.procs

SENDER = "-m midwatch.supervise.sender"
PAGE = "-m midwatch.supervise.page"
AGENT = "-m midwatch.supervise.agent"

TRAINER = '''
"""Ranks that log a number a step and go on until a file appears; rank 1 of attempt 1 is killed at step 30."""
import os, signal, sys, time
from pathlib import Path
from midwatch.audit import Journal
from midwatch.pulse import Flag, writer_from_env

stop, attempt, rank = Path(sys.argv[1]), int(os.environ["MIDWATCH_ATTEMPT"]), int(os.environ["RANK"])
pulse = writer_from_env()
pulse.begin(os.getpid(), attempt)
pulse.resumed(None, "", "c" * 16)
while not pulse.flags() & Flag.GO:
    time.sleep(0.005)
start = 0 if attempt == 1 else 10
journal = None
if rank == 0:
    journal = Journal(Path(os.environ["MIDWATCH_RUN_DIR"]) / "metrics" / f"a{attempt:04d}.jsonl")
    journal.begin(attempt, start)
step = start
while not stop.exists():
    if attempt == 1 and rank == 1 and step == 30:
        os.kill(os.getpid(), signal.SIGKILL)
    pulse.beat(step)
    if journal:
        journal.append({"step": step, "ts_ns": time.time_ns(), "loss": 1000.0 * attempt + step})
        journal.flush()
    if pulse.flags() & Flag.STOP:
        break
    step += 1
    time.sleep(0.02)
pulse.finished()
if journal:
    journal.close()
'''


class MetricsRun(Supervised):
    """A run whose receiver is ours."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.script.write_text(TRAINER)
        self.receiver = Receiver()
        self.stop = folder / "stop"

    def begin(self, *options: str, nproc: int = 2) -> Any:
        quick = ("metrics.push.every_s=0.1", "restart.backoff_s=[0]", f"metrics.push.url={self.receiver.url}")
        settings = [word for setting in quick for word in ("--set", setting)]
        command = [str(self.script), str(self.stop)]
        return self.start_command(command, "--nproc-per-node", str(nproc), *settings, *options)

    def until_points(self, count: int, attempt: int = 1) -> None:
        """So many more of an attempt than now."""
        base = self.arrived(attempt)
        self.until(f"{count} points of attempt {attempt}", lambda: self.arrived(attempt) >= base + count)

    def arrived(self, attempt: int) -> int:
        return sum(one == attempt for one, _ in self.receiver.of("loss"))

    def another_sender(self) -> None:
        """In place of the one that is killed."""
        sender = self.pid_of(SENDER)
        os.kill(sender, signal.SIGKILL)
        self.until("another sender", lambda: self.pid_of(SENDER) not in (0, sender))

    def page(self, node: str = "*") -> dict[str, float]:
        """Name and labels but ``run`` and ``node`` -> value, from where the run says that it can be fetched."""
        paths = self.until("the page", lambda: sorted((self.run_dir / "supervisor" / "scrape").glob(f"{node}.json")))
        (target,) = json.loads(paths[0].read_text())[0]["targets"]
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found: dict[str, float] = {}
        for line in text.splitlines():
            if not line.startswith("#"):
                series, _, value = line.rpartition(" ")
                name, _, labels = series.rstrip("}").partition("{")
                kept = [word for word in labels.split(",") if word and not word.startswith(("run=", "node="))]
                found[name + "".join(sorted(kept))] = float(value)
        return found

    def told(self) -> list[str]:
        path = self.run_dir / "ledger" / "sender.jsonl"
        return [json.loads(line)["event"] for line in path.read_text().splitlines()] if path.exists() else []

    def recorded(self) -> list[float]:
        """The losses of all journals, those that were rolled back included."""
        paths = (self.run_dir / "metrics").glob("a*.jsonl")
        lines = [line for path in paths for line in path.read_text().splitlines() if '"step"' in line]
        return sorted(json.loads(line)["loss"] for line in lines)

    def assert_all_arrived_once(self) -> None:
        got = self.receiver.of("loss")
        assert sorted(value for _, value in got) == self.recorded(), self.story()
        assert set(got.values()) == {1}
        assert all(value // 1000 == attempt for attempt, value in got)

    def close(self) -> None:
        super().close()
        self.receiver.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[MetricsRun]:
    run = MetricsRun(tmp_path)
    yield run
    run.close()


def test_every_step_arrives_once_and_the_page_tells_the_rest(run: MetricsRun) -> None:
    launcher = run.begin("--set", "metrics.listen=0", "--set", f"metrics.index_dir={run.folder / 'indexes'}")
    run.until_points(10, attempt=2)
    # The agent and whoever reads the folder tell theirs a moment apart.
    newest = ('midwatch_metricattempt="2"metric="loss"rank="0"', 'midwatch_rank_steprank="1"')
    wanted = ("midwatch_attempt", 2), *((name, 1) for name in newest)

    def told() -> dict[str, float] | None:
        page = run.page()
        return page if all(page.get(name, 0) >= least for name, least in wanted) else None

    found = run.until("the page of attempt 2", told)
    assert (found["midwatch_ranks"], found["midwatch_ranks_up"], found["midwatch_agent_up"]) == (2, 2, 1)
    assert (found["midwatch_attempt"], found["midwatch_attempts_total"]) == (2, 2)
    assert found['midwatch_rank_progress_age_secondsrank="0"'] < 10
    assert found['midwatch_restarts_totalfault_class="killed_outside"'] == 1
    assert sum(value for name, value in found.items() if name.startswith("midwatch_incidents_total")) == 1
    assert found['midwatch_metricattempt="2"metric="loss"rank="0"'] >= 2010
    assert (run.page()["midwatch_held"], "midwatch_breaker_state" in str(found)) == (0, False)
    # The receiver goes away, and with it the sender; the agent dies, which must not take the sender along.
    run.receiver.is_away = True
    # Refused: so it has noted what was taken before, and nothing of that comes again.
    run.until("a refusal", lambda: run.receiver.refused)
    run.another_sender()
    sender = run.pid_of(SENDER)
    os.kill(run.pid_of(AGENT), signal.SIGKILL)
    run.until("attempt 3", lambda: (run.run_dir / "metrics" / "a0003.jsonl").exists())
    run.receiver.is_away = False
    run.until_points(10, attempt=3)
    assert run.pid_of(SENDER) == sender
    run.stop.touch()
    assert run.wait(launcher) == 0, run.story()
    run.assert_all_arrived_once()
    steps = [record["step"] for record in read_journal((run.run_dir / "metrics").glob("a*.jsonl"))]
    assert (steps, steps[-1] >= 19) == (list(range(len(steps))), True)
    assert not list((run.run_dir / "supervisor" / "scrape").iterdir()), "nobody can be asked any more"
    run.assert_nothing_left()


def test_a_sender_killed_between_delivery_and_note_sends_the_same_samples_again(run: MetricsRun) -> None:
    launcher = run.begin()
    run.until_points(10)
    run.receiver.is_slow.set()
    run.until("a delivery without an answer", lambda: run.receiver.unanswered)
    run.another_sender()
    run.until_points(10, attempt=2)
    run.stop.touch()
    assert run.wait(launcher) == 0, run.story()
    # To the millisecond and the bit, so that a store keeps each once.
    (again,) = run.receiver.unanswered
    assert {point for point, count in run.receiver.points.items() if count > 1} == set(again)
    assert sorted(value for _, value in run.receiver.of("loss")) == run.recorded()
    run.assert_nothing_left()


def test_a_receiver_that_never_answers_and_a_port_that_is_taken_delay_nothing(run: MetricsRun) -> None:
    run.receiver.is_mute.set()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"metrics.listen={taken.getsockname()[1]}"
        launcher = run.begin("--set", "metrics.push.drain_s=0.5", "--set", listen)
        run.until("a word", lambda: "MT107" in (run.folder / "launcher-0.log").read_text())
    run.until("a question", lambda: run.receiver.asked)
    run.until("attempt 2", lambda: (run.run_dir / "metrics" / "a0002.jsonl").exists())
    began = time.monotonic()
    assert fetch_status(run.run_dir)["attempt"] == 2
    assert time.monotonic() - began < 3.0
    run.stop.touch()
    run.until("the end", lambda: run.events("run.finished"))
    assert run.wait(launcher, 15.0) == 0, run.story()
    assert "metrics.push_left" in run.told()
    assert "midwatch metrics push" in (run.folder / "launcher-0.log").read_text()
    run.assert_nothing_left()


def test_a_run_folder_alone_is_served(run: MetricsRun) -> None:
    folder = run.folder / "imported"
    journal = Journal(folder / "metrics" / "a0001.jsonl")
    journal.append({"step": 7, "ts_ns": time.time_ns(), "loss": 2.5})
    journal.close()
    command = [MIDWATCH, "metrics", "serve", str(folder), "--set", f"metrics.index_dir={run.folder / 'indexes'}"]
    text = ""
    with subprocess.Popen([*command, "--listen", "0", "--json"], stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        url = json.loads(serving.stdout.readline())["url"]
        for _ in range(2):
            with urllib.request.urlopen(url, timeout=10) as answer:
                text = answer.read().decode()
        assert 'midwatch_metric{attempt="1",metric="loss",rank="0",run=""} 2.5\n' in text
        port = url.split(":")[2].split("/")[0]
        second = subprocess.run([*command, "--listen", port], capture_output=True, text=True, timeout=30, check=False)
        assert (second.returncode, "[MT107]" in second.stderr) == (74, True), second.stderr
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(10) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["metrics"], "nothing is added to it"
