"""Metrics sent to a real Prometheus and a real VictoriaMetrics: every point once, whoever goes away meanwhile."""

from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from prerequisites import install

from midwatch.audit import Journal, ensure_run
from midwatch.audit.exporters import Family, Pusher, RemoteWriteSink, Sample, render, training_families
from midwatch.audit.index import MetricIndex

pytestmark = [pytest.mark.e2e, pytest.mark.procs, pytest.mark.timeout(180)]

PATIENCE_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(question: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + PATIENCE_S
    while not (answer := question()):
        assert time.monotonic() < end, f"still no {what}"
        time.sleep(0.1)
    return answer


class Server:
    """One database in a folder; it can be stopped and started again."""

    ready = "/-/ready"

    def __init__(self, folder: Path, *, config: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.port = folder, free_port()
        (folder / "config.yml").write_text(config or "global: {}\n")
        self.process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def up(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=log)
        until(self.is_ready, f"answer, see {self.folder / 'log'}")

    def down(self) -> None:
        if self.process is not None:
            # In order: VictoriaMetrics may lose what it took in the last seconds before a kill.
            self.process.terminate()
            self.process.wait(60)

    def get(self, path: str, **query: str) -> bytes:
        url = f"http://127.0.0.1:{self.port}{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read()

    def is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "log").read_text()[-2000:]
        try:
            return bool(self.get(self.ready))
        except (urllib.error.URLError, ConnectionError):
            return False

    def points(self, run: str) -> dict[tuple[str, str], list[tuple[int, float]]]:
        """(attempt, metric) -> (time in ms, value), as stored."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api/v1/write"


class Prometheus(Server):
    def command(self) -> list[str]:
        return [
            "prometheus",
            f"--config.file={self.folder / 'config.yml'}",
            f"--storage.tsdb.path={self.folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--web.enable-remote-write-receiver",
        ]

    def query(self, text: str) -> list[dict[str, Any]]:
        return json.loads(self.get("/api/v1/query", query=text))["data"]["result"]

    def points(self, run: str) -> dict[tuple[str, str], list[tuple[int, float]]]:
        found = self.query(f'midwatch_metric{{run="{run}"}}[1h]')
        return {
            (one["metric"]["attempt"], one["metric"]["metric"]): [
                (round(float(at) * 1000), float(value)) for at, value in one["values"]
            ]
            for one in found
        }


class Victoria(Server):
    ready = "/health"

    def command(self) -> list[str]:
        return [
            "victoria-metrics",
            f"-storageDataPath={self.folder / 'data'}",
            f"-httpListenAddr=127.0.0.1:{self.port}",
            "-search.latencyOffset=0s",
            # As the documentation advises: what came twice is one sample.
            "-dedup.minScrapeInterval=1ms",
        ]

    def points(self, run: str) -> dict[tuple[str, str], list[tuple[int, float]]]:
        self.get("/internal/force_flush")
        lines = self.get("/api/v1/export", **{"match[]": f'midwatch_metric{{run="{run}"}}'}).splitlines()
        found: dict[tuple[str, str], list[tuple[int, float]]] = {}
        # This version writes infinity in a way that is no JSON.
        for one in (json.loads(re.sub(rb"(?<=[\[,])\+?Inf(?=[\],])", b"Infinity", line)) for line in lines):
            values = [math.nan if value is None else float(value) for value in one["values"]]
            pairs = zip(one["timestamps"], values, strict=True)
            found.setdefault((one["metric"]["attempt"], one["metric"]["metric"]), []).extend(pairs)
        return found


KINDS = {"prometheus": Prometheus, "victoria-metrics": Victoria}


@pytest.fixture(params=sorted(KINDS))
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    install(f"{request.param}:{request.param}")
    server = KINDS[request.param](tmp_path / "server")
    try:
        server.up()
        yield server
    finally:
        server.down()


class Training:
    """Writes a journal as a run does, a step a second until now."""

    def __init__(self, run_dir: Path) -> None:
        self.run = ensure_run(run_dir).run
        self._run_dir = run_dir
        self._now_ns = time.time_ns() - 600 * 10**9
        self._journal: Journal | None = None

    def begin(self, attempt: int, start: int) -> None:
        self.close()
        self._journal = Journal(self._run_dir / "metrics" / f"a{attempt:04d}.jsonl")
        self._journal.begin(attempt, start)

    def steps(self, first: int, last: int) -> None:
        assert self._journal is not None
        for step in range(first, last):
            self._now_ns += 10**9
            self._journal.append({"step": step, "ts_ns": self._now_ns, "loss": step + 0.5, "lr": 0.1})
        self._journal.flush()

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()


def push(pusher: Pusher) -> None:
    until(lambda: pusher.step().is_caught_up, "delivery")


def values(server: Server, training: Training, attempt: int) -> list[float]:
    return [value for _, value in sorted(server.points(training.run).get((str(attempt), "loss"), []))]


def test_every_point_arrives_once(server: Server, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    training = Training(run_dir)
    pusher = Pusher(run_dir, RemoteWriteSink(server.url))
    training.begin(1, 0)
    training.steps(0, 100)
    push(pusher)
    # The database goes away in the middle, and the run goes on, is rolled back, and does some steps again.
    server.down()
    training.steps(100, 120)
    assert "refused" in pusher.step().problem
    training.begin(2, 90)
    training.steps(90, 130)
    server.up()
    push(pusher)
    training.steps(130, 140)
    push(pusher)
    pusher.close()
    training.close()
    assert values(server, training, 1) == [step + 0.5 for step in range(120)]
    assert values(server, training, 2) == [step + 0.5 for step in range(90, 140)]


def test_a_sender_that_lost_its_note(server: Server, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    training = Training(run_dir)
    training.begin(1, 0)
    training.steps(0, 50)
    pusher = Pusher(run_dir, RemoteWriteSink(server.url))
    push(pusher)
    pusher.forget()
    training.steps(50, 60)
    push(pusher)
    pusher.close()
    training.close()
    stored = server.points(training.run)["1", "loss"]
    assert sorted(value for _, value in stored) == [step + 0.5 for step in range(60)]


def test_values_that_are_no_numbers(server: Server, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run = ensure_run(run_dir).run
    journal = Journal(run_dir / "metrics" / "a0001.jsonl")
    now_ns = time.time_ns() - 10**10
    odd = {'a/b "c" \\ d\n': 1.0, "größe": 2.0, "inf": math.inf}
    journal.append({"step": 1, "ts_ns": now_ns, **odd})
    journal.close()
    pusher = Pusher(run_dir, RemoteWriteSink(server.url))
    push(pusher)
    pusher.close()
    stored = server.points(run)
    assert (stored["1", "größe"][0][1], stored["1", "inf"][0][1]) == (2.0, math.inf)
    assert stored["1", 'a/b "c" \\ d\n'][0][1] == 1.0


class _Page(BaseHTTPRequestHandler):
    text = ""

    def do_GET(self) -> None:
        body = type(self).text.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name for it
        """Silent."""


def test_the_page_is_scraped(tmp_path: Path) -> None:
    install("prometheus:prometheus", "promtool:prometheus")
    training = Training(tmp_path / "run")
    training.begin(1, 0)
    training.steps(0, 5)
    training.close()
    with MetricIndex(tmp_path / "run", tmp_path / "indexes") as index:
        index.sync()
        own = Family("midwatch_restarts_total", 'Restarts "so far" \\', "counter", [Sample(3, {"node": 'a"b\\c\n'})])
        _Page.text = render([*training_families(index.newest(), training.run), own])
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=_Page.text, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    with HTTPServer(("127.0.0.1", 0), _Page) as page:
        thread = threading.Thread(target=page.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        target = f"127.0.0.1:{page.server_port}"
        config = (
            f"scrape_configs: [{{job_name: m, scrape_interval: 1s, static_configs: [{{targets: ['{target}']}}]}}]\n"
        )
        server = Prometheus(tmp_path / "server", config=config)
        try:
            server.up()
            (loss,) = until(lambda: server.query('midwatch_metric{metric="loss"}'), "scrape")
            assert (loss["value"][1], loss["metric"]["run"]) == ("4.5", training.run)
            assert server.query("midwatch_restarts_total")[0]["metric"]["node"] == 'a"b\\c\n'
            assert server.query("midwatch_step")[0]["value"][1] == "4"
        finally:
            server.down()
            page.shutdown()
            thread.join()
