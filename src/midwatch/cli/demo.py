"""``midwatch demo``: a real training run survives five faults and ends bit-identical to an undisturbed one."""

from __future__ import annotations

import os
import sys

import click


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    add_help_option=False,
    short_help="Watch a real run survive five faults, bit for bit.",
)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(args: tuple[str, ...]) -> None:
    """Watch a real run survive five faults, bit for bit. Options: --out DIR, --json."""
    # The demo lives in midwatch.testing, which the product never imports: it is started as a program of its own.
    os.execv(sys.executable, [sys.executable, "-m", "midwatch.testing.demo", *args])
