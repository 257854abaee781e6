"""``midwatch metrics show`` and ``reindex``: what was recorded, from the index of the journals."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from midwatch.audit import read_run
from midwatch.audit.index import MetricIndex, Point, SyncReport
from midwatch.cli._metrics_summary import show_summary, summary
from midwatch.cli._output import exits, json_option, plain, say, show_json, table
from midwatch.cli._places import run_folder
from midwatch.cli._progress import ByteCounter
from midwatch.config import expand_path, load_config
from midwatch.core import SYSTEM_CLOCK, MetricsError, format_seconds

ASKED: Final = "a person asked for it"

TEXT_BUCKETS: Final = 20
"""Rows for people who did not say how many."""

_MOST: Final = 2**62
"""Steps and ranks are 64 bits in the index."""

_run = click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
_config = click.option("--config", "config_file", type=click.Path(path_type=Path), help="The TOML file of the run.")
_set = click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one key; may be repeated.")


@click.command(
    "show",
    epilog=exits(65, 74, 78, e65="no run, or no such metric there") + " Example: midwatch metrics show RUN loss",
)
@_run
@click.argument("names", metavar="[METRIC...]", nargs=-1)
@click.option("--buckets", type=click.IntRange(min=1, max=100_000), metavar="N", help="Lowest and highest of N parts.")
@click.option("--rank", type=click.IntRange(min=0, max=_MOST), default=0, show_default=True, help="Of this rank.")
@click.option("--from", "first", type=click.IntRange(-_MOST, _MOST), metavar="STEP", help="From this step on.")
@click.option("--to", "last", type=click.IntRange(-_MOST, _MOST), metavar="STEP", help="Up to this step.")
@click.option("--branches", is_flag=True, help="Also what was rolled back, and where each attempt began.")
@_config
@_set
@json_option
def show(
    run: Path,
    names: Sequence[str],
    *,
    buckets: int | None,
    rank: int,
    first: int | None,
    last: int | None,
    branches: bool,
    config_file: Path | None,
    overrides: Sequence[str],
    is_json: bool,
) -> None:
    """List the metrics of the run in the folder RUN, or show some of them by step.

    A step counts from the newest attempt that reached it. With --buckets, and for people always, the steps are cut into
    equal parts, each with its lowest and highest value: no spike is averaged away.
    """
    span = {key: step for key, step in (("first", first), ("last", last)) if step is not None}
    with open_index(run, config_file, overrides) as index:
        fill(index)
        document = _about(index, is_with_branches=branches or not names)
        if names:
            count = buckets or (None if is_json else TEXT_BUCKETS)
            document["series"] = [
                _series(index, name, rank, count, span, is_with_dead=branches) for name in dict.fromkeys(names)
            ]
        else:
            infos = index.metrics()
            document["metrics"] = [_plain_numbers(info._asdict()) for info in infos]
            document |= summary(index, infos)
    if is_json:
        show_json(document)
    else:
        _show(document)


@click.command("reindex", epilog=exits(65, 74, 78, e65="no run there") + " Example: midwatch metrics reindex RUN")
@_run
@_config
@_set
@json_option
def reindex(run: Path, *, config_file: Path | None, overrides: Sequence[str], is_json: bool) -> None:
    """Make the index of RUN anew from its journals. The run folder is not touched.

    It is never needed for a right answer, save after a copy of the journals that kept their times but not their
    content, or when lines arrived late over NFS.
    """
    began_ns = SYSTEM_CLOCK.monotonic_ns()
    with open_index(run, config_file, overrides) as index:
        index.start_anew(ASKED)
        report = fill(index)
        seconds = (SYSTEM_CLOCK.monotonic_ns() - began_ns) / 1e9
        document = {**_about(index), "files": report.files, "records": report.records, "points": report.points}
        document |= {"seconds": round(seconds, 3)}
    if is_json:
        show_json(document)
        return
    took = format_seconds(seconds)
    say(f"{report.points} values of {report.records} records in {report.files} journals, {took}: {plain(index.path)}")
    _warn(document)


def open_index(run: Path, config_file: Path | None, overrides: Sequence[str]) -> MetricIndex:
    """The index of a run that has journals.

    Raises:
        SuperviseError: SV110 no such folder. MetricsError: MT105 no place for the index.
    """
    folder = run_folder(run)
    configured = load_config(config_file, overrides).metrics.index_dir
    return MetricIndex(folder, expand_path("metrics.index_dir", configured) if configured else None)


def fill(index: MetricIndex) -> SyncReport:
    """Take in what is new, and say on a terminal how far it is."""
    with ByteCounter("reading journals") as counter:
        report = index.sync(progress=counter.add)
    if not report.files:
        raise MetricsError("MT103", f"{index.run_dir} has no metrics", path=str(index.run_dir))
    return report


def _about(index: MetricIndex, *, is_with_branches: bool = False) -> dict[str, Any]:
    info = read_run(index.run_dir)
    document: dict[str, Any] = {
        "run_dir": str(index.run_dir),
        "run": info.run if info else "",
        "index": str(index.path),
        "rebuilt": index.rebuilt,
        "damaged_lines": index.damaged_lines(),
    }
    if is_with_branches:
        document["attempts"] = [branch._asdict() for branch in index.branches()]
    return document


def _series(
    index: MetricIndex, name: str, rank: int, count: int | None, span: dict[str, int], *, is_with_dead: bool
) -> dict[str, Any]:
    if not _is_text(name) or not index.has(name, rank):
        raise _unknown(index, name, rank)
    answer: dict[str, Any] = {"metric": name, "rank": rank}
    if count is None:
        answer["points"] = _points(index.series(name, rank=rank, **span))
    else:
        width, found = index.buckets(name, count, rank=rank, **span)
        answer |= {"width": width, "buckets": [_plain_numbers(bucket._asdict()) for bucket in found]}
    if is_with_dead:
        dead = index.dead(name, rank=rank, **span)
        answer["dead"] = [{**branch._asdict(), "points": _points(branch.points)} for branch in dead]
    return answer


def _is_text(name: str) -> bool:
    """What the command line was given need not be UTF-8, and a metric's name is."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unknown(index: MetricIndex, name: str, rank: int) -> MetricsError:
    known = [info.metric for info in index.metrics() if info.rank == rank]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"Did you mean {', '.join(near)}?" if near else ""
    what = f"no metric {name} of rank {rank} in {index.run_dir}; there are {len(known)}"
    return MetricsError("MT103", what, hint=hint, path=str(index.run_dir), metric=name, rank=rank)


