"""``midwatch ckpt diff``: what one checkpoint has and another has not."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from midwatch.checkpoint.format import Difference, compare
from midwatch.cli._output import exits, json_option, plain, say, show_json, table
from midwatch.cli._places import find_place, pick
from midwatch.core import EXIT_FAILED, EXIT_OK

MAX_ROWS = 40


@click.command(
    "diff",
    epilog=exits(1, 65, e0="the same", e1="they differ", e65="one is not there, or damaged")
    + " Examples: midwatch ckpt diff RUN 500 1000; midwatch ckpt diff A/checkpoints/latest B/checkpoints/latest",
)
@click.argument("words", metavar="[PATH] A B", nargs=-1, required=True)
@click.option("--read", is_flag=True, help="Compare every byte, not only the statistics kept beside the shards.")
@click.option("--all", "is_all", is_flag=True, help=f"List all tensors that differ, not only {MAX_ROWS}.")
@json_option
def diff(words: Sequence[str], read: bool, is_all: bool, is_json: bool) -> None:
    """Compare two checkpoints: facts, metrics, sections, and each tensor's type, shape and values.

    A and B are names or steps within PATH (a run folder or a folder of checkpoints), or, without PATH, two folders.
    """
    if len(words) not in (2, 3):
        raise click.UsageError("give two checkpoints, or a run folder and two names or steps")
    inside = Path(words[0]) if len(words) == 3 else None
    found = compare(_folder(inside, words[-2]), _folder(inside, words[-1]), read=read)
    if is_json:
        show_json({"same": found.is_same, "difference": found})
    else:
        _show(found, rows=len(found.tensors) if is_all else MAX_ROWS)
    sys.exit(EXIT_OK if found.is_same else EXIT_FAILED)


def _folder(inside: Path | None, word: str) -> Path:
    is_path = inside is None and Path(word).is_dir()
    info = pick(find_place(Path(word) if is_path else inside), None if is_path else word)
    if info is None:
        raise click.UsageError(f"{word} is not one checkpoint: name it")
    return Path(info.path)


def _show(found: Difference, *, rows: int) -> None:
    say(f"{plain(found.a)} and {plain(found.b)}, by {found.basis}")
    if found.facts:
        table(("fact", "a", "b"), [(fact.name, _word(fact.a), _word(fact.b)) for fact in found.facts])
    if found.tensors:
        say("")
        table(("tensor", "differs in", "a", "b"), [(c.key, c.change, c.a, c.b) for c in found.tensors[:rows]])
    if len(found.tensors) > rows:
        say(f"and {len(found.tensors) - rows} more; --all lists them")
    for note in found.notes:
        say(plain(note), fg="yellow")
    counts = Counter(change.change for change in found.tensors)
    unknown = counts.pop("unknown", 0)
    words = [f"{found.equal} tensors equal", *(f"{n} {change}" for change, n in sorted(counts.items()))]
    say("\n" + ", ".join(words), fg="green" if found.is_same else "yellow")
    if unknown:
        say(f"{unknown} without statistics on both sides: --read compares their bytes", fg="yellow")


def _word(value: object) -> str:
    return "" if value is None else str(value)
