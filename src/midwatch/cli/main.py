"""``midwatch``: the group of all verbs. Each verb is one file beside this one and is loaded only when it is called.

Conventions of all verbs: with ``--json`` stdout carries exactly one JSON document, also for an error that has a code
(wrong usage has none); sentences for people go to stderr then. A ``MidwatchError``, or a file that the system refuses,
becomes its message on stderr and its exit code, never a traceback.
"""

from __future__ import annotations

import errno
import importlib
import json
from collections.abc import Iterator, MutableMapping
from typing import Any, Final, NoReturn

import click

from midwatch import __version__
from midwatch.core import MidwatchError, printable

VERBS: Final[dict[str, str]] = {
    "alerts": "Try whether people can be told, see what they were told.",
    "breaker": "See why training is paused, and decide.",
    "ckpt": "List, verify, show and explain checkpoints.",
    "config": "Show the configuration midwatch would use.",
    "demo": "Watch a real run survive five faults, bit for bit.",
    "diff": "What changed between two attempts or checkpoints.",
    "doctor": "Check what a run will need on this machine.",
    "explain": "What an error code means and what to do.",
    "hold": "Keep a run from restarting.",
    "incidents": "List and show incidents.",
    "ledger": "Read the record of a run and check it.",
    "logs": "The output of all ranks, folded.",
    "metrics": "Look at metrics, bring them in, send them on.",
    "node": "Leave a node out of a run, let it in again.",
    "resume-run": "Let a held run go on.",
    "run": "Run a training script under supervision.",
    "status": "What a run is doing.",
    "triage": "Find what is wrong with a recorded curve.",
}
"""Verb -> its line in ``midwatch --help``. The file ``midwatch/cli/<verb>.py`` holds its ``command``."""

_ARGS: Final = "midwatch.args"


class _Verbs(MutableMapping[str, click.Command]):
    """The verbs by name; the file behind one is imported when it is looked up."""

    def __init__(self) -> None:
        self._added: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._added:
            if name not in VERBS:
                raise KeyError(name)
            self._added[name] = importlib.import_module(f"midwatch.cli.{name.replace('-', '_')}").command
        return self._added[name]

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._added[name] = command

    def __delitem__(self, name: str) -> None:
        del self._added[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*VERBS, *self._added}))

    def __len__(self) -> int:
        return len({*VERBS, *self._added})


class _Group(click.Group):
    """Loads verbs late and turns our errors into messages and exit codes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.commands = _Verbs()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_ARGS] = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MidwatchError as error:
            _fail(ctx, error)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # our reader has gone: click ends quietly
            # Loaded only when it is needed: most calls only show something.
            from midwatch.storage import as_storage_error

            _fail(ctx, as_storage_error(error, "the command was broken off"))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(VERBS.items()))


def _fail(ctx: click.Context, error: MidwatchError) -> NoReturn:
    args: list[str] = ctx.meta[_ARGS]
    ours = args[: args.index("--")] if "--" in args else args
    if "--json" in ours:
        click.echo(json.dumps(error.as_dict(), default=str))
    # It may quote file names and what others wrote.
    for line in f"midwatch: {error}".split("\n"):
        click.echo(printable(line), err=True)
    ctx.exit(error.exit_code)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="midwatch")
def main() -> None:
    """Keep a PyTorch pretraining run alive: verified checkpoints, named culprits, restarts, an audit trail."""