# --- numbers --------------------------------------------------------------------------------------------------------


def json_number(value: float) -> float | str:
    """JSON has no NaN and no infinity: the words the journal uses."""
    return value if math.isfinite(value) else str(value)


def _points(points: Sequence[Point]) -> list[tuple[int, float | str]]:
    return [(point.step, json_number(point.value)) for point in points]


def _plain_numbers(values: dict[str, Any]) -> dict[str, Any]:
    return {name: json_number(value) if isinstance(value, float) else value for name, value in values.items()}


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


# --- for people -----------------------------------------------------------------------------------------------------


def _show(document: dict[str, Any]) -> None:
    if "metrics" in document:
        _show_metrics(document["metrics"])
        show_summary(document)
    for series in document.get("series", []):
        _show_series(series)
    if document.get("attempts"):
        say("")
        _show_attempts(document["attempts"])
    _warn(document)


def _show_metrics(metrics: list[dict[str, Any]]) -> None:
    if not metrics:
        say("no numbers yet")
        return
    columns = ("metric", "rank", "steps", "values", "newest", "lowest", "highest", "not finite", "rolled back")
    keys = ("points", "newest", "low", "high", "nonfinite", "rolled_back")
    rows = [
        (one["metric"], one["rank"], f"{one['first']}-{one['last']}", *(_text(one[key]) for key in keys))
        for one in metrics
    ]
    table(columns, rows)


def _show_series(series: dict[str, Any]) -> None:
    of_rank = f" of rank {series['rank']}" if series["rank"] else ""
    say(f"{plain(series['metric'])}{of_rank}, {series['width']} steps a row", fg="bright_white")
    rows = [_bucket_row(bucket) for bucket in series["buckets"]]
    table(("steps", "values", "lowest", "at", "highest", "at", "mean", "not finite"), rows)
    for dead in series.get("dead", []):
        points = dead["points"]
        last = f"step {points[0][0]} to {points[-1][0]}"
        say(f"rolled back, attempt {dead['attempt']}: {len(points)} values, {last}, the last {_text(points[-1][1])}")


def _bucket_row(bucket: dict[str, Any]) -> tuple[str, ...]:
    bucket_fields = ("points", "low", "low_step", "high", "high_step", "mean", "nonfinite")
    return (f"{bucket['first']}-{bucket['last']}", *(_text(bucket[name]) for name in bucket_fields))


def _show_attempts(attempts: list[dict[str, Any]]) -> None:
    rows: list[tuple[object, ...]] = []
    for one in attempts:
        recorded = f"{one['first']}-{one['last']}" if one["records"] else "-"
        until = "" if one["stop"] is None else f"up to {one['stop'] - 1}" if one["stop"] > one["start"] else "nothing"
        part = f".{one['part']}" if one["part"] else ""
        rows.append((f"{one['attempt']}{part}", one["rank"], one["start"], recorded, until or "all", one["source"]))
    table(("attempt", "rank", "began at", "recorded", "counts", "imported from"), rows)


def _warn(document: dict[str, Any]) -> None:
    if document["rebuilt"] not in ("", ASKED):
        say(f"the index was made anew: {plain(document['rebuilt'])}", fg="yellow")
    for name, count in document["damaged_lines"].items():
        say(f"{plain(name)}: {count} lines could not be read", fg="yellow")
