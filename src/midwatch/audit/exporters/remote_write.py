"""Prometheus remote write 1.0: what goes over the wire.

Source: prometheus.io, "Prometheus Remote-Write 1.0 specification"; google/snappy, ``format_description.txt``.

Time is the only axis there. So a step's record is a sample at the time it was written, its step is a series beside the
others, and the attempt is a label: a step that is done again after a resume is a point of another series, and every
point arrives once.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from midwatch.audit.exporters.sink import Outgoing
from midwatch.audit.exporters.text import STEP, VALUE
from midwatch.audit.protowire import put_bytes, put_double, put_int, put_varint

HEADERS: Final = {
    "Content-Type": "application/x-protobuf",
    "Content-Encoding": "snappy",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
    "User-Agent": "midwatch",
}

_LITERAL_BYTES: Final = 1 << 16


def write_request(records: Sequence[Outgoing]) -> bytes:
    """A WriteRequest, not yet compressed: one TimeSeries for each set of labels, its samples ascending in time."""
    series: dict[tuple[tuple[str, str], ...], list[bytes]] = {}
    for record in records:
        place = {"run": record.run, "attempt": str(record.attempt), "rank": str(record.rank)}
        samples = [({**place, "metric": metric}, VALUE, value) for metric, value in record.values.items()]
        for labels, name, value in (*samples, (place, STEP, float(record.step))):
            sample = put_double(1, value) + put_int(2, record.ts_ms)
            series.setdefault(_sorted_labels(name, labels), []).append(put_bytes(2, sample))
    return b"".join(put_bytes(1, _labels(labels) + b"".join(samples)) for labels, samples in series.items())


def snappy_literals(data: bytes) -> bytes:
    """A valid Snappy block that copies nothing: the receivers ask for the format, not for a small size."""
    parts = [put_varint(len(data))]
    for begin in range(0, len(data), _LITERAL_BYTES):
        piece = data[begin : begin + _LITERAL_BYTES]
        # Tag 61 << 2: a literal whose length, less one, is in the next two bytes.
        parts += (b"\xf4", struct.pack("<H", len(piece) - 1), piece)
    return b"".join(parts)


def count_samples(records: Iterable[Outgoing]) -> int:
    return sum(len(record.values) + 1 for record in records)


def _sorted_labels(name: str, labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    # An empty label is no label there, and one that comes in the wrong order is refused.
    return tuple(sorted((key, value) for key, value in {"__name__": name, **labels}.items() if value))


def _labels(labels: Iterable[tuple[str, str]]) -> bytes:
    return b"".join(
        put_bytes(1, put_bytes(1, name.encode()) + put_bytes(2, value.encode("utf-8", "replace")))
        for name, value in labels
    )
