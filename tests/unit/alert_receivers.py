"""Real receivers of alerts, for tests: an HTTP server and a mail server, each in a thread."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from midwatch.audit import Ledger, ensure_run
from midwatch.config import AlertsConfig, Config, load_config
from midwatch.core import Clock


class Hook:
    """Takes POSTs and remembers them; answers as it is told."""

    def __init__(self) -> None:
        self.posts: list[tuple[str, Any]] = []
        self.status = 200
        self.answer = b"ok"
        self.headers: dict[str, str] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.posts.append((self.path, json.loads(body)))
                self.send_response(outer.status)
                for name, value in outer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(outer.answer)))
                self.end_headers()
                self.wfile.write(outer.answer)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def url(self, path: str = "/hook") -> str:
        return f"http://127.0.0.1:{self._server.server_port}{path}"

    def taken(self) -> list[Any]:
        """What came since the last question."""
        taken, self.posts = [document for _, document in self.posts], []
        return taken

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class MailServer:
    """As much of SMTP as a client without encryption needs."""

    def __init__(self, refuse: str = "") -> None:
        self.letters: list[str] = []
        self._refuse = refuse
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, connection.makefile("rwb") as file:
                self._talk(file.readline, lambda line: (file.write(line + b"\r\n"), file.flush()))

    def _talk(self, hear: Callable[[], bytes], say: Callable[[bytes], Any]) -> None:
        say(b"220 here")
        while word := hear().strip():
            verb = word[:4].upper()
            if verb == b"DATA":
                say(b"354 go on")
                lines: list[bytes] = []
                while (line := hear().rstrip(b"\r\n")) != b".":
                    lines.append(line)
                self.letters.append(b"\n".join(lines).decode())
                say(b"250 taken")
            elif verb == b"RCPT" and self._refuse and self._refuse.encode() in word:
                say(b"550 nobody of that name")
            else:
                say(b"221 bye" if verb == b"QUIT" else b"250 fine")


class Story:
    """A run folder whose ledgers tests write."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.folder = folder
        self.clock = clock
        self.run = ensure_run(folder, name="llm").run
        self._ledgers: dict[str, Ledger] = {}

    def say(self, writer: str, event: str, *, step: int | None = None, **data: Any) -> None:
        """A line of ``coordinator`` or of a rank (``a0001-r00000``)."""
        if writer not in self._ledgers:
            rank = None if writer == "coordinator" else int(writer.rpartition("r")[2])
            self._ledgers[writer] = Ledger(
                self.folder / "ledger" / f"{writer}.jsonl",
                run=self.run,
                attempt=0 if rank is None else int(writer[1:5]),
                node="n1",
                rank=rank,
                clock=self.clock,
            )
        self._ledgers[writer].record(event, step=step, **data)

    def fault(self, incident: str, grade: str = "G2", action: str = "restart", **data: Any) -> None:
        summary = data.pop("summary", "rank 3 was killed")
        words = {"incident": incident, "grade": grade, "action": action, "summary": summary, "attempt": 1, **data}
        self.say("coordinator", "fault.judged", step=512, root_rank=3, root_node="n7", **words)

    def pause(self, step: int = 40, why: str = "nonfinite at step 40") -> None:
        self.say("a0001-r00000", "breaker.moved", step=step, before="closed", after="open", why=why)
        until_ns = self.clock.wall_ns() + 3600 * 10**9
        self.say("a0001-r00000", "breaker.paused", step=step, kind="nonfinite", why=why, until_ns=until_ns)

    def close(self) -> None:
        for ledger in self._ledgers.values():
            ledger.close()


def alerts(folder: Path, **table: Any) -> AlertsConfig:
    """The table as a configuration file has it; ``slack="http://..."`` is kept in a file."""
    to = dict(table.pop("to", {}))
    for name in ("webhook", "slack", "pagerduty", "apprise"):
        if isinstance(to.get(name), str):
            path = folder / f"{name}.secret"
            path.write_text(to[name] + "\n")
            to[name] = [f"file:{path}"]
    config: Config = load_config({"alerts": {**table, "to": to}})
    return config.alerts
