"""Metrics on their way out: the page for Prometheus, remote write, TensorBoard, and a receiver that is away."""

from __future__ import annotations

import errno
import json
import math
import struct
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from metrics_jobs import journal_lines, write_journal

from midwatch.audit.exporters import (
    Family,
    Outgoing,
    Pusher,
    RemoteWriteSink,
    Sample,
    SinkAwayError,
    SinkRefusedError,
    TensorBoardSink,
    render,
    training_families,
)
from midwatch.audit.exporters.remote_write import families_request, snappy_literals, write_request
from midwatch.audit.importers import import_metrics
from midwatch.audit.index import MetricIndex, Newest
from midwatch.audit.protowire import fields, signed, varint
from midwatch.core import ConfigError
from midwatch.testing import FakeClock

# --- the page -------------------------------------------------------------------------------------------------------


def test_the_page_is_what_prometheus_reads() -> None:
    newest = [Newest('eval/"acc"\\\n', 0, 2, 500, 0, math.nan), Newest("loss", 0, 2, 501, 0, 2.5)]
    own = [
        Family("midwatch_restarts_total", "Restarts\nso far \\ all", "counter", [Sample(3)]),
        Family("midwatch_up", "Alive.", "gauge", [Sample(math.inf, {"node": "n1"}), Sample(-math.inf, {}, ts_ms=12)]),
        Family("midwatch_empty", "Nothing.", "gauge", []),
    ]
    assert render([*training_families(newest, "r1"), *own]) == (
        "# HELP midwatch_metric Newest value of a number that the training script logged.\n"
        "# TYPE midwatch_metric gauge\n"
        'midwatch_metric{attempt="2",metric="eval/\\"acc\\"\\\\\\n",rank="0",run="r1"} NaN\n'
        'midwatch_metric{attempt="2",metric="loss",rank="0",run="r1"} 2.5\n'
        "# HELP midwatch_restarts_total Restarts\\nso far \\\\ all\n"
        "# TYPE midwatch_restarts_total counter\n"
        "midwatch_restarts_total 3\n"
        "# HELP midwatch_step Newest step for which a number was logged.\n"
        "# TYPE midwatch_step gauge\n"
        'midwatch_step{attempt="2",rank="0",run="r1"} 501\n'
        "# HELP midwatch_up Alive.\n"
        "# TYPE midwatch_up gauge\n"
        'midwatch_up{node="n1"} +Inf\n'
        "midwatch_up -Inf 12\n"
    )


def test_a_family_that_comes_in_parts_is_told_once() -> None:
    parts = [
        Family("a", "A.", "gauge", [Sample(1, {"n": "1"})]),
        Family("a", "A.", "gauge", [Sample(2, {"n": "2"}), Sample(9, {"n": "1"})]),
    ]
    assert render(parts) == '# HELP a A.\n# TYPE a gauge\na{n="1"} 1\na{n="2"} 2\n'


@pytest.mark.parametrize(
    "family",
    [
        Family("a-b", "", "gauge", [Sample(1)]),
        Family("a", "", "gauge", [Sample(1, {"b-c": ""})]),
        Family("a", "", "gauge", [Sample(1, {"__x": ""})]),
    ],
)
def test_a_name_that_prometheus_refuses_is_an_error_of_ours(family: Family) -> None:
    with pytest.raises(ValueError, match="no name"):
        render([family])


# --- what goes over the wire ----------------------------------------------------------------------------------------


def unsnapped(block: bytes) -> bytes:
    """A reader of literals after the format's description, apart from the writer."""
    size, at = varint(memoryview(block), 0)
    out = b""
    while at < len(block):
        kind, length = block[at] & 3, block[at] >> 2
        assert (kind, length) == (0, 61)
        length = struct.unpack_from("<H", block, at + 1)[0] + 1
        out += block[at + 3 : at + 3 + length]
        at += 3 + length
    assert len(out) == size
    return out


