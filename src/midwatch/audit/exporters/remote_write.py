"""Prometheus remote write 1.0: what goes over the wire.

Source: prometheus.io, "Prometheus Remote-Write 1.0 specification"; google/snappy, ``format_description.txt``.

Time is the only axis there. So a step's record is a sample at the time it was written, its step is a series beside the
others, and the attempt is a label: a step that is done again after a resume is a point of another series, and every
point arrives once.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from midwatch.audit.exporters.sink import Outgoing
from midwatch.audit.exporters.text import STEP, VALUE, Family
from midwatch.audit.protowire import put_bytes, put_double, put_int, put_varint

HEADERS: Final = {
    "Content-Type": "application/x-protobuf",
    "Content-Encoding": "snappy",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
    "User-Agent": "midwatch",
}

_LITERAL_BYTES: Final = 1 << 16


_Labels = tuple[tuple[str, str], ...]


def write_request(records: Iterable[Outgoing]) -> bytes:
    """A WriteRequest of records, not yet compressed."""
    return _request(_samples_of(records))


def families_request(families: Iterable[Family], ts_ms: int) -> bytes:
    """A WriteRequest of what ``/metrics`` would show now."""
    return _request(
        (_sorted_labels(family.name, sample.labels), ts_ms if sample.ts_ms is None else sample.ts_ms, sample.value)
        for family in families
        for sample in family.samples
    )


def _samples_of(records: Iterable[Outgoing]) -> Iterator[tuple[_Labels, int, float]]:
    for record in records:
        place = {"run": record.run, "attempt": str(record.attempt), "rank": str(record.rank)}
        for metric, value in record.values.items():
            yield _sorted_labels(VALUE, {**place, "metric": metric}), record.ts_ms, value
        yield _sorted_labels(STEP, place), record.ts_ms, float(record.step)


def _request(samples: Iterable[tuple[_Labels, int, float]]) -> bytes:
    """One TimeSeries for each set of labels, its samples in the order in which they came."""
    series: dict[_Labels, list[bytes]] = {}
    for labels, ts_ms, value in samples:
        series.setdefault(labels, []).append(put_bytes(2, put_double(1, value) + put_int(2, ts_ms)))
    return b"".join(put_bytes(1, _encoded(labels) + b"".join(parts)) for labels, parts in series.items())


def snappy_literals(data: bytes) -> bytes:
    """A valid Snappy block that copies nothing: the receivers ask for the format, not for a small size."""
    parts = [put_varint(len(data))]
    for begin in range(0, len(data), _LITERAL_BYTES):
        piece = data[begin : begin + _LITERAL_BYTES]
        # Tag 61 << 2: a literal whose length, less one, is in the next two bytes.
        parts += (b"\xf4", struct.pack("<H", len(piece) - 1), piece)
    return b"".join(parts)


def _sorted_labels(name: str, labels: Mapping[str, str]) -> _Labels:
    # An empty label is no label there, and one that comes in the wrong order is refused.
    return tuple(sorted((key, value) for key, value in {"__name__": name, **labels}.items() if value))


def _encoded(labels: _Labels) -> bytes:
    return b"".join(
        put_bytes(1, put_bytes(1, name.encode()) + put_bytes(2, value.encode("utf-8", "replace")))
        for name, value in labels
    )
