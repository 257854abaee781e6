"""OTLP over HTTP: the protocol of OpenTelemetry's collectors, which databases of metrics take, too.

Source: opentelemetry.io, "OTLP Specification 1.x", binary protobuf over HTTP. The messages are those of the package
``opentelemetry-proto`` (the extra ``otlp``). Its SDK is not used: that reads instruments when it likes and stamps the
time of reading, whereas each step's number goes out here with the time at which it was logged.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from midwatch.audit.exporters.http_post import HttpPost
from midwatch.audit.exporters.sink import Outgoing
from midwatch.audit.exporters.text import STEP, VALUE
from midwatch.core import load_extra, printable

_SERVICE: Final = "opentelemetry.proto.collector.metrics.v1.metrics_service_pb2"
_MESSAGE: Final = "google.protobuf.message"
_PURPOSE: Final = "sending by OTLP"
_HEADERS: Final = {"Content-Type": "application/x-protobuf", "User-Agent": "midwatch"}
_log: Final = logging.getLogger(__name__)


class OtlpSink:
    """Collectors at ``.../v1/metrics``; VictoriaMetrics and Prometheus have paths of their own that end alike."""

    def __init__(self, url: str, *, token_file: Path | None = None) -> None:
        """Nothing is connected yet; as ``HttpPost``.

        Raises:
            ConfigError: CF102 the address; CF107 the extra is not installed.
        """
        self._http = HttpPost(url, token_file)
        self._service = load_extra(_SERVICE, "otlp", _PURPOSE)
        self._damage: type[Exception] = load_extra(_MESSAGE, "otlp", _PURPOSE).DecodeError
        self._has_warned = False
        # The same address may speak both protocols, and each has its own position.
        self.name = f"otlp:{self._http.name}"

    def send(self, records: Sequence[Outgoing], timeout_s: float) -> None:
        """Hand records over; see ``Sink``."""
        answer = self._http.deliver(self._request(records), _HEADERS, timeout_s)
        self._look_at(answer)

    def close(self) -> None:
        self._http.close()

    def _request(self, records: Sequence[Outgoing]) -> bytes:
        request: Any = self._service.ExportMetricsServiceRequest()
        source = request.resource_metrics.add()
        _put(source.resource, {"service.name": "midwatch"})
        scope = source.scope_metrics.add()
        scope.scope.name = "midwatch"
        values = scope.metrics.add(name=VALUE, description="A number that the training script logged.").gauge
        steps = scope.metrics.add(name=STEP, description="The step for which numbers were logged.").gauge
        for record in records:
            place = {"run": record.run, "attempt": str(record.attempt), "rank": str(record.rank)}
            for metric, value in record.values.items():
                _add(values, record.ts_ms, value, {**place, "metric": metric})
            _add(steps, record.ts_ms, float(record.step), place)
        return request.SerializeToString()

    def _look_at(self, answer: bytes) -> None:
        """A receiver may take a part and say so; the specification forbids to send the rest again."""
        response: Any = self._service.ExportMetricsServiceResponse()
        try:
            response.ParseFromString(answer)
        except self._damage:
            return  # Not every receiver answers in protobuf; that it took the request it has said by its status.
        partial = response.partial_success
        if partial.rejected_data_points and not self._has_warned:
            self._has_warned = True
            reason = printable(partial.error_message)
            _log.warning("%s rejected %d of the values: %s", self.name, partial.rejected_data_points, reason)


def _add(gauge: Any, ts_ms: int, value: float, labels: Mapping[str, str]) -> None:
    point = gauge.data_points.add(time_unix_nano=ts_ms * 1_000_000, as_double=value)
    _put(point, labels)


def _put(holder: Any, attributes: Mapping[str, str]) -> None:
    for key, value in attributes.items():
        # An empty one is none, as in Prometheus.
        if value:
            holder.attributes.add(key=key).value.string_value = value.encode("utf-8", "replace").decode()