def decoded(request: bytes) -> dict[tuple[tuple[str, str], ...], list[tuple[int, float]]]:
    """Labels -> (time, value), in the order in which they stand."""
    found: dict[tuple[tuple[str, str], ...], list[tuple[int, float]]] = {}
    for _, _, _, series in fields(memoryview(request)):
        labels: list[tuple[str, str]] = []
        samples: list[tuple[int, float]] = []
        for number, _, _, content in fields(series):
            parts = {inner: (value, bytes(raw)) for inner, _, value, raw in fields(content)}
            if number == 1:
                labels.append((parts[1][1].decode(), parts[2][1].decode()))
            else:
                samples.append((signed(parts[2][0]), struct.unpack("<d", parts[1][1])[0]))
        assert labels == sorted(labels)
        assert tuple(labels) not in found
        found[tuple(labels)] = samples
    return found


def outgoing(attempt: int, step: int, ts_ms: int, **values: float) -> Outgoing:
    return Outgoing("r1", attempt, 0, step, ts_ms, values)


def test_a_request_says_what_was_recorded() -> None:
    records = [
        outgoing(1, 7, 1000, loss=2.0),
        outgoing(1, 8, 1001, loss=math.nan),
        outgoing(2, 8, 1002, loss=-math.inf),
    ]
    found = decoded(write_request(records))
    first, second = (
        (("__name__", "midwatch_metric"), ("attempt", "1")),
        (("__name__", "midwatch_metric"), ("attempt", "2")),
    )
    rest = (("metric", "loss"), ("rank", "0"), ("run", "r1"))
    assert found[(*first, *rest)][0] == (1000, 2.0)
    assert math.isnan(found[(*first, *rest)][1][1])
    assert found[(*second, *rest)] == [(1002, -math.inf)]
    steps = (("__name__", "midwatch_step"), ("attempt", "1"), ("rank", "0"), ("run", "r1"))
    assert found[steps] == [(1000, 7.0), (1001, 8.0)]


def test_the_page_can_be_pushed_too() -> None:
    families = [
        Family("midwatch_up", "Alive.", "gauge", [Sample(1, {"node": "n1", "empty": ""}), Sample(2, {}, ts_ms=7)])
    ]
    assert decoded(families_request(families, 5)) == {
        (("__name__", "midwatch_up"), ("node", "n1")): [(5, 1.0)],
        (("__name__", "midwatch_up"),): [(7, 2.0)],
    }


@pytest.mark.parametrize("size", [0, 1, 60, 65_535, 65_536, 65_537, 200_000])
def test_a_snappy_block_is_read_back(size: int) -> None:
    data = bytes(index * 7 % 251 for index in range(size))
    assert unsnapped(snappy_literals(data)) == data


# --- delivery -------------------------------------------------------------------------------------------------------


class Receiver:
    """A sink like Prometheus: a sample that is not newer than the newest of its series refuses the whole request."""

    name = "test:receiver"

    def __init__(self) -> None:
        self.got: dict[tuple[int, int, str], list[tuple[int, int, float]]] = {}
        self.away = 0
        self.oldest_ms = 0
        self.requests = 0
        self.dies_after_taking = False

    def send(self, records: Sequence[Outgoing], timeout_s: float) -> None:
        self.requests += 1
        if self.away:
            self.away -= 1
            raise SinkAwayError("nobody there")
        newest = {series: points[-1][0] for series, points in self.got.items()}
        for record in records:
            for metric in record.values:
                series = (record.attempt, record.rank, metric)
                if record.ts_ms <= max(newest.get(series, 0), self.oldest_ms):
                    raise SinkRefusedError("out of order sample")
                newest[series] = record.ts_ms
        for record in records:
            for metric, value in record.values.items():
                self.got.setdefault((record.attempt, record.rank, metric), []).append(
                    (record.ts_ms, record.step, value)
                )
        if self.dies_after_taking:
            self.dies_after_taking = False
            raise KeyboardInterrupt

    def close(self) -> None:
        """Nothing is held."""

    def steps(self, attempt: int, rank: int = 0, metric: str = "loss") -> list[int]:
        return [step for _, step, _ in self.got.get((attempt, rank, metric), [])]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(wall_ns=1_800_000_000_000_000_000)


