"""``midwatch ckpt``: what is there, is it good, and why would a resume pass over it."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from midwatch.checkpoint.format import (
    Adopted,
    CheckpointInfo,
    list_adopted,
    list_checkpoints,
    load_key,
    newest_verified,
)
from midwatch.cli._ckpt_adopt import adopt_command
from midwatch.cli._ckpt_diff import diff
from midwatch.cli._ckpt_export import export
from midwatch.cli._ckpt_pin import pin, unpin
from midwatch.cli._ckpt_prune import prune
from midwatch.cli._ckpt_show import show
from midwatch.cli._ckpt_verify import problem_line, verify
from midwatch.cli._output import exits, json_option, plain, say, show_json, table, when
from midwatch.cli._places import Place, find_place, path_argument, pick, selection_argument
from midwatch.cli._why_not import Answer, judge_all, remember
from midwatch.core import EXIT_DATA, EXIT_OK, CheckpointError, format_bytes


@click.group("ckpt", short_help="List, verify, compare, keep and take away checkpoints.")
def command() -> None:
    """List, verify, compare, keep and take away checkpoints. Needs no PyTorch.

    Only prune, pin, unpin, export and adopt change anything; each has --dry-run.
    """


for _verb in (verify, show, diff, prune, pin, unpin, export, adopt_command):
    command.add_command(_verb)


@command.command("ls", epilog=exits(65, e65="no such folder") + " Example: midwatch ckpt ls RUN")
@path_argument
@json_option
def ls(path: Path | None, is_json: bool) -> None:
    """List checkpoints, newest first. A star marks the one a resume would take if it is intact.

    PATH is a run folder, a folder of checkpoints or one checkpoint; without it, the run folder configured here.
    """
    place = find_place(path)
    listed = list_checkpoints(place.root, run_dir=place.run_dir)
    newest = newest_verified(place.root, run_dir=place.run_dir)
    adopted = list_adopted(place.root)
    if is_json:
        document = {"root": str(place.root), "newest_verified": newest and newest.name, "checkpoints": listed}
        show_json({**document, "adopted": [_adopted_json(path, record) for path, record in adopted]})
        return
    if not listed and not adopted:
        say(f"no checkpoints in {plain(place.root)}")
        return
    table(
        ("", "name", "state", "step", "attempt", "size", "loss", "config", "written (UTC)", "remark"),
        [_row(info, is_newest=newest is not None and info.path == newest.path) for info in listed]
        + [_adopted_row(path, record) for path, record in adopted],
    )


def _adopted_json(path: Path, record: Adopted | None) -> dict[str, object]:
    if record is None:
        return {"name": path.name, "path": str(path), "kind": None}
    facts = {"kind": record.kind, "step": record.step, "size_bytes": record.size_bytes}
    return {"name": path.name, "path": str(path), **facts, "adopted_ns": record.adopted_ns}


def _adopted_row(path: Path, record: Adopted | None) -> tuple[object, ...]:
    if record is None:
        return "", path.name, "adopted", "", "", "", "", "", "", "its record is damaged"
    step = "" if record.step is None else record.step
    written = when(record.adopted_ns)[:19]
    return "", path.name, "adopted", step, "", format_bytes(record.size_bytes), "", "", written, record.kind


def _row(info: CheckpointInfo, *, is_newest: bool) -> tuple[object, ...]:
    loss = "" if info.loss is None else f"{info.loss:.6g}"
    size = format_bytes(info.size_bytes) if info.size_bytes else ""
    state = f"{info.state}, suspect" if info.is_suspect else info.state
    mark = "*" if is_newest else ""
    written = when(info.created_ns)[:19]
    remark = "; ".join(filter(None, (f"pinned: {info.pin}" if info.pin else "", info.reason)))
    return mark, info.name, state, info.step, info.attempt, size, loss, info.config_hash, written, remark


@command.command(
    "why-not",
    epilog=exits(65, 78, e65="the one named, or every one, would not be resumed from", e78="the key cannot be used")
    + " Examples: midwatch ckpt why-not RUN; midwatch ckpt why-not RUN 500",
)
@path_argument
@selection_argument
@click.option("--quick", is_flag=True, help="Do not read the tensors: a damaged one may pass.")
@click.option("--key", metavar="FILE", default="", help="The run's signing key.")
@json_option
def why_not(path: Path | None, selection: str | None, quick: bool, key: str, is_json: bool) -> None:
    """Say of each checkpoint, or of the one named, whether a resume would take it, and if not, why.

    PATH is a run folder, a folder of checkpoints or one checkpoint; without it, the run folder configured here.
    """
    place = find_place(path)
    try:
        chosen = pick(place, selection)
    except CheckpointError as error:
        _show_missing(place, str(selection), error, is_json=is_json)
        return
    answers = judge_all(place, deep=not quick, key=load_key(key) if key else None)
    shown = [answer for answer, info in answers if chosen is None or info.path == chosen.path]
    if is_json:
        show_json({"root": str(place.root), "checkpoints": shown})
    elif not shown:
        say(f"no checkpoints in {plain(place.root)}")
    else:
        for answer in shown:
            _show_answer(answer)
    is_good = any(a.would_resume for a in shown) if chosen is None else all(a.is_usable for a in shown)
    sys.exit(EXIT_OK if shown and is_good else EXIT_DATA)


def _show_answer(answer: Answer) -> None:
    color = "green" if answer.would_resume else None if answer.is_usable else "red"
    code = f"[{answer.code}] " if answer.code else ""
    say(f"{plain(answer.name)}: {code}{plain(answer.why)}", fg=color)
    for problem in answer.problems:
        say(f"  {problem_line(problem)}")


def _show_missing(place: Place, selection: str, error: CheckpointError, *, is_json: bool) -> None:
    """It is not there: pruned, or never saved. The ledger may remember."""
    history = remember(place, selection)
    if is_json:
        show_json({**error.as_dict(), "history": history})
    else:
        say(f"[{error.code}] {plain(error.message)}: never saved, or removed by the rules of checkpoint.keep", fg="red")
        for line in history:
            say(f"  {plain(line)}")
    sys.exit(EXIT_DATA)
