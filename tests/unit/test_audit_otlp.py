"""OTLP: what goes over the wire, read back with the published messages, and what receivers answer."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from midwatch.audit.exporters import Outgoing, RemoteWriteSink, SinkAwayError, SinkRefusedError, sink_of

pb = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")


class Collector(HTTPServer):
    """Answers what the test says, and keeps what it got."""

    answer: tuple[int, bytes] = (200, b"")

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.got: list[tuple[str, dict[str, str], bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/metrics"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        collector = self.server
        assert isinstance(collector, Collector)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        collector.got.append((self.path, dict(self.headers), body))
        status, text = collector.answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name for it
        """Silent."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield collector
        collector.shutdown()
        thread.join()


def record(step: int, **values: float) -> Outgoing:
    return Outgoing("r1", 2, 3, step, 1_700_000_000_000 + step, values)


def points(body: bytes) -> dict[str, list[tuple[dict[str, str], int, float]]]:
    """Name -> (attributes, time in ns, value)."""
    request: Any = pb.ExportMetricsServiceRequest.FromString(body)
    (resource,) = request.resource_metrics
    assert resource.resource.attributes[0].value.string_value == "midwatch"
    (scope,) = resource.scope_metrics
    return {
        metric.name: [
            ({one.key: one.value.string_value for one in point.attributes}, point.time_unix_nano, point.as_double)
            for point in metric.gauge.data_points
        ]
        for metric in scope.metrics
    }


def test_each_value_keeps_the_time_of_its_step(collector: Collector) -> None:
    sink = sink_of(collector.url)
    sink.send([record(7, loss=2.5), record(8, loss=math.nan, lr=math.inf)], 5.0)
    sink.close()
    ((path, headers, body),) = collector.got
    assert (path, headers["Content-Type"]) == ("/v1/metrics", "application/x-protobuf")
    found = points(body)
    place = {"run": "r1", "attempt": "2", "rank": "3"}
    assert found["midwatch_step"] == [
        (place, 1_700_000_000_007_000_000, 7.0),
        (place, 1_700_000_000_008_000_000, 8.0),
    ]
    first, second, third = found["midwatch_metric"]
    assert first == ({**place, "metric": "loss"}, 1_700_000_000_007_000_000, 2.5)
    assert math.isnan(second[2])
    assert third == ({**place, "metric": "lr"}, 1_700_000_000_008_000_000, math.inf)


@pytest.mark.parametrize(("status", "kind"), [(400, SinkRefusedError), (503, SinkAwayError), (404, SinkAwayError)])
def test_what_answers_mean(collector: Collector, status: int, kind: type[Exception]) -> None:
    collector.answer = (status, b"because")
    sink = sink_of(collector.url)
    with pytest.raises(kind, match=f"answered {status}: because"):
        sink.send([record(7, loss=2.5)], 5.0)
    sink.close()


def test_a_part_that_was_rejected_is_not_sent_again(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    answer: Any = pb.ExportMetricsServiceResponse()
    answer.partial_success.rejected_data_points = 1
    answer.partial_success.error_message = "too old\x1b[31m"
    collector.answer = (200, answer.SerializeToString())
    sink = sink_of(collector.url)
    for step in (7, 8):
        sink.send([record(step, loss=2.5)], 5.0)
    collector.answer = (200, b"{}")
    sink.send([record(9, loss=2.5)], 5.0)
    sink.close()
    (warning,) = [message for message in caplog.messages if "rejected 1" in message]
    assert "\x1b" not in warning


def test_which_addresses_are_spoken_to_by_otlp() -> None:
    for url in (
        "http://c:4318/v1/metrics",
        "http://v:8428/opentelemetry/v1/metrics?x=1",
        "https://p/api/v1/otlp/v1/metrics/",
    ):
        assert sink_of(url).name.startswith("otlp:http")
    assert sink_of("http://c/other", kind="otlp").name == "otlp:http://c/other"
    for plain in (sink_of("http://p/api/v1/write"), sink_of("http://c/v1/metrics", kind="remote_write")):
        assert isinstance(plain, RemoteWriteSink)