def test_every_point_arrives_once_also_of_steps_that_are_done_again(run: Path, clock: FakeClock) -> None:
    receiver = Receiver()
    pusher = Pusher(run, receiver, clock=clock)
    write_journal(run, 1, range(100), start=0)
    write_journal(run, 1, range(100), start=0, rank=3)
    assert pusher.step().is_caught_up
    write_journal(run, 1, range(100, 120))
    write_journal(run, 2, range(90, 130), start=90)
    report = pusher.step()
    assert (report.records, report.is_caught_up, report.problem) == (60, True, "")
    assert (receiver.steps(1), receiver.steps(2)) == ([*range(120)], [*range(90, 130)])
    assert receiver.steps(1, rank=3) == [*range(100)]
    assert Pusher(run, receiver, clock=clock).step().records == 0, "another process goes on from there"


def test_nothing_is_lost_while_the_receiver_is_away(run: Path, clock: FakeClock) -> None:
    receiver = Receiver()
    pusher = Pusher(run, receiver, clock=clock)
    write_journal(run, 1, range(10), start=0)
    receiver.away = 5
    waited = 0
    while not (report := pusher.step()).is_caught_up:
        assert "nobody there" in report.problem
        clock.advance(1)
        waited += 1
        write_journal(run, 1, [10 + waited - 1])
    assert receiver.steps(1) == [*range(10 + waited)]
    assert receiver.requests == 6, "asked ever less often"
    assert 20 < waited < 64


def test_a_receiver_that_took_what_we_did_not_note(run: Path, clock: FakeClock) -> None:
    receiver = Receiver()
    write_journal(run, 1, range(50), start=0)
    receiver.dies_after_taking = True
    with pytest.raises(KeyboardInterrupt):
        Pusher(run, receiver, clock=clock).step()
    write_journal(run, 1, range(50, 60))
    pusher = Pusher(run, receiver, clock=clock)
    report = pusher.step(10)
    assert report.is_caught_up
    assert report.refused + report.records == 60
    assert receiver.steps(1) == [*range(60)], "none twice, none lost"


def test_old_samples_that_are_refused_do_not_hold_up_the_new(run: Path, clock: FakeClock) -> None:
    receiver = Receiver()
    path = write_journal(run, 1, range(2000), start=0)
    receiver.oldest_ms = 1_700_001_000_000 + 1699
    report = Pusher(run, receiver, clock=clock).step(30)
    assert report.is_caught_up
    assert report.refused + report.records == 2000
    assert receiver.steps(1)[-1] == 1999
    assert len(receiver.steps(1)) >= 300 - 32, "some at the edge may be lost"
    assert receiver.requests < 1100
    assert path.exists()


def test_a_clock_that_jumps_does_not_stop_anything(run: Path, clock: FakeClock) -> None:
    now_ns = clock.wall_ns()
    stamps = [now_ns - 10**9, now_ns - 10**9, now_ns - 9 * 10**9, now_ns + 10**14, now_ns - 10**8]
    path = write_journal(run, 1, [], start=0)
    with path.open("ab") as file:
        file.write(journal_lines({"step": step, "ts_ns": ts_ns, "loss": 1.0} for step, ts_ns in enumerate(stamps)))
    receiver = Receiver()
    assert Pusher(run, receiver, clock=clock).step().is_caught_up
    times = [ts_ms for ts_ms, _, _ in receiver.got[1, 0, "loss"]]
    assert receiver.steps(1) == [0, 1, 2, 3, 4]
    assert times == sorted(set(times))
    assert times[-1] <= now_ns // 10**6 + 2, "nothing is told for the future"


def test_records_without_a_time_are_counted(run: Path, clock: FakeClock) -> None:
    path = write_journal(run, 1, [0], start=0)
    with path.open("ab") as file:
        file.write(journal_lines([{"step": 1, "loss": 1.0}]))
    report = Pusher(run, Receiver(), clock=clock).step()
    assert (report.records, report.timeless, report.is_caught_up) == (1, 1, True)


def test_a_note_that_cannot_be_read_or_written(run: Path, clock: FakeClock) -> None:
    write_journal(run, 1, range(5), start=0)
    receiver = Receiver()
    Pusher(run, receiver, clock=clock).step()
    (note,) = (run / "metrics" / "push").glob("*.json")
    note.write_text("{")
    report = Pusher(run, receiver, clock=clock).step(5)
    assert (report.refused, report.is_caught_up) == (5, True), "sent again, and refused as old news"
    assert json.loads(note.read_text())["refused"] == 5


