"""Training sends its metrics to real databases that go away for a minute, while ranks die and steps are repeated."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prerequisites import install
from test_time_series_servers import Prometheus, Server, Victoria, until

from midwatch.audit import read_run
from midwatch.supervise import fetch_status

pytestmark = [pytest.mark.e2e, pytest.mark.procs, pytest.mark.torch, pytest.mark.timeout(300)]

DOWN_S = 60.0
ROOT = Path(__file__).parents[2]

TRAINER = """
import sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import midwatch

stop = Path(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(7)
model = DistributedDataParallel(torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
run = midwatch.attach(params={"lr": 1e-3})
run.track(model=model, optimizer=optimizer)
for step in run.steps(run.resume(), 100_000):
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    inputs = torch.randn(32, 16, generator=generator)
    loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ends = torch.tensor(float(stop.exists()))
    dist.all_reduce(ends)
    run.log(loss=loss, lr=1e-3)
    if ends:
        break
    time.sleep(0.05)
run.close()
dist.destroy_process_group()
"""


class Side:
    """One run and the database that it sends to."""

    def __init__(self, folder: Path, server: Server) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.server = folder, server
        self.run_dir, self.stop = folder / "run", folder / "stop"
        self.script = folder / "train.py"
        self.script.write_text(TRAINER)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        settings = [
            *("run.log_every=5", "checkpoint.interval=50", "restart.backoff_s=[0]"),
            *(f"metrics.push.url={self.server.url}", "metrics.push.every_s=0.5", "metrics.listen=0"),
            f"metrics.index_dir={self.folder / 'indexes'}",
        ]
        words = [word for setting in settings for word in ("--set", setting)]
        midwatch = str(Path(sys.executable).parent / "midwatch")
        command = [midwatch, "run", "--run-dir", str(self.run_dir), "--nproc-per-node", "2", "--tee", "none"]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *words, "--", str(self.script), str(self.stop)],
                cwd=self.folder,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def recorded(self) -> list[tuple[int, int, float]]:
        """Attempt, step and loss of every record, those that were rolled back included."""
        found: list[tuple[int, int, float]] = []
        for path in sorted((self.run_dir / "metrics").glob("a*.jsonl")):
            for raw in path.read_bytes().splitlines():
                line = json.loads(raw)
                if line.get("step") is not None and "loss" in line:
                    found.append((int(path.stem[1:]), line["step"], line["loss"]))
        return found

    def step(self, attempt: int) -> int:
        """The newest that an attempt recorded; -1 before the first."""
        return max((step for one, step, _ in self.recorded() if one == attempt), default=-1)

    def kill_a_rank(self) -> None:
        (agent,) = fetch_status(self.run_dir)["agents"]
        (pid,) = (rank["pid"] for rank in agent["ranks"] if rank["rank"] == 1)
        os.kill(pid, signal.SIGKILL)

    def events(self) -> list[str]:
        path = self.run_dir / "ledger" / "sender.jsonl"
        return [json.loads(line)["event"] for line in path.read_bytes().splitlines()] if path.exists() else []

    def stored(self) -> list[tuple[int, int, float]]:
        """The same from the database: what was stored for one time is one record."""
        info = read_run(self.run_dir)
        assert info is not None
        found: list[tuple[int, int, float]] = []
        losses = series(self.server, f'midwatch_metric{{run="{info.run}",metric="loss",instance=""}}')
        steps = series(self.server, f'midwatch_step{{run="{info.run}",instance=""}}')
        assert losses.keys() == steps.keys()
        for attempt, values in losses.items():
            assert [at for at, _ in values] == sorted({at for at, _ in values}), "no time twice"
            step_at = dict(steps[attempt])
            found += [(attempt, int(step_at[at]), value) for at, value in values]
        return found

    def story(self) -> str:
        logs = [self.folder / "log", *sorted((self.run_dir / "supervisor").glob("*.log"))]
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in logs if path.exists())

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            # The guardian ends what is below.
            self.process.kill()
            self.process.wait(10)
        self.server.down()


def series(server: Server, selector: str) -> dict[int, list[tuple[int, float]]]:
    """Attempt -> (time in ms, value) in order of time, each as often as it is stored."""
    if isinstance(server, Prometheus):
        rows = [(one["metric"], one["values"]) for one in server.query(f"{selector}[1h]")]
        pairs = [(labels, [(round(float(at) * 1000), float(value)) for at, value in values]) for labels, values in rows]
    else:
        server.get("/internal/force_flush")
        lines = [json.loads(line) for line in server.get("/api/v1/export", **{"match[]": selector}).splitlines()]
        pairs = [(one["metric"], list(zip(one["timestamps"], one["values"], strict=True))) for one in lines]
    found: dict[int, list[tuple[int, float]]] = {}
    for labels, values in pairs:
        found.setdefault(int(labels["attempt"]), []).extend(values)
    return {attempt: sorted(values) for attempt, values in found.items()}


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[list[Side]]:
    install("prometheus:prometheus", "promtool:prometheus", "victoria-metrics:victoria-metrics")
    scrape = tmp_path / "p" / "run" / "supervisor" / "scrape" / "*.json"
    config = f"""
scrape_configs:
  - job_name: midwatch
    scrape_interval: 1s
    file_sd_configs: [{{files: ['{scrape}'], refresh_interval: 1s}}]
"""
    servers = [Prometheus(tmp_path / "prometheus", config=config), Victoria(tmp_path / "victoria")]
    sides = [Side(tmp_path / name, server) for name, server in zip("pv", servers, strict=True)]
    try:
        yield sides
    finally:
        for side in sides:
            side.close()


def test_a_minute_without_the_databases(sides: list[Side]) -> None:
    for side in sides:
        side.server.up()
        side.start()
    for side in sides:
        until(lambda side=side: side.step(1) >= 70, f"step 70\n{side.story()}")
        side.kill_a_rank()
    for side in sides:
        until(lambda side=side: side.step(2) >= 60, f"attempt 2\n{side.story()}")
    scraped(sides[0].server)
    for side in sides:
        side.server.down()
    down = time.monotonic()
    for side in sides:
        until(lambda side=side: side.step(2) >= 120, f"more of attempt 2\n{side.story()}")
        side.kill_a_rank()
    for side in sides:
        until(lambda side=side: side.step(3) >= 0, f"attempt 3\n{side.story()}")
    time.sleep(max(0.0, down + DOWN_S - time.monotonic()))
    for side in sides:
        assert side.events() == ["metrics.push_failed"], side.story()
        side.server.up()
    for side in sides:
        until(lambda side=side: "metrics.push_recovered" in side.events(), f"delivery\n{side.story()}")
        side.stop.touch()
    for side in sides:
        assert side.process is not None
        assert side.process.wait(60) == 0, side.story()
        check(side)


def check(side: Side) -> None:
    recorded, stored = side.recorded(), side.stored()
    for attempt in (1, 2):
        steps, again = ({step for one, step, _ in recorded if one == number} for number in (attempt, attempt + 1))
        assert steps & again, "nothing was done again: the test shows less than it says"
    assert sorted(place[:2] for place in stored) == sorted(place[:2] for place in recorded)
    losses = {(attempt, step): loss for attempt, step, loss in recorded}
    # VictoriaMetrics keeps some fifteen digits.
    assert all(math.isclose(loss, losses[attempt, step], rel_tol=1e-12) for attempt, step, loss in stored)
    assert side.events() == ["metrics.push_failed", "metrics.push_recovered"]


def scraped(server: Server) -> None:
    """Prometheus has found the page by itself and understands all of it."""
    assert isinstance(server, Prometheus)
    (up,) = until(lambda: server.query('up{job="midwatch"} == 1'), "scrape")
    until(lambda: server.query('midwatch_rank_step{rank="1"} > 0'), "step of rank 1")
    target = up["metric"]["instance"]
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    checked = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    until(lambda: server.query("midwatch_checkpoint_age_seconds{} < 60"), f"newest checkpoint\n{page}")


def test_the_rules_in_the_documentation_are_rules(tmp_path: Path) -> None:
    install("promtool:prometheus")
    text = (ROOT / "docs" / "how-to" / "metrics-on-a-dashboard.md").read_text()
    (rules,) = re.findall(r"```yaml\n(groups:.*?)```", text, re.DOTALL)
    (tmp_path / "rules.yml").write_text(rules)
    checked = subprocess.run(
        ["promtool", "check", "rules", str(tmp_path / "rules.yml")], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
