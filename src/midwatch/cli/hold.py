"""``midwatch hold``: no restart until a person says so; what trains goes on."""

from __future__ import annotations

from pathlib import Path

import click

from midwatch.cli._output import exits, json_option
from midwatch.cli._places import run_argument, run_folder
from midwatch.cli._wish import ask, dry_run_option, reason_option

_EPILOG = (
    exits(65, 73, 74, 76, e65="no run there, or it does not answer")
    + " Example: midwatch hold RUN --reason 'switch maintenance'"
)


@click.command("hold", short_help="Keep a run from restarting.", epilog=_EPILOG)
@run_argument
@reason_option
@dry_run_option
@json_option
def command(run: Path | None, *, reason: str, dry_run: bool, is_json: bool) -> None:
    """Ask the run in the folder RUN to start no further attempt. Ranks that train go on training.

    Without a live run it is written down for the next start.
    """
    ask(run_folder(run), "hold", reason, dry_run=dry_run, is_json=is_json)
