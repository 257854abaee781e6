"""``midwatch metrics``: the numbers of a run, looked at, brought in from elsewhere, and sent on."""

from __future__ import annotations

import click

from midwatch.cli._metrics_export import export
from midwatch.cli._metrics_import import import_command
from midwatch.cli._metrics_push import push
from midwatch.cli._metrics_serve import serve
from midwatch.cli._metrics_show import reindex, show


@click.group("metrics", short_help="Look at metrics, bring them in, send them on.")
def command() -> None:
    """Look at a run's metrics, bring in what other frameworks wrote, send them on. Needs no PyTorch.

    Only import, push and export change anything; all have --dry-run.
    """


for _verb in (show, import_command, reindex, push, export, serve):
    command.add_command(_verb)