def test_a_journal_that_was_replaced_is_sent_with_its_own_times(run: Path, clock: FakeClock) -> None:
    path = write_journal(run, 1, range(50, 60), start=0)
    Pusher(run, Receiver(), clock=clock).step()
    path.unlink()
    write_journal(run, 1, range(20), start=0)
    receiver = Receiver()
    pusher = Pusher(run, receiver, clock=clock)
    assert pusher.step().is_caught_up
    assert receiver.got[1, 0, "loss"][0][:2] == (1_700_001_000_000, 0)
    assert receiver.steps(1) == [*range(20)]


def test_a_problem_that_is_over_is_told_no_more(run: Path, clock: FakeClock) -> None:
    receiver = Receiver()
    receiver.away = 1
    pusher = Pusher(run, receiver, clock=clock)
    write_journal(run, 1, range(2000), start=0)
    assert "nobody" in pusher.step().problem
    clock.advance(1)
    report = pusher.step(budget_s=0)
    assert (report.is_caught_up, report.problem) == (False, "")
    assert report.records > 0


def test_a_run_folder_that_is_not_mounted_is_not_made(run: Path, clock: FakeClock) -> None:
    assert Pusher(run, Receiver(), clock=clock).step().records == 0
    assert not run.exists()


def test_two_that_send_at_once(run: Path, clock: FakeClock) -> None:
    write_journal(run, 1, range(5), start=0)
    other = Pusher(run, Receiver(), clock=clock)

    class Slow(Receiver):
        def send(self, records: Sequence[Outgoing], timeout_s: float) -> None:
            assert other.step().problem == "another process is sending"
            super().send(records, timeout_s)

    slow = Slow()
    assert Pusher(run, slow, clock=clock).step().is_caught_up
    assert other.step().records == 0
    assert slow.steps(1) == [*range(5)]


def test_a_part_that_reads_as_zeros_is_waited_for(run: Path, clock: FakeClock) -> None:
    path = write_journal(run, 1, range(10), start=0)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    hole = sum(map(len, lines[:4])), sum(map(len, lines[:7]))
    # As another host may see it over NFS: the end has arrived, the middle has not.
    path.write_bytes(whole[: hole[0]] + bytes(hole[1] - hole[0]) + whole[hole[1] :])
    write_journal(run, 2, range(5, 8), start=5)
    receiver = Receiver()
    pusher = Pusher(run, receiver, clock=clock)
    report = pusher.step()
    assert (report.is_caught_up, report.problem) == (False, "")
    assert (receiver.steps(1), receiver.steps(2)) == ([0, 1, 2], [5, 6, 7])
    clock.advance(30)
    path.write_bytes(whole)
    assert pusher.step().is_caught_up
    assert receiver.steps(1) == [*range(10)]


