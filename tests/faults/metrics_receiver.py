"""A receiver of Prometheus remote write for tests: keeps every sample it is given, and can be away or mute."""

from __future__ import annotations

import struct
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from midwatch.audit.protowire import fields, signed, varint

Point = tuple[str, str, int, float]
"""Attempt, metric, time in ms, value."""


class Receiver(ThreadingHTTPServer):
    """Answers 503 while ``is_away``; while ``is_mute`` nothing is taken or answered. When ``is_slow`` is set, the
    next that is sent is taken and never answered."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.points: Counter[Point] = Counter()
        self.is_away = False
        self.is_mute = threading.Event()
        self.is_slow = threading.Event()
        self.unanswered: list[list[Point]] = []
        self.refused = 0
        self.over = threading.Event()
        self.asked = 0
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/api/v1/write"

    def of(self, metric: str) -> Counter[tuple[int, float]]:
        """(attempt, value), and how often it arrived."""
        found: Counter[tuple[int, float]] = Counter()
        for (attempt, name, _, value), count in self.points.items():
            if name == metric:
                found[int(attempt), value] += count
        return found

    def close(self) -> None:
        self.over.set()
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        receiver = self.server
        assert isinstance(receiver, Receiver)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        receiver.asked += 1
        if receiver.is_mute.is_set():
            receiver.over.wait(60)
            self.close_connection = True
            return
        is_taken = not receiver.is_away
        if is_taken:
            points = points_of(_unsnapped(body))
            receiver.points.update(points)
            if receiver.is_slow.is_set():
                receiver.is_slow.clear()
                receiver.unanswered.append(points)
                receiver.over.wait(60)
                self.close_connection = True
                return
        else:
            receiver.refused += 1
        self.send_response(204 if is_taken else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name for it
        """Silent."""


def points_of(request: bytes) -> list[Point]:
    found: list[Point] = []
    for _, _, _, series in fields(memoryview(request)):
        labels: dict[str, str] = {}
        samples: list[tuple[int, float]] = []
        for number, _, _, content in fields(series):
            parts = {inner: (value, bytes(raw)) for inner, _, value, raw in fields(content)}
            if number == 1:
                labels[parts[1][1].decode()] = parts[2][1].decode()
            else:
                samples.append((signed(parts[2][0]), struct.unpack("<d", parts[1][1])[0]))
        name = labels.get("metric", labels["__name__"])
        found += [(labels["attempt"], name, ts_ms, value) for ts_ms, value in samples]
    return found


def _unsnapped(block: bytes) -> bytes:
    """Literals only, as ours are."""
    _, at = varint(memoryview(block), 0)
    out = b""
    while at < len(block):
        length = struct.unpack_from("<H", block, at + 1)[0] + 1
        out += block[at + 3 : at + 3 + length]
        at += 3 + length
    return out
