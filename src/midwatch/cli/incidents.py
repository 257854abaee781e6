"""``midwatch incidents``: what happened to a run, from the bundles it left."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import click

from midwatch.cli._output import exits, json_option, plain, say, show_json, table
from midwatch.cli._places import run_argument, run_folder
from midwatch.core import SuperviseError
from midwatch.storage import read_regular

_WORDS = ("fault_class", "root_rank", "root_node", "step", "confidence", "grade", "action", "summary")


@click.group("incidents", short_help="List and show incidents.")
def command() -> None:
    """Incidents of a run: what was judged, and what the judgement rests on."""


@command.command("ls", epilog=exits(65, e65="no run there"))
@run_argument
@json_option
def ls(run: Path | None, *, is_json: bool) -> None:
    """List the incidents of the run in the folder RUN, oldest first."""
    found = [_listed(path) for path in _bundles(run_folder(run))]
    if is_json:
        show_json(found)
        return
    columns = ("incident", "class", "rank", "node", "step", "confidence", "grade", "action")
    table(columns, [[_cell(one[name]) for name in ("incident", *_WORDS[:-1])] for one in found])


@command.command("show", epilog=exits(1, 65, e1="a file is not what was written", e65="no such incident"))
@run_argument
@click.argument("incident", required=False)
@json_option
@click.pass_context
def show(context: click.Context, run: Path | None, incident: str | None, *, is_json: bool) -> None:
    """Show the report of INCIDENT (default: the newest), and check that its files are what was written."""
    folder = _pick(run_folder(run), incident)
    damaged = damaged_files(folder)
    files = sorted(path.name for path in folder.iterdir())
    if is_json:
        document = {**_listed(folder), "report": "\n".join(_report(folder)), "verdict": _verdict(folder)}
        show_json({**document, "files": files, "damaged": damaged})
    else:
        for line in _report(folder):
            say(plain(line))
        say(f"files in {plain(folder)}: {', '.join(plain(name) for name in files)}")
        if damaged:
            say(f"not what was written: {', '.join(plain(name) for name in damaged)}", fg="red")
    context.exit(1 if damaged else 0)


def damaged_files(folder: Path) -> list[str]:
    """Names whose bytes do not match the bundle's list of hashes; the list itself, if it cannot be read."""
    try:
        hashes: dict[str, str] = json.loads(read_regular(folder / "HASHES.json"))
        return sorted(name for name, digest in hashes.items() if _digest(folder / Path(name).name) != digest)
    except (OSError, ValueError, AttributeError):
        return ["HASHES.json"]


def _report(folder: Path) -> list[str]:
    try:
        return read_regular(folder / "report.txt").decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []  # The list of hashes says that it is missing.


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(read_regular(path)).hexdigest()
    except OSError:
        return ""


def _bundles(run_dir: Path) -> list[Path]:
    found = [path.parent for path in (run_dir / "incidents").glob("*/verdict.json")]
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name))


def _pick(run_dir: Path, incident: str | None) -> Path:
    bundles = _bundles(run_dir)
    chosen = [path for path in bundles if path.name == incident] if incident else bundles[-1:]
    if not chosen:
        known = ", ".join(path.name for path in bundles[-5:]) or "none"
        raise SuperviseError("SV110", f"no incident {incident or ''} in {run_dir}; known: {known}".replace("  ", " "))
    return chosen[0]


def _verdict(folder: Path) -> dict[str, Any]:
    try:
        value: Any = json.loads(read_regular(folder / "verdict.json"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _listed(folder: Path) -> dict[str, Any]:
    verdict = _verdict(folder)
    return {"incident": folder.name, **{word: verdict.get(word) for word in _WORDS}}


def _cell(value: object) -> str:
    return "-" if value is None else str(value)
