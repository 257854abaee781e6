"""People are told by real runs, each event once: by the supervisor where there is one, else by rank 0."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from supervised import MIDWATCH, Supervised
from test_run_nodes import lose

pytestmark = pytest.mark.procs

SCRIPT = """
import json, sys
import torch
import midwatch

run = midwatch.attach(json.loads(sys.argv[1]))
model = torch.nn.Linear(4, 1)
run.track(model=model)
start = run.resume()
for step in run.steps(start, 12):
    loss = model(torch.ones(2, 4)).square().mean() + 1.0
    run.log(loss=loss * float("nan") if step == 6 else loss)
    if step == 10:
        raise ValueError("bad batch, password=hunter2hunter2")
"""


class Hook:
    """Takes POSTs and remembers them."""

    def __init__(self) -> None:
        self.posts: list[Any] = []
        posts = self.posts

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                posts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def url(self, path: str = "/hook") -> str:
        return f"http://127.0.0.1:{self._server.server_port}{path}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def hook() -> Iterator[Hook]:
    hook = Hook()
    yield hook
    hook.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Supervised]:
    supervised = Supervised(tmp_path)
    yield supervised
    supervised.close()


def told(hook: Hook) -> list[tuple[str, str]]:
    """Id and title of every alert that came, those that were folded included."""
    found: list[tuple[str, str]] = []
    for post in list(hook.posts):
        found += [(one["id"], one["title"]) for one in (*post["earlier"], post["alert"])]
    return found


def until(what: str, fact: Callable[[], Any], story: Callable[[], str]) -> None:
    end = time.monotonic() + 60
    while not fact():
        assert time.monotonic() < end, f"no {what}:\n{story()}"
        time.sleep(0.02)


def test_the_supervisor_tells_of_faults_and_of_the_end(run: Supervised, hook: Hook, tmp_path: Path) -> None:
    (tmp_path / "hook").write_text(hook.url("/s3cr3t"))
    target = ("--set", f'alerts.to.webhook=["file:{tmp_path}/hook"]', "--set", "alerts.min_grade=G0")
    launcher = run.start("determ", *target, "--set", "restart.backoff_s=[0]")
    run.until_training(2)
    os.kill(run.pid_of("midwatch.supervise.coordinator"), signal.SIGKILL)
    assert run.wait(launcher) != 0, run.story()
    came = told(hook)
    assert len({ident for ident, _ in came}) == len(came), "each once, though the coordinator was started again"
    titles = [title for _, title in came]
    assert titles.count("the run ended badly") == 1, run.story()
    judged = run.events("fault.judged")
    assert sum(title.startswith("a fault of grade") for title in titles) == len(judged) > 0, run.story()
    written = "".join(path.read_text(errors="replace") for path in run.run_dir.rglob("*") if path.is_file())
    assert "s3cr3t" not in written
    run.assert_nothing_left()


def test_a_run_that_ends_well_tells_nobody_and_waits_for_nobody(run: Supervised, tmp_path: Path) -> None:
    (tmp_path / "hook").write_text("http://127.0.0.1:9/nobody")
    launcher = run.start("none", "--set", f'alerts.to.webhook=["file:{tmp_path}/hook"]', steps=20)
    assert run.wait(launcher) == 0, run.story()
    state = json.loads((run.run_dir / "alerts" / "state.json").read_text())
    assert state["waiting"] == state["sent"] == []


@pytest.mark.torch
def test_rank_0_tells_where_nobody_supervises(hook: Hook, tmp_path: Path) -> None:
    (tmp_path / "hook").write_text(hook.url())
    (tmp_path / "train.py").write_text(SCRIPT)
    folder = tmp_path / "run"
    config = {
        "run": {"dir": str(folder), "name": "llm"},
        "alerts": {"to": {"webhook": [f"file:{tmp_path}/hook"]}, "min_gap_s": 0},
    }
    clean = {key: value for key, value in os.environ.items() if not key.startswith("MIDWATCH")}
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, str(tmp_path / "train.py"), json.dumps(config)],
            env={**clean, "OMP_NUM_THREADS": "1"},
            stdout=out,
            stderr=out,
        )
    try:
        until("alert", lambda: told(hook), log.read_text)
        command = [MIDWATCH, "breaker", "go-on", str(folder), "--reason", "a test"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert process.wait(60) == 1
    finally:
        process.kill()
        process.wait()
    titles = [title for _, title in told(hook)]
    wanted = ["the circuit breaker opened", "the circuit breaker closed", "the run ended badly"]
    assert titles == wanted, log.read_text()
    last = hook.posts[-1]
    assert "the script ended with ValueError: bad batch" in last["text"]
    assert "hunter2" not in last["text"]
    assert last["subject"].startswith("[midwatch] llm: ")


def test_a_node_that_takes_over_tells_what_is_new_and_nothing_again(
    run: Supervised, hook: Hook, tmp_path: Path
) -> None:
    (tmp_path / "hook").write_text(hook.url())
    options = ["--nproc-per-node", "1", "--nnodes", "1:3", "--set", "restart.backoff_s=[0]"]
    options += ["--set", "watch.agent_timeout_s=4", "--set", f'alerts.to.webhook=["file:{tmp_path}/hook"]']
    options += [
        "--set",
        "alerts.min_grade=G0",
        "--set",
        "alerts.min_gap_s=0",
        "--set",
        'alerts.on=["incident", "ended"]',
    ]
    command = [str(run.script), str(run.home), "100000", "none", "attached"]
    launchers: dict[str, subprocess.Popen[str]] = {}
    for name in ("n0", "n1"):
        launchers[name] = run.start_command(command, *options, "--node-name", name)
        run.until(f"{name}", lambda name=name: any(e["data"]["node"] == name for e in run.events("node.joined")))
    run.until_training(step=8)
    os.kill(run.number("pid-a1-r0"), signal.SIGKILL)
    run.until_training(attempt=2, step=1)
    until("word of the rank", lambda: len(told(hook)) == 1, run.story)
    lose(launchers.pop("n0"))
    run.until_training(attempt=3, step=1)
    os.kill(run.number("pid-a3-r0"), signal.SIGKILL)
    run.until_training(attempt=4, step=1)
    judged = [line for line in run.events("fault.judged") if line["data"]["grade"] >= "G0"]
    assert len(judged) == 2, run.story()
    until("word of the node", lambda: len(told(hook)) >= 2, run.story)
    launchers["n1"].send_signal(signal.SIGTERM)
    assert run.wait(launchers["n1"]) == 75, run.story()
    names = [ident for ident, _ in told(hook)]
    assert names == [f"coordinator:{line['seq']}" for line in judged]
