"""``midwatch diff``: what changed in parameters, layout, settings, code and libraries between two points of a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from midwatch.cli._diff_report import FileChange, Report, compare_sides
from midwatch.cli._diff_sides import Side, find_side
from midwatch.cli._output import exits, json_option, plain, say, show_json, table
from midwatch.core import EXIT_FAILED, EXIT_OK, Change

MAX_DIFF_SHOWN = 60
"""Lines of one file's difference for people; ``--all`` shows them all."""


@click.command(
    "diff",
    epilog=exits(1, 65, e0="nothing differs", e1="something differs", e65="no such attempt or checkpoint, or no record")
    + " Examples: midwatch diff RUN a0003 a0004; midwatch diff RUN 500 latest",
)
@click.argument("words", metavar="[RUN] A B", nargs=-1, required=True)
@click.option("--all", "is_all", is_flag=True, help="All lines of code, all packages, all environment variables.")
@json_option
def command(words: Sequence[str], is_all: bool, is_json: bool) -> None:
    """What changed from A to B: parameters, layout, settings, code, commit, libraries, environment.

    A and B are attempts (a0003), or checkpoints by name, step or `latest`, within RUN (a run folder; by default the one
    configured here); without RUN also paths of checkpoints, of two runs if you like. Tensors are compared by
    `midwatch ckpt diff`.
    """
    if len(words) not in (2, 3):
        raise click.UsageError("give two attempts or checkpoints, and before them the run folder if it is another one")
    run_dir = Path(words[0]) if len(words) == 3 else None
    old, new = find_side(run_dir, words[-2]), find_side(run_dir, words[-1])
    report = compare_sides(old, new, is_all=is_all)
    if is_json:
        show_json({"same": report.is_same, "a": _facts(old), "b": _facts(new), **_document(report)})
    else:
        _show(old, new, report, is_all=is_all)
    sys.exit(EXIT_OK if report.is_same else EXIT_FAILED)


def _facts(side: Side) -> dict[str, object]:
    return {
        "name": side.name,
        "kind": side.kind,
        "attempt": side.attempt,
        "step": side.step,
        "config_hash": side.provenance.semantic.hash,
        "code_hash": side.provenance.code.hash,
        "commit": side.provenance.code.commit,
    }


def _document(report: Report) -> dict[str, object]:
    changes = report.changes
    return {
        "parameters": changes.semantic,
        "layout": changes.layout,
        "settings": changes.operational,
        "arguments": changes.command,
        "observed": changes.observed,
        "entry": changes.entry,
        "files": report.files,
        "commit": changes.commit,
        "uncommitted": report.uncommitted,
        "libraries": changes.libraries,
        "packages": report.packages,
        "environment": report.environment,
        "notes": report.notes,
    }


def _show(old: Side, new: Side, report: Report, *, is_all: bool) -> None:
    say(f"{_title(old)} -> {_title(new)}")
    changes = report.changes
    for title, rows in (
        ("parameters", changes.semantic),
        ("layout", changes.layout),
        ("settings", changes.operational),
        ("arguments", changes.command),
        ("as the script set up its objects", changes.observed),
        ("commit", changes.commit),
        ("libraries", changes.libraries),
        ("environment", report.environment),
        ("packages", report.packages),
    ):
        _section(title, rows)
    if changes.entry is not None:
        _section("script", [changes.entry])
    _code(report.files, report.uncommitted, is_all=is_all)
    for note in report.notes:
        say(f"note: {plain(note)}", fg="yellow")
    if report.is_same:
        say("nothing differs, as far as it is on record", fg="green")


def _title(side: Side) -> str:
    known = side.provenance
    return plain(f"{side.name} (config {known.semantic.hash or '-'}, code {known.code.hash or '-'})")


def _section(title: str, changes: Sequence[Change]) -> None:
    if changes:
        say(f"\n{title}", fg="cyan")
        table(("name", "old", "new"), [(change.name, _cell(change, 0), _cell(change, 1)) for change in changes])


def _cell(change: Change, side: int) -> object:
    if (change.change, side) in (("added", 0), ("removed", 1)):
        return ""
    # Quoted: "1" and 1 are not the same.
    return json.dumps(change.new if side else change.old, ensure_ascii=False)


def _code(files: Sequence[FileChange], uncommitted: FileChange | None, *, is_all: bool) -> None:
    if files:
        say("\ncode", fg="cyan")
        table(("file", "change"), [(file.name, file.change) for file in files])
    for file in (*files, *((uncommitted,) if uncommitted else ())):
        if file.diff:
            _lines(file.diff.split("\n"), is_all=is_all)


def _lines(lines: Sequence[str], *, is_all: bool) -> None:
    shown: Iterable[str] = lines if is_all else lines[:MAX_DIFF_SHOWN]
    say("")
    for line in shown:
        colour = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1])
        say(plain(line.replace("\t", "    ")), fg=None if line.startswith(("+++", "---")) else colour)
    if not is_all and len(lines) > MAX_DIFF_SHOWN:
        say(f"and {len(lines) - MAX_DIFF_SHOWN} more lines; --all shows them", fg="yellow")
