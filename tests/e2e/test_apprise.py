"""Alerts through the real library apprise."""

from __future__ import annotations

import importlib.util
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from prerequisites import absent

from midwatch.audit.alerts import Alert, Message, TargetAwayError, targets_of
from midwatch.config import load_config

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]


def test_apprise_tells_each_address(tmp_path: Path) -> None:
    if importlib.util.find_spec("apprise") is None:
        absent("apprise is not installed: pip install 'midwatch[alerts]'")
    taken: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    addresses = tmp_path / "apprise"
    config = load_config({"alerts": {"to": {"apprise": [f"file:{addresses}"]}}})
    (target,) = targets_of(config.alerts)
    alert = Alert(
        id="x", kind="test", severity="critical", key="x", title="a test", sentence="<b>nothing</b>", run="r1"
    )
    try:
        addresses.write_text(
            f"# of the team\njson://127.0.0.1:{server.server_port}/s3cr3t\njson://127.0.0.1:9/s3cr3t\n"
        )
        assert target.check() == "json"
        answer = target.send(Message(alert=alert), 30.0)
        addresses.write_text("json://127.0.0.1:9/s3cr3t\n")
        with pytest.raises(TargetAwayError) as caught:
            target.send(Message(alert=alert), 30.0)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert answer == "1 told; addresses [2] of the list did not take it"
    assert "s3cr3t" not in str(caught.value)
    (post,) = taken
    assert post["title"] == "[midwatch] r1: a test"
    assert post["message"].startswith("<b>nothing</b>")
