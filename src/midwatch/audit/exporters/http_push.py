"""A remote write receiver over HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from midwatch.audit.exporters.http_post import HttpPost
from midwatch.audit.exporters.remote_write import HEADERS, families_request, snappy_literals, write_request
from midwatch.audit.exporters.sink import Outgoing
from midwatch.audit.exporters.text import Family


class RemoteWriteSink:
    """Prometheus (``--web.enable-remote-write-receiver``), VictoriaMetrics, Mimir, Thanos: ``.../api/v1/write``."""

    def __init__(self, url: str, *, token_file: Path | None = None) -> None:
        """Nothing is connected yet; as ``HttpPost``."""
        self._http = HttpPost(url, token_file)
        self.name = self._http.name

    def send(self, records: Sequence[Outgoing], timeout_s: float) -> None:
        """Hand records over; see ``Sink``."""
        self._deliver(write_request(records), timeout_s)

    def send_families(self, families: Iterable[Family], ts_ms: int, timeout_s: float) -> None:
        """Hand over what ``/metrics`` would show, where nobody can come and scrape it.

        Args:
            ts_ms: Wall clock; must go up from call to call.

        Raises:
            SinkError: As ``send``.
        """
        self._deliver(families_request(families, ts_ms), timeout_s)

    def close(self) -> None:
        self._http.close()

    def _deliver(self, request: bytes, timeout_s: float) -> None:
        self._http.deliver(snappy_literals(request), HEADERS, timeout_s)
