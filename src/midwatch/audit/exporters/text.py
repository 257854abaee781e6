"""What ``GET /metrics`` answers: Prometheus' text format, made from values alone.

Source: prometheus.io, "Exposition formats", text format 0.0.4.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from midwatch.audit.index.types import Newest

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

VALUE: Final = "midwatch_metric"
"""One family for whatever the script logs, with the script's word as a label: ``eval/acc@1`` and ``eval.acc_1`` would
be one name otherwise, and no word of a script can collide with a name of ours."""
STEP: Final = "midwatch_step"
LOGGED: Final = "midwatch_logged_timestamp_seconds"

_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class Sample(NamedTuple):
    """One value of a family."""

    value: float
    labels: Mapping[str, str] = {}
    ts_ms: int | None = None


class Family(NamedTuple):
    """Samples of one name. Counters' names should end in ``_total``."""

    name: str
    help: str
    kind: Literal["gauge", "counter"]
    samples: Sequence[Sample]


def render(families: Iterable[Family]) -> str:
    """The page. Families of one name are joined, empty ones left out, and a sample that comes twice is told once.

    Raises:
        ValueError: A name that Prometheus does not take, or one family with two kinds.
    """
    joined: dict[str, Family] = {}
    for family in families:
        if not _NAME.fullmatch(family.name):
            raise ValueError(f"{family.name!r} is no name of a metric")
        before = joined.get(family.name)
        if before is not None and before.kind != family.kind:
            raise ValueError(f"{family.name} is both a {before.kind} and a {family.kind}")
        samples = (*(before.samples if before else ()), *family.samples)
        joined[family.name] = (before or family)._replace(samples=samples)
    return "".join(_family(family) for _, family in sorted(joined.items()) if family.samples)


def training_families(newest: Iterable[Newest], run: str) -> list[Family]:
    """The newest values of a run's metrics, and how far each rank's attempt has got."""
    values: list[Sample] = []
    steps: dict[tuple[int, int], int] = {}
    times: dict[tuple[int, int], int] = {}
    for one in newest:
        labels = {"run": run, "attempt": str(one.attempt), "rank": str(one.rank)}
        values.append(Sample(one.value, {**labels, "metric": one.metric}))
        place = one.attempt, one.rank
        steps[place] = max(one.step, steps.get(place, one.step))
        times[place] = max(one.ts_ns, times.get(place, 0))
    reached = [Sample(step, _placed(run, place)) for place, step in steps.items()]
    logged = [Sample(ts_ns / 1e9, _placed(run, place)) for place, ts_ns in times.items() if ts_ns]
    return [
        Family(VALUE, "Newest value of a number that the training script logged.", "gauge", values),
        Family(STEP, "Newest step for which a number was logged.", "gauge", reached),
        Family(LOGGED, "When the newest of these numbers was logged, in Unix time.", "gauge", logged),
    ]


def _placed(run: str, place: tuple[int, int]) -> dict[str, str]:
    return {"run": run, "attempt": str(place[0]), "rank": str(place[1])}


def _family(family: Family) -> str:
    lines = [f"# HELP {family.name} {_escape(family.help)}\n", f"# TYPE {family.name} {family.kind}\n"]
    told: set[str] = set()
    for sample in family.samples:
        series = family.name + _labels(sample.labels)
        if series not in told:
            told.add(series)
            stamp = f" {sample.ts_ms}" if sample.ts_ms is not None else ""
            lines.append(f"{series} {_value(sample.value)}{stamp}\n")
    return "".join(lines)


def _labels(labels: Mapping[str, str]) -> str:
    for name in labels:
        if not _LABEL.fullmatch(name) or name.startswith("__"):
            raise ValueError(f"{name!r} is no name of a label")
    pairs = ",".join(f'{name}="{_escape(str(value), is_label=True)}"' for name, value in sorted(labels.items()))
    return f"{{{pairs}}}" if pairs else ""


def _escape(text: str, *, is_label: bool = False) -> str:
    text = text.encode("utf-8", "replace").decode().replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if is_label else text


def _value(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if float(value).is_integer() and abs(value) < 2**53 else repr(float(value))
