"""``midwatch explain``: the runbook page of an error code, in the terminal."""

from __future__ import annotations

import difflib
from importlib.resources import files
from pathlib import Path

import click

from midwatch.cli._output import exits, json_option, show_json
from midwatch.core import CODES

_SOURCE = Path(__file__).resolve().parents[3] / "docs" / "runbook"
"""Beside the source tree, for a checkout; an installed package carries the pages itself."""


@click.command(
    "explain",
    short_help="What an error code means and what to do.",
    epilog=exits(2, e2="no such code") + " Example: midwatch explain CK104",
)
@click.argument("code", required=False)
@json_option
def command(code: str | None, is_json: bool) -> None:
    """Print the runbook page of CODE; without a code, the list of all codes."""
    if code is None:
        _show_all(is_json=is_json)
        return
    key = code.strip().strip("[]").upper()
    if key not in CODES:
        near = difflib.get_close_matches(key, CODES, n=3, cutoff=0.7)
        family = [known for known in CODES if known[:2] == key[:2]]
        if near:
            known = f"did you mean {', '.join(near)}?"
        elif family:
            known = f"of this kind there are {', '.join(family)}"
        else:
            known = "midwatch explain lists all codes."
        raise click.UsageError(f"no such code: {code}; {known}")
    page = runbook_page(key)
    if is_json:
        row = CODES[key]
        show_json({"code": key, "title": row.title, "exit_code": row.exit_code, "hint": row.hint, "page": page})
        return
    click.echo(page.rstrip())


def runbook_page(code: str) -> str:
    """The page's Markdown; its title and hint where the pages are not installed."""
    for folder in (files("midwatch") / "runbook", _SOURCE):
        page = folder / f"{code}.md"
        if page.is_file():
            return page.read_text(encoding="utf-8")
    row = CODES[code]
    return f"# {code}: {row.title}\n\nExit code {row.exit_code}.\n\n{row.hint}\n"


def _show_all(*, is_json: bool) -> None:
    if is_json:
        show_json({code: {"title": row.title, "exit_code": row.exit_code} for code, row in CODES.items()})
        return
    for code, row in CODES.items():
        click.echo(f"{code}  {row.title} (exit {row.exit_code})")
