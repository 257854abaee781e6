"""``midwatch ckpt verify``: one checkpoint, a run, or a whole tree of runs at night."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import click
import msgspec

from midwatch.checkpoint.format import (
    PARTIAL_SUFFIX,
    USABLE,
    Problem,
    SigningKey,
    VerifyReport,
    folder_load_problems,
    is_adopted,
    list_adopted,
    list_checkpoints,
    load_key,
    verify_adopted,
    verify_checkpoint,
)
from midwatch.cli._output import exits, json_option, plain, say, show_json
from midwatch.cli._places import Place, find_place, path_argument, pick, selection_argument
from midwatch.cli._progress import ByteCounter
from midwatch.config import TrustConfig
from midwatch.core import EXIT_DATA, EXIT_OK, CheckpointError, format_bytes, parse_checkpoint_name

Load = Literal["sample", "full"]


class _How(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for."""

    quick: bool
    load: Load | None
    key_file: str
    key: SigningKey | None


@click.command(
    "verify",
    epilog=exits(65, 78, e65="damaged, not signed with the key, or nothing to verify", e78="the key cannot be used")
    + " Examples: midwatch ckpt verify RUN 500; midwatch ckpt verify --all RUNS --json",
)
@path_argument
@selection_argument
@click.option("--all", "is_all", is_flag=True, help="Every checkpoint of every run in PATH or below it, one line each.")
@click.option("--quick", is_flag=True, help="Records, sizes, headers and coverage only; do not read the tensors.")
@click.option("--key", metavar="FILE", default="", help="Refuse what was not signed with this key.")
@click.option(
    "--load",
    type=click.Choice(["sample", "full"]),
    help="Then load a few tensors of each shard as any reader would, or every tensor in a process with PyTorch.",
)
@json_option
def verify(
    path: Path | None, selection: str | None, is_all: bool, quick: bool, key: str, load: Load | None, is_json: bool
) -> None:
    """Read checkpoints back from the medium and compare every byte with what was staged.

    PATH is one checkpoint, or a run folder: then all its verified and committed ones, or the one named by NAME or STEP.
    Each problem is told with its code, file, byte range and the tensors it hits. Changes nothing.
    """
    if load == "full" and importlib.util.find_spec("torch") is None:
        raise click.UsageError("--load full needs PyTorch, which is not installed here")
    if is_all and selection:
        raise click.UsageError("--all and a name or step exclude each other")
    how = _How(quick=quick, load=load, key_file=key, key=load_key(key) if key else None)
    place = find_place(path)
    folders = _below(place, path) if is_all else _to_verify(place, selection)
    reports: list[VerifyReport] = []
    for report in _examine_all(folders, how, may_vanish=is_all):
        reports.append(report)
        if not is_json:
            _show_line(report, place) if is_all else _show_report(report)
    is_ok = bool(reports) and all(report.is_ok for report in reports)
    if is_json:
        show_json({"ok": is_ok, "checkpoints": [_report_json(report) for report in reports]})
    elif not reports:
        say(f"no committed checkpoint in {plain(place.root)}", fg="yellow")
    sys.exit(EXIT_OK if is_ok else EXIT_DATA)


def _examine_all(folders: Iterable[Path], how: _How, *, may_vanish: bool) -> Iterator[VerifyReport]:
    for folder in folders:
        report = _examine(folder, how)
        # One that retention takes away while it is read is not damaged.
        if report.is_ok or folder.is_dir() or not may_vanish:
            yield report


def _examine(folder: Path, how: _How) -> VerifyReport:
    with ByteCounter(f"reading {folder.name}") as counter:
        if is_adopted(folder):
            return _examine_adopted(folder, how, counter)
        report = verify_checkpoint(folder, deep=not how.quick, key=how.key, on_bytes=counter.add)
    if how.load is None or not report.is_ok or report.manifest is None:
        return report
    trust = TrustConfig(load_test=how.load, signing_key=how.key_file)
    try:
        problems = folder_load_problems(folder, report.manifest, trust)
    except (OSError, CheckpointError) as error:
        problems = [Problem(code="CK110", file="", message=f"it went bad while it was examined: {error}")]
    return msgspec.structs.replace(report, problems=tuple(problems))


