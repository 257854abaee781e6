"""``midwatch ledger``: read the record of a run, and check that it is what was written."""

from __future__ import annotations

import fnmatch
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import msgspec

from midwatch.audit import LedgerLine, LedgerReport, merged, read_ledger, verify_ledger, verify_run
from midwatch.cli._output import exits, json_option, plain, say, show_json, when
from midwatch.cli._places import run_argument, run_folder
from midwatch.config import load_config, resolve_paths
from midwatch.core import EXIT_DATA, EXIT_OK

LONG_FACT = 120
"""On a terminal, tables and lists longer than this are folded; a pipe and ``--json`` get everything."""


@click.group("ledger", short_help="Read the record of a run and check it.")
def command() -> None:
    """Read the record of a run and check it."""


@command.command(
    "show",
    epilog=exits(65, e65="no ledger there") + " Example: midwatch ledger show RUN --event 'checkpoint.*' --tail 20",
)
@run_argument
@click.option(
    "--event", "events", multiple=True, metavar="GLOB", help="Only these, such as 'fault.*'; may be repeated."
)
@click.option("--attempt", type=click.IntRange(min=0), help="Only this attempt; 0 is outside of any.")
@click.option("--cause", default="", help="Only what follows from one cause.")
@click.option("--tail", type=click.IntRange(min=1), metavar="N", help="Only the last N lines.")
@json_option
def show(
    run: Path | None, events: Sequence[str], attempt: int | None, cause: str, tail: int | None, is_json: bool
) -> None:
    """Print the lines of all ledgers of RUN by time, one event a line. RUN may also be one ledger file.

    Damaged lines are left out: midwatch ledger verify names them.
    """
    lines = list(read_ledger(run)) if run is not None and run.is_file() else merged(run_folder(run))
    kept = [line for line in lines if _is_wanted(line, events, attempt, cause)]
    kept = kept[-tail:] if tail else kept
    if is_json:
        show_json({"lines": kept})
        return
    for line in kept:
        click.echo(_text(line))


def _is_wanted(line: LedgerLine, events: Sequence[str], attempt: int | None, cause: str) -> bool:
    if events and not any(fnmatch.fnmatchcase(line.event, glob) for glob in events):
        return False
    return (attempt is None or line.attempt == attempt) and (not cause or line.cause == cause)


def _text(line: LedgerLine) -> str:
    where = [f"a{line.attempt:04d}" if line.attempt else "-", plain(line.writer)]
    where += [plain(line.node)] if line.node else []
    where += [f"rank={line.rank}"] if line.rank is not None else []
    facts = [f"step={line.step}"] if line.step is not None else []
    cut = LONG_FACT if sys.stdout.isatty() else 0
    facts += [f"{plain(key)}={_value(value, cut)}" for key, value in line.data.items()]
    facts += [f"cause={plain(line.cause)}"] if line.cause else []
    return f"{when(line.ts_ns)} {' '.join(where)} {plain(line.event)} {' '.join(facts)}".rstrip()


def _value(value: object, cut: int = 0) -> str:
    if isinstance(value, str) and value and not any(char.isspace() for char in value):
        return plain(value)
    text = plain(json.dumps(value, ensure_ascii=False, default=str))
    if cut and len(text) > cut and isinstance(value, (dict, list)):
        return "{…}" if isinstance(value, dict) else "[…]"
    return text


@command.command(
    "verify", epilog=exits(65, e65="the chain is broken, or no ledger there") + " Example: midwatch ledger verify RUN"
)
@run_argument
@json_option
def verify(run: Path | None, is_json: bool) -> None:
    """Check every line of all ledgers of RUN: edited, removed, moved, cut off. Names the first broken line of each.

    The heads that checkpoints and sealed ledgers repeat are looked up as well. RUN may also be one ledger file, of
    which only the chain can be checked.
    """
    if run is not None and run.is_file():
        report = verify_ledger(run)
        _finish([report], report.is_ok, [problem.message for problem in report.problems], is_json=is_json)
        return
    folder = run_folder(run)
    whole = verify_run(folder, _checkpoints(folder))
    notes = [f"{name}: a torn end, cut off and kept" for name in whole.set_aside]
    messages = [problem.message for problem in whole.problems]
    extra = {"problems": whole.problems, "seals": whole.seals, "set_aside": whole.set_aside}
    _finish(whole.files, whole.is_ok, messages, is_json=is_json, notes=notes, extra=extra)


def _checkpoints(folder: Path) -> Path | None:
    """Another shared tier, when the configuration here speaks of this very run."""
    paths = resolve_paths(load_config())
    return paths.checkpoint_dir if paths.run_dir == folder.absolute() else None


def _finish(
    reports: Sequence[LedgerReport],
    is_ok: bool,
    messages: Sequence[str],
    *,
    is_json: bool,
    notes: Sequence[str] = (),
    extra: Mapping[str, object] | None = None,
) -> None:
    if is_json:
        files = [{**msgspec.structs.asdict(report), "ok": report.is_ok} for report in reports]
        show_json({"ok": is_ok, "files": files, **(extra or {})})
        sys.exit(EXIT_OK if is_ok else EXIT_DATA)
    for report in reports:
        say(f"{plain(Path(report.file).name)}: {report.lines} lines, head {report.head[:16]}")
    for note in notes:
        say(plain(note), fg="yellow")
    for message in messages:
        say(f"[LG101] {plain(message)}", fg="red")
    say("the record is whole" if is_ok else "THE RECORD IS BROKEN", fg="green" if is_ok else "red")
    sys.exit(EXIT_OK if is_ok else EXIT_DATA)
