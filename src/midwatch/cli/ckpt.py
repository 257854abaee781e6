"""``midwatch ckpt``: what is there, is it good, and why would a resume pass over it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from midwatch.checkpoint.format import (
    MANIFEST_FILE,
    CheckpointInfo,
    Problem,
    VerifyReport,
    decode_manifest,
    list_checkpoints,
    newest_verified,
    verify_checkpoint,
)
from midwatch.cli._ckpt_pin import pin, unpin
from midwatch.cli._ckpt_prune import prune
from midwatch.cli._output import exits, json_option, pairs, plain, say, show_json, table, when
from midwatch.cli._places import Place, find_place, pick
from midwatch.cli._why_not import Answer, judge_all, remember
from midwatch.core import EXIT_DATA, EXIT_OK, CheckpointError, format_bytes

_USABLE = ("verified", "committed")
_path = click.argument("path", metavar="[PATH]", required=False, type=click.Path(path_type=Path))
_selection = click.argument("selection", metavar="[NAME|STEP]", required=False)


@click.group("ckpt", short_help="List, verify, compare, keep and take away checkpoints.")
def command() -> None:
    """List, verify, compare, keep and take away checkpoints. Needs no PyTorch.

    Only prune, pin, unpin, export and adopt change anything; each has --dry-run.
    """


for _verb in (prune, pin, unpin):
    command.add_command(_verb)


@command.command("ls", epilog=exits(65, e65="no such folder") + " Example: midwatch ckpt ls RUN")
@_path
@json_option
def ls(path: Path | None, is_json: bool) -> None:
    """List checkpoints, newest first. A star marks the one a resume would take if it is intact.

    PATH is a run folder, a folder of checkpoints or one checkpoint; without it, the run folder configured here.
    """
    place = find_place(path)
    listed = list_checkpoints(place.root, run_dir=place.run_dir)
    newest = newest_verified(place.root, run_dir=place.run_dir)
    if is_json:
        show_json({"root": str(place.root), "newest_verified": newest and newest.name, "checkpoints": listed})
        return
    if not listed:
        say(f"no checkpoints in {plain(place.root)}")
        return
    table(
        ("", "name", "state", "step", "attempt", "size", "loss", "config", "written (UTC)", "remark"),
        [_row(info, is_newest=newest is not None and info.path == newest.path) for info in listed],
    )


def _row(info: CheckpointInfo, *, is_newest: bool) -> tuple[object, ...]:
    loss = "" if info.loss is None else f"{info.loss:.6g}"
    size = format_bytes(info.size_bytes) if info.size_bytes else ""
    state = f"{info.state}, suspect" if info.is_suspect else info.state
    mark = "*" if is_newest else ""
    written = when(info.created_ns)[:19]
    remark = "; ".join(filter(None, (f"pinned: {info.pin}" if info.pin else "", info.reason)))
    return mark, info.name, state, info.step, info.attempt, size, loss, info.config_hash, written, remark


@command.command(
    "verify", epilog=exits(65, e65="damaged, or nothing to verify") + " Example: midwatch ckpt verify RUN 500"
)
@_path
@_selection
@click.option("--quick", is_flag=True, help="Records, sizes, headers and coverage only; do not read the tensors.")
@json_option
def verify(path: Path | None, selection: str | None, quick: bool, is_json: bool) -> None:
    """Read checkpoints back from the medium and compare every byte with what was staged.

    PATH is one checkpoint, or a run folder: then all its verified and committed ones, or the one named by NAME or STEP.
    Each problem is told with its code, file, byte range and the tensors it hits.
    """
    place = find_place(path)
    folders = _to_verify(place, selection)
    reports = [verify_checkpoint(folder, deep=not quick) for folder in folders]
    is_ok = bool(reports) and all(report.is_ok for report in reports)
    if is_json:
        show_json({"ok": is_ok, "checkpoints": [_report_json(report) for report in reports]})
    else:
        for report in reports:
            _show_report(report)
        if not reports:
            say(f"no committed checkpoint in {plain(place.root)}", fg="yellow")
    sys.exit(EXIT_OK if is_ok else EXIT_DATA)


def _to_verify(place: Place, selection: str | None) -> list[Path]:
    if place.checkpoint is not None:
        return [place.checkpoint]
    chosen = pick(place, selection)
    if chosen is not None:
        return [Path(chosen.path)]
    listed = list_checkpoints(place.root, run_dir=place.run_dir)
    # A torn folder under a committed name has lost its manifest: that is damage, not work in progress.
    damaged = [info for info in listed if info.state == "torn" and not info.name.endswith(".partial")]
    return [Path(info.path) for info in listed if info.state in _USABLE or info in damaged]


def _report_json(report: VerifyReport) -> dict[str, Any]:
    values = msgspec.structs.asdict(report)
    manifest = report.manifest
    values.update(ok=report.is_ok, manifest=manifest and {"step": manifest.step, "digest": manifest.digest})
    return values


def _show_report(report: VerifyReport) -> None:
    how = "every byte read back" if report.is_deep else "records, sizes and headers only"
    if report.is_ok:
        say(f"{plain(report.name)}: ok ({how}, {format_bytes(report.bytes_read)})", fg="green")
        return
    say(f"{plain(report.name)}: BAD, {len(report.problems)} problem(s)", fg="red")
    for problem in report.problems:
        say(f"  {_problem_line(problem)}")


def _problem_line(problem: Problem) -> str:
    tensors = ", ".join(problem.tensors[:8]) + (f" and {len(problem.tensors) - 8} more" if problem.tensors[8:] else "")
    line = f"[{problem.code}] {problem.file}: {problem.message}"
    return plain(line + (f"; tensors: {tensors}" if tensors else ""))


@command.command(
    "show", epilog=exits(65, e65="no such checkpoint") + " Example: midwatch ckpt show RUN latest --tensors"
)
@_path
@_selection
@click.option("--tensors", is_flag=True, help="List every tensor with its type and shape.")
@json_option
def show(path: Path | None, selection: str | None, tensors: bool, is_json: bool) -> None:
    """Show what one checkpoint holds, from its manifest: the newest verified one if none is named.

    PATH is a run folder, a folder of checkpoints or one checkpoint; without it, the run folder configured here.
    """
    place = find_place(path)
    info = pick(place, selection) or newest_verified(place.root, run_dir=place.run_dir)
    if info is None:
        raise CheckpointError("CK201", f"no verified checkpoint in {place.root}", path=str(place.root))
    try:
        manifest = decode_manifest((Path(info.path) / MANIFEST_FILE).read_bytes())
    except (OSError, CheckpointError):
        manifest = None  # torn or damaged: what the listing knows is all there is
    if is_json:
        show_json({"checkpoint": info, "manifest": manifest})
        return
    pairs(_facts(info))
    if manifest is None:
        return
    say("")
    pairs([(file.name, f"{format_bytes(file.size_bytes)}, xxh3 {file.digest}") for file in manifest.files])
    if tensors:
        say("")
        shapes = [(key, t.dtype, "x".join(map(str, t.global_shape)) or "scalar") for key, t in manifest.tensors.items()]
        table(("tensor", "dtype", "shape"), shapes)
    else:
        say(f"\n{len(manifest.tensors)} tensors; --tensors lists them")


def _facts(info: CheckpointInfo) -> list[tuple[str, object]]:
    held = ", ".join(name for name, has in info.sections.items() if has)
    lacks = ", ".join(name for name, has in info.sections.items() if not has)
    facts: list[tuple[str, object]] = [
        ("name", info.name),
        ("path", info.path),
        ("state", f"{info.state}, suspect" if info.is_suspect else info.state),
        ("remark", info.reason),
        ("pinned", info.pin),
        ("run", info.run),
        ("step", info.step),
        ("attempt", info.attempt),
        ("world size", info.world_size),
        ("loss", "" if info.loss is None else info.loss),
        ("size", format_bytes(info.size_bytes)),
        ("written (UTC)", when(info.created_ns)),
        ("sections", held),
        ("without", lacks),
        ("config hash", info.config_hash),
        ("code hash", info.code_hash),
        ("parent", info.parent),
        ("digest", info.digest),
    ]
    return [(name, value) for name, value in facts if value != ""]


@command.command(
    "why-not",
    epilog=exits(65, e65="the one named, or every one, would not be resumed from")
    + " Examples: midwatch ckpt why-not RUN; midwatch ckpt why-not RUN 500",
)
@_path
@_selection
@click.option("--quick", is_flag=True, help="Do not read the tensors: a damaged one may pass.")
@json_option
def why_not(path: Path | None, selection: str | None, quick: bool, is_json: bool) -> None:
    """Say of each checkpoint, or of the one named, whether a resume would take it, and if not, why.

    PATH is a run folder, a folder of checkpoints or one checkpoint; without it, the run folder configured here.
    """
    place = find_place(path)
    try:
        chosen = pick(place, selection)
    except CheckpointError as error:
        _show_missing(place, str(selection), error, is_json=is_json)
        return
    answers = judge_all(place, deep=not quick)
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
        say(f"  {_problem_line(problem)}")


def _show_missing(place: Place, selection: str, error: CheckpointError, *, is_json: bool) -> None:
    """It is not there: pruned, or never saved. The ledger may remember."""
    history = remember(place, selection)
    if is_json:
        show_json({**error.as_dict(), "history": history})
    else:
        say(f"[{error.code}] {plain(error.message)}: never saved, or removed by checkpoint.keep_last", fg="red")
        for line in history:
            say(f"  {plain(line)}")
    sys.exit(EXIT_DATA)
