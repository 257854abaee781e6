"""``midwatch resume-run``: end a hold, a person's or midwatch's own."""

from __future__ import annotations

from pathlib import Path

import click

from midwatch.cli._output import exits, json_option
from midwatch.cli._places import run_argument, run_folder
from midwatch.cli._wish import ask, dry_run_option, reason_option

_EPILOG = (
    exits(65, 73, 74, 76, e65="no run there, or it does not answer")
    + " Example: midwatch resume-run RUN --reason 'storage is back'"
)


@click.command("resume-run", short_help="Let a held run go on.", epilog=_EPILOG)
@run_argument
@reason_option
@dry_run_option
@json_option
def command(run: Path | None, *, reason: str, dry_run: bool, is_json: bool) -> None:
    """Let the held run in the folder RUN go on, with its restart budgets full again.

    Without a live run it is written down for the next start: after SV103 or SV104, say so when the cause is mended.
    """
    ask(run_folder(run), "resume", reason, dry_run=dry_run, is_json=is_json)
