"""``midwatch metrics export``: what a run recorded, as curves of an experiment tracker."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final, get_args

import click
import msgspec

from midwatch.audit import new_lines, read_run
from midwatch.audit.exporters import ExportReport, SinkError, TrackerExport, TrackerKind, tracker_of
from midwatch.cli._numbers import FiniteRange
from midwatch.cli._output import exits, json_option, plain, say, show_json
from midwatch.cli._places import run_folder
from midwatch.core import MetricsError, format_bytes

_BEGINS: Final = frozenset(("run.started", "run.attached", "attempt.launched"))
_ENDS: Final = frozenset(("run.finished", "run.stopped", "run.aborted", "breaker.ended"))


@click.command(
    "export",
    epilog=exits(65, 74, 78, e65="no run there", e74="the tracker does not take it", e78="its library is not installed")
    + " Example: midwatch metrics export RUN --to wandb --project llm",
)
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--to", "kind", type=click.Choice(get_args(TrackerKind)), required=True, help="The tracker.")
@click.option(
    "--project", default="", metavar="NAME", help="Project or experiment. Default: the run's label, else midwatch."
)
@click.option(
    "--at", default="", metavar="WHERE", help="tensorboard, wandb: a folder; mlflow: an address; trackio: a Space."
)
@click.option("--follow", is_flag=True, help="Go on while the run does, until it ends or you interrupt.")
@click.option("--every", type=FiniteRange(min=0.1), default=5.0, show_default=True, help="Seconds between two looks.")
@click.option("--anew", is_flag=True, help="Ask the tracker what it has, whatever was noted before.")
@click.option("--dry-run", is_flag=True, help="Say how much there is to export; send nothing.")
@json_option
def export(
    run: Path,
    *,
    kind: TrackerKind,
    project: str,
    at: str,
    follow: bool,
    every: float,
    anew: bool,
    dry_run: bool,
    is_json: bool,
) -> None:
    """Export what the run in the folder RUN has recorded to W&B, MLflow, trackio or TensorBoard, and remember how far
    it got: a second export adds only what is new.

    Each attempt is a run of its own there, all in one group: what was rolled back does not mix with what counts.
    """
    folder = run_folder(run)
    if kind == "tensorboard" and not at:
        raise click.UsageError("say where: --at FOLDER")
    info = read_run(folder)
    with _stdout_for_us():
        tracker = tracker_of(kind, project or (info.name if info and info.name else "midwatch"), at)
    work = TrackerExport(folder, tracker)
    if dry_run:
        document = {"to": tracker.name, "behind_bytes": work.behind_bytes(anew=anew), "dry_run": True}
        text = f"{format_bytes(work.behind_bytes(anew=anew))} of journals to export to {plain(tracker.name)}"
        show_json(document) if is_json else say(text)
        return
    if anew:
        work.forget()
    total = _Total()
    with _stdout_for_us():
        _work(work, total, _Course(folder) if follow else None, every)
    _finish(total, tracker.name, is_json=is_json)


class _Total(msgspec.Struct):
    """Of all looks."""

    rows: int = 0
    values: int = 0
    known: int = 0
    runs: dict[str, None] = {}
    problem: str = ""

    def add(self, report: ExportReport) -> None:
        self.rows += report.rows
        self.values += report.values
        self.known += report.known
        self.runs.update(dict.fromkeys(report.runs))
        self.problem = report.problem


class _Course:
    """Whether the run is over, by its ledgers."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._places: dict[str, int] = {}
        self._is_over = False

    def is_over(self) -> bool:
        for line in new_lines(self._run_dir, self._places):
            is_supervised = "coordinator.jsonl" in self._places
            # With a supervisor only its word counts: an attempt that ended may be followed by another.
            if line.event in _ENDS and (line.writer == "coordinator" or not is_supervised):
                self._is_over = True
            elif line.event in _BEGINS:
                self._is_over = False
        return self._is_over


def _work(work: TrackerExport, total: _Total, course: _Course | None, every_s: float) -> None:
    try:
        with _interrupted() as stop:
            while True:
                is_over = course is None or stop.is_set() or course.is_over()
                total.add(work.step())
                if is_over:
                    break
                stop.wait(every_s)
    finally:
        try:
            work.close()
        except SinkError as error:
            total.problem = total.problem or str(error)


@contextlib.contextmanager
def _interrupted() -> Generator[threading.Event]:
    """Set by the first Ctrl-C or SIGTERM: the tracker must get what it was given. The second one ends at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # signals are not for us
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, _: Any) -> None:
        stop.set()
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stdout_for_us() -> contextlib.redirect_stdout[Any]:
    """What libraries print is for people; stdout may carry one document."""
    return contextlib.redirect_stdout(sys.stderr)


def _finish(total: _Total, name: str, *, is_json: bool) -> None:
    if total.problem:
        raise MetricsError("MT106", f"{total.values} values exported, then: {total.problem}", to=name)
    counts = {"rows": total.rows, "values": total.values, "known": total.known, "runs": list(total.runs)}
    if is_json:
        show_json({"to": name, **counts, "dry_run": False})
        return
    say(f"{total.values} values of {total.rows} steps exported to {plain(name)}", fg="green")
    for key in total.runs:
        say(f"  {plain(key)}")
    if total.known:
        say(f"{total.known} steps were there already", fg="yellow")
