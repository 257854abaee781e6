"""``midwatch metrics push``: what a run recorded, sent to a time-series database or written for TensorBoard."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from midwatch.audit.exporters import Pusher, PushReport, Sink, sink_of
from midwatch.cli._numbers import FiniteRange
from midwatch.cli._output import exits, json_option, plain, say, show_json
from midwatch.cli._places import run_folder
from midwatch.config import expand_path, load_config
from midwatch.core import MetricsError, format_bytes

_PAUSE_S: Final = 0.2


@click.command(
    "push",
    epilog=exits(65, 74, 78, e65="no run there", e74="the receiver is away or takes nothing")
    + " Example: midwatch metrics push RUN --to http://localhost:8428/api/v1/write",
)
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "target",
    metavar="URL",
    help="A receiver (see metrics.push.kind), or tensorboard:FOLDER. Default: metrics.push.url.",
)
@click.option(
    "--wait", type=FiniteRange(min=0), default=60.0, show_default=True, help="Seconds for a receiver that is away."
)
@click.option("--anew", is_flag=True, help="From the beginning, whatever was sent before.")
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="The TOML file of the run.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one key; may be repeated.")
@click.option("--dry-run", is_flag=True, help="Say how much is to be sent; send nothing.")
@json_option
def push(
    run: Path,
    *,
    target: str | None,
    wait: float,
    anew: bool,
    config_file: Path | None,
    overrides: Sequence[str],
    dry_run: bool,
    is_json: bool,
) -> None:
    """Send what the run in the folder RUN has recorded and not sent yet, and remember how far it got.

    A receiver that is away is asked again for --wait seconds; what is not sent then stays for the next time.
    """
    folder = run_folder(run)
    sink = _sink(target, config_file, overrides)
    pusher = Pusher(folder, sink)
    try:
        if dry_run:
            behind = pusher.behind_bytes(anew=anew)
            document = {"to": sink.name, "behind_bytes": behind, "dry_run": True}
            show_json(document) if is_json else say(f"{format_bytes(behind)} of journals to send to {plain(sink.name)}")
            return
        if anew:
            pusher.forget()
        total = _push_all(pusher, wait)
    finally:
        pusher.close()
    _finish(total, sink, is_json=is_json)


def _sink(target: str | None, config_file: Path | None, overrides: Sequence[str]) -> Sink:
    config = load_config(config_file, overrides).metrics.push
    chosen = target if target is not None else config.url
    if not chosen:
        raise click.UsageError("say where: --to URL, or metrics.push.url")
    token = expand_path("metrics.push.token_file", config.token_file) if config.token_file else None
    return sink_of(chosen, token, config.kind)


def _push_all(pusher: Pusher, wait_s: float) -> PushReport:
    """Until all is delivered, or nothing was for ``wait_s``."""
    records = values = refused = timeless = 0
    end = time.monotonic() + wait_s
    while True:
        report = pusher.step()
        records, values = records + report.records, values + report.values
        refused, timeless = refused + report.refused, timeless + report.timeless
        if report.records or report.refused:
            end = time.monotonic() + wait_s
            if sys.stderr.isatty():
                sys.stderr.write(f"\r\x1b[K{values} values sent")
        if report.is_caught_up or (report.problem and time.monotonic() >= end):
            break
        if not (report.records or report.refused):
            time.sleep(_PAUSE_S)
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    return PushReport(
        records=records,
        values=values,
        refused=refused,
        timeless=timeless,
        is_caught_up=report.is_caught_up,
        problem=report.problem,
    )


def _finish(total: PushReport, sink: Sink, *, is_json: bool) -> None:
    if not total.is_caught_up:
        raise MetricsError("MT106", f"{total.values} values sent, then: {total.problem}", to=sink.name)
    if total.refused and not total.records:
        raise MetricsError("MT106", f"{sink.name} takes none of {total.refused} records", to=sink.name)
    if is_json:
        counts = {
            "records": total.records,
            "values": total.values,
            "refused": total.refused,
            "timeless": total.timeless,
        }
        show_json({"to": sink.name, **counts, "dry_run": False})
        return
    say(f"{total.values} values of {total.records} records sent to {plain(sink.name)}", fg="green")
    if total.refused:
        say(f"{total.refused} records were refused: too old, or there already", fg="yellow")
    if total.timeless:
        say(f"{total.timeless} records have no time of day and cannot be placed on a time axis", fg="yellow")