def _examine_adopted(folder: Path, how: _How, counter: ByteCounter) -> VerifyReport:
    report = verify_adopted(folder, deep=not how.quick, on_bytes=counter.add)
    if how.key is None:
        return report
    unsigned = Problem(code="CK109", file="", message="adopted, so nobody signed it")
    return msgspec.structs.replace(report, problems=(*report.problems, unsigned))


def _to_verify(place: Place, selection: str | None) -> list[Path]:
    if place.checkpoint is not None:
        return [place.checkpoint]
    chosen = pick(place, selection)
    if chosen is not None:
        return [Path(chosen.path)]
    listed = list_checkpoints(place.root, run_dir=place.run_dir)
    # A torn folder under a committed name has lost its manifest: that is damage, not work in progress.
    damaged = [info for info in listed if info.state == "torn" and not info.name.endswith(PARTIAL_SUFFIX)]
    adopted = [path for path, _ in list_adopted(place.root)]
    return [Path(info.path) for info in listed if info.state in USABLE or info in damaged] + adopted


def _below(place: Place, path: Path | None) -> Iterator[Path]:
    """Found as it goes, so that a night's work on a large tree begins at once; each folder once."""
    if place.checkpoint is not None:
        yield place.checkpoint
        return
    seen = {place.root.resolve()}
    yield from _to_verify(place, None)
    for folder, names, files in os.walk(path or place.root):
        is_root = any(parse_checkpoint_name(name) for name in names)
        names[:] = sorted(name for name in names if not (is_root or name.startswith(".")))
        other = find_place(Path(folder)) if is_root or "run.json" in files else None
        if other is not None and other.root.resolve() not in seen:
            seen.add(other.root.resolve())
            yield from _to_verify(other, None)


def _report_json(report: VerifyReport) -> dict[str, Any]:
    values = msgspec.structs.asdict(report)
    found = report.manifest
    facts = found and {"step": found.step, "digest": found.digest, "digest_kind": found.digest_kind}
    values.update(ok=report.is_ok, manifest=facts and {**facts, "key_id": found.key_id if found else ""})
    return values


def _show_line(report: VerifyReport, place: Place) -> None:
    """For a log: one line, whatever is wrong."""
    base = place.run_dir or place.root
    where = os.path.relpath(report.path, base) if Path(report.path).is_relative_to(base) else report.path
    if report.is_ok:
        say(f"{plain(where)}: ok, {format_bytes(report.bytes_read)} read", fg="green")
        return
    more = f" (and {len(report.problems) - 1} more)" if report.problems[1:] else ""
    say(f"{plain(where)}: BAD {problem_line(report.problems[0])}{more}", fg="red")


def _show_report(report: VerifyReport) -> None:
    how = "every byte read back" if report.is_deep else "records, sizes and headers only"
    if report.is_ok:
        signed = f", signed with key {report.manifest.key_id}" if report.manifest and report.manifest.key_id else ""
        say(f"{plain(report.name)}: ok ({how}, {format_bytes(report.bytes_read)}{plain(signed)})", fg="green")
    else:
        say(f"{plain(report.name)}: BAD, {len(report.problems)} problem(s)", fg="red")
    for problem in report.problems:
        say(f"  {problem_line(problem)}")
    for note in report.notes:
        say(f"  note: {plain(note)}", fg="yellow")


def problem_line(problem: Problem) -> str:
    """One problem on one line."""
    tensors = ", ".join(problem.tensors[:8]) + (f" and {len(problem.tensors) - 8} more" if problem.tensors[8:] else "")
    place = f"{problem.file}: " if problem.file else ""
    return plain(f"[{problem.code}] {place}{problem.message}" + (f"; tensors: {tensors}" if tensors else ""))