def test_but_not_for_ever(run: Path, clock: FakeClock) -> None:
    path = write_journal(run, 1, range(3), start=0)
    with path.open("ab") as file:
        file.write(bytes(5000))
    write_journal(run, 1, range(3, 6))
    receiver = Receiver()
    pusher = Pusher(run, receiver, clock=clock)
    assert not pusher.step().is_caught_up
    clock.advance(61)
    assert pusher.step().is_caught_up
    assert receiver.steps(1) == [0, 1, 2, 4, 5], "the line that began in the zeros is damaged"


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_mount_without_locks_is_sent_from_all_the_same(
    run: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(code, "no locks")

    write_journal(run, 1, range(5), start=0)
    monkeypatch.setattr("fcntl.flock", refuse)
    receiver = Receiver()
    assert Pusher(run, receiver, clock=clock).step().is_caught_up
    assert receiver.steps(1) == [*range(5)]


# --- over HTTP ------------------------------------------------------------------------------------------------------


class Server(HTTPServer):
    """Answers what the test says, and keeps what it got."""

    answers: list[tuple[int, dict[str, str]]]
    got: list[tuple[str, dict[str, str], bytes]]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server.got.append((self.path, dict(self.headers), body))
        status, headers = server.answers.pop(0) if server.answers else (204, {})
        text = b"because" if status != 204 else b""
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(text))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name for it
        """Silent."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.answers, server.got = [], []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_request_over_http(server: Server, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("sesame\n")
    sink = RemoteWriteSink(f"http://127.0.0.1:{server.server_port}/api/v1/write?extra=1", token_file=token)
    sink.send([outgoing(1, 7, 1000, loss=2.0)], 5.0)
    token.write_text("exchanged\n")
    sink.send([outgoing(1, 8, 1001, loss=2.0)], 5.0)
    sink.send_families([Family("midwatch_up", "", "gauge", [Sample(1)])], 5, 5.0)
    sink.close()
    path, headers, body = server.got[0]
    assert path == "/api/v1/write?extra=1"
    assert headers["Content-Encoding"] == "snappy"
    assert headers["X-Prometheus-Remote-Write-Version"] == "0.1.0"
    assert [one[1]["Authorization"] for one in server.got] == ["Bearer sesame", "Bearer exchanged", "Bearer exchanged"]
    assert len(decoded(unsnapped(body))) == 2
    token.write_text("sesame\nsecond line\n")
    with pytest.raises(SinkAwayError, match="more than one line") as caught:
        sink.send([outgoing(1, 9, 1002, loss=2.0)], 5.0)
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "headers", "kind", "wait_s"),
    [
        (400, {}, SinkRefusedError, 0),
        (413, {}, SinkRefusedError, 0),
        (401, {}, SinkAwayError, 0),
        (404, {}, SinkAwayError, 0),
        (301, {"Location": "/elsewhere"}, SinkAwayError, 0),
        (429, {"Retry-After": "7"}, SinkAwayError, 7),
        (503, {"Retry-After": "Wed, 21 Oct 2026"}, SinkAwayError, 0),
        (500, {"Connection": "close"}, SinkAwayError, 0),
    ],
)
def test_what_answers_mean(
    server: Server, status: int, headers: dict[str, str], kind: type[Exception], wait_s: float
) -> None:
    sink = RemoteWriteSink(f"http://user:secret@127.0.0.1:{server.server_port}/w")
    server.answers = [(status, headers)]
    with pytest.raises(kind, match=f"answered {status}: because") as caught:
        sink.send([outgoing(1, 7, 1000, loss=2.0)], 5.0)
    assert "secret" not in str(caught.value) + sink.name
    assert getattr(caught.value, "retry_after_s", 0) == wait_s
    sink.send([outgoing(1, 7, 1000, loss=2.0)], 5.0)
    sink.close()


def test_nobody_listens(server: Server) -> None:
    sink = RemoteWriteSink("http://127.0.0.1:1/api/v1/write")
    with pytest.raises(SinkAwayError, match="refused"):
        sink.send([outgoing(1, 7, 1000, loss=2.0)], 1.0)
    sink.close()


@pytest.mark.parametrize("url", ["", "localhost:9090", "ftp://x/y", "http://", "http://x:port/"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RemoteWriteSink(url)
    assert caught.value.code == "CF102"


# --- TensorBoard ----------------------------------------------------------------------------------------------------


def test_tensorboard_shows_attempts_as_runs(run: Path, tmp_path: Path, clock: FakeClock) -> None:
    write_journal(run, 1, range(10), start=0, nan="nan", huge=1e300)
    pusher = Pusher(run, TensorBoardSink(tmp_path / "tb"), clock=clock)
    assert pusher.step().is_caught_up
    write_journal(run, 2, range(5, 15), start=5)
    assert pusher.step().is_caught_up
    assert sorted(path.name for path in (tmp_path / "tb").iterdir()) == ["a0001", "a0002"]
    import_metrics([tmp_path / "tb" / "a0001", tmp_path / "tb" / "a0002"], tmp_path / "back")
    with MetricIndex(tmp_path / "back", tmp_path / "indexes") as index:
        index.sync()
        assert [(int(value), step) for step, value in index.series("loss")] == [(1, s) for s in range(5)] + [
            (2, s) for s in range(5, 15)
        ]
        assert index.series("huge")[0].value == math.inf
        assert math.isnan(index.series("nan")[0].value)
