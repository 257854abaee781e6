"""What a person asks of a live run: hold it, let it go on, leave a node out, let it in again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from supervised import MIDWATCH, Supervised

pytestmark = pytest.mark.procs


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Supervised]:
    supervised = Supervised(tmp_path)
    yield supervised
    supervised.close()


def midwatch(*words: str, code: int = 0) -> Any:
    done = subprocess.run([MIDWATCH, *words, "--json"], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def test_a_held_run_starts_nothing_until_a_person_lets_it(run: Supervised) -> None:
    launcher = run.start("none", "--set", "restart.backoff_s=[0]", steps=4000, mode="attached")
    run.until_training(step=3)
    folder = str(run.run_dir)
    assert midwatch("hold", folder, "--reason", "switch work", "--dry-run")["state"].startswith("unchanged")
    answer = midwatch("hold", folder, "--reason", "switch work")
    assert (answer["state"], answer["held"]) == ("running", "switch work")
    os.kill(run.number("pid-a1-r1"), signal.SIGKILL)
    run.until("the hold", lambda: run.events("run.held"))
    assert len(run.events("attempt.launched")) == 1
    midwatch("resume-run", folder, "--reason", "work is done")
    run.until_training(attempt=2, step=1)
    launcher.send_signal(signal.SIGUSR2)  # as Slurm announces a time limit, where it is asked to
    assert run.wait(launcher) == 75, run.story()
    assert run.number("saved-r0") > 0
    assert [line["data"]["by"] for line in run.events("hold.ended")] == ["person"]
    (incident,) = midwatch("incidents", "ls", folder)
    assert incident["root_rank"] == 1
    assert midwatch("incidents", "show", folder, incident["incident"])["damaged"] == []
    report = run.run_dir / "incidents" / incident["incident"] / "report.txt"
    report.write_text("nothing happened\n")
    assert midwatch("incidents", "show", folder, code=1)["damaged"] == ["report.txt"]


def test_a_node_that_is_left_out_gets_no_ranks_and_stays_known_to_later_jobs(run: Supervised) -> None:
    command = [str(run.script), str(run.home), "4000", "none", "attached"]
    probe, probed = run.home / "check_fan", run.home / "probed"
    probe.write_text(f'#!/bin/sh\necho "$1" > {probed}\nexit 1\n')
    probe.chmod(0o755)
    machines = run.folder / "fleet.json"
    settings = ("--set", "restart.backoff_s=[0]", "--set", f'isolate.probes=["{probe}"]')
    settings += ("--set", f"isolate.ledger={machines}")
    options = ("--nnodes", "1:2", *settings, "--node-name")
    launchers = [run.start_command(command, *options, "n0")]
    run.until_training(step=3)
    launchers.append(run.start_command(command, *options, "n1"))
    run.until("the spare", lambda: any(line["data"]["node"] == "n1" for line in run.events("node.joined")))
    folder = str(run.run_dir)
    assert midwatch("node", "isolate", folder, "nobody", "--reason", "x", code=2)["error"] == "SV115"
    for node, code in (("nobody", 2), ("n0", 0)):
        midwatch("node", "isolate", folder, node, "--reason", "x", "--dry-run", code=code)
    assert not run.events("node.isolated")
    assert midwatch("node", "isolate", folder, "n0", "--reason", "fan is broken")["excluded"] == ["n0"]
    os.kill(run.number("pid-a1-r0"), signal.SIGKILL)
    run.until_training(attempt=2, step=1)
    assert [node for node, _ in run.events("attempt.launched")[-1]["data"]["placements"]] == ["n1"]
    assert run.events("gate.probed")[-1]["data"]["failed"] == [], "the spare was probed before ranks started there"
    assert probed.read_text().strip() == folder, "by the site's own probe, too"
    run.until("the list", machines.exists)
    (machine,) = midwatch("node", "list", folder)
    assert (machine["node"], machine["is_out"]) == ("n0", True)
    midwatch("node", "release", folder, "n0", "--reason", "new fan")
    run.until("the list to say so", lambda: not midwatch("node", "list", folder)[0]["is_out"])
    for launcher in launchers:
        launcher.send_signal(signal.SIGTERM)
    assert {run.wait(launcher) for launcher in launchers} == {75}, run.story()
    sentence = midwatch("node", "isolate", folder, "n0", "--reason", "noise")["state"]
    assert sentence == "no run is live; node n0 is left out of the next run"
    assert midwatch("node", "list", folder)[0]["is_out"]
