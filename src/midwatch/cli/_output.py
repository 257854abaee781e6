"""What all verbs share: one JSON document or text for people, tables, and the rule that text from outside is data.

Node names, log lines and error messages come from elsewhere. They are shown without control characters, so that they
cannot move the cursor or colour the terminal, and never parsed as markup.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import click
import msgspec

from midwatch.core import printable as plain

__all__ = [
    "EXIT_CODES",
    "exits",
    "json_option",
    "pairs",
    "plain",
    "say",
    "show_json",
    "table",
    "when",
]

F = TypeVar("F", bound=Callable[..., Any])

json_option = click.option("--json", "is_json", is_flag=True, help="One JSON document on stdout, nothing else there.")

EXIT_CODES = {
    0: "fine",
    1: "something needs attention",
    2: "wrong usage",
    65: "data damaged, missing or not to be trusted",
    73: "another command is at work here",
    74: "reading or writing failed",
    76: "the coordinator's answer cannot be trusted",
    78: "the configuration cannot be used",
}
"""What the exit codes of the reading verbs mean; ``run`` documents its own."""


_SURROGATE = re.compile("[\ud800-\udfff]")
"""What Python makes of bytes in a name that are not UTF-8."""


def exits(*codes: int, **meanings: str) -> str:
    """The line on exit codes for a verb's help; ``e65="..."`` words one code for this verb."""
    texts = [f"{code} {meanings.get(f'e{code}', EXIT_CODES[code])}" for code in (0, *codes)]
    return f"Exit codes: {'; '.join(texts)}."


def show_json(value: Any, *, is_line: bool = False) -> None:
    """Print one document, on many lines or on one."""
    indent = None if is_line else 2
    text = json.dumps(msgspec.to_builtins(value, enc_hook=str), indent=indent, ensure_ascii=False, default=str)
    # A file's name need not be UTF-8; JSON must be.
    click.echo(_SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def say(text: str, *, fg: str | None = None) -> None:
    """Print a line for people on stdout."""
    click.secho(text, fg=fg)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table: drawn and fitted on a terminal, plain and uncut columns in a pipe, so that grep sees everything."""
    cells = [[plain(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _draw(columns, cells)
        return
    widths = [max(len(line[i]) for line in [list(columns), *cells]) for i in range(len(columns))]
    for line in [list(columns), *cells]:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _draw(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        drawn.add_column(Text(column))
    for row in cells:
        # Text objects, not strings: nothing in them is markup.
        drawn.add_row(*(Text(cell) for cell in row))
    Console(highlight=False).print(drawn)


def pairs(values: Sequence[tuple[str, object]]) -> None:
    """Names and values, one pair a line."""
    width = max((len(name) for name, _ in values), default=0)
    for name, value in values:
        click.echo(f"{plain(name).ljust(width)}  {plain(value)}".rstrip())


def when(ts_ns: int) -> str:
    """Wall time in UTC to the millisecond; empty for 0."""
    if not ts_ns:
        return ""
    try:
        moment = datetime.fromtimestamp(ts_ns / 1e9, UTC)
    except (OverflowError, OSError, ValueError):
        return f"{ts_ns} ns"
    return f"{moment:%Y-%m-%d %H:%M:%S}.{ts_ns // 1_000_000 % 1000:03d}"
