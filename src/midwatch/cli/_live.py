"""One live screen about a run: what it does, the ranks that lag first, the last sentences. Plain lines in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from midwatch.cli._output import plain, say, show_json
from midwatch.core import SYSTEM_CLOCK

if TYPE_CHECKING:
    from rich.console import ConsoleDimensions, RenderableType

_LOOK_S: Final = 1.0
"""Between two questions; the coordinator itself hears from its agents once a second."""
_GONE: Final = 3
"""Looks in a row at which nobody answers and nobody is said to, before the run counts as over: another node may be
taking it over."""
_SENTENCES: Final = 5
_LEAST_ROWS: Final = 3
"""Ranks shown however low the terminal is."""

_TOLD: Final = ("state", "attempt", "step", "nodes", "incidents", "ended")
_CHROME: Final = 6
"""Lines of the screen beside facts, ranks and sentences."""

Facts = list[tuple[str, object]]
Document = dict[str, Any]


def watch(
    look: Callable[[], Document],
    facts: Callable[[Document], Facts],
    sentences: Callable[[Document], list[str]],
    *,
    is_json: bool,
) -> None:
    """Look every second until the run is over, or the terminal interrupts.

    Args:
        look: Asks for the status.
        facts: Its names and values for people.
        sentences: The last ones.
        is_json: One document a line instead.
    """
    try:
        if is_json:
            _each(look, lambda document: show_json(document, is_line=True))
        elif sys.stdout.isatty():
            _draw(look, facts, sentences)
        else:
            _each(look, _Lines(facts, sentences))
    except KeyboardInterrupt:
        return


def _each(look: Callable[[], Document], show: Callable[[Document], None]) -> None:
    absent = 0
    while True:
        began = time.monotonic()
        document = look()
        show(document)
        absent = absent + 1 if document["is_over"] else 0
        if absent >= (_GONE if not document["ended"] else 1):
            return
        time.sleep(max(0.0, began + _LOOK_S - time.monotonic()))


class _Lines:
    """In a pipe: a line when something other than time has changed, and each sentence once."""

    def __init__(self, facts: Callable[[Document], Facts], sentences: Callable[[Document], list[str]]) -> None:
        self._facts = facts
        self._sentences = sentences
        self._last: object = None
        self._told: list[str] = []

    def __call__(self, document: Document) -> None:
        known = dict(self._facts(document))
        now = [f"{name} {known[name]}" for name in _TOLD if name in known]
        if now != self._last:
            self._last = now
            say(f"{_clock()}  {plain(', '.join(now))}")
        if document["live"]:
            sentences = self._sentences(document)
            for sentence in sentences[_overlap(self._told, sentences) :]:
                say(f"{_clock()}  {plain(sentence)}")
            self._told = sentences


def _overlap(old: Sequence[str], new: Sequence[str]) -> int:
    """How many of the new ones, which follow on the old ones, were among those already."""
    for size in range(min(len(old), len(new)), 0, -1):
        if list(old[-size:]) == list(new[:size]):
            return size
    return 0


def _clock() -> str:
    return time.strftime("%H:%M:%S", time.localtime(SYSTEM_CLOCK.wall_ns() / 1e9))


def _draw(
    look: Callable[[], Document], facts: Callable[[Document], Facts], sentences: Callable[[Document], list[str]]
) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    # Not the other screen of the terminal: what was last seen should still be there afterwards.
    with Live(console=console, auto_refresh=False, transient=False, vertical_overflow="crop") as live:
        _each(look, lambda document: live.update(_screen(document, facts, sentences, console.size), refresh=True))


def _screen(
    document: Document,
    facts: Callable[[Document], Facts],
    sentences: Callable[[Document], list[str]],
    size: ConsoleDimensions,
) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    head = Table(box=None, show_header=False, pad_edge=False)
    head.add_column(style="bold")
    head.add_column()
    shown = facts(document)
    for name, value in shown:
        # Text objects, not strings: nothing in them is markup.
        head.add_row(Text(plain(name)), Text(plain(value)))
    last = [plain(sentence) for sentence in sentences(document)[-_SENTENCES:]]
    taken = len(shown) + sum(1 + len(sentence) // size.width for sentence in last) + _CHROME
    room = max(_LEAST_ROWS, size.height - taken)
    body = Table(box=None, header_style="bold", pad_edge=False)
    for column in _COLUMNS:
        body.add_column(Text(column))
    rows = rank_rows(document)
    for row in rows[:room]:
        body.add_row(*(Text(plain(cell)) for cell in row))
    more = [Text(f"({len(rows) - room} more ranks, all of them further on)")] if len(rows) > room else []
    parts: list[RenderableType] = [Text(f"{_clock()}   Ctrl-C ends the view, not the run", style="dim"), head]
    parts += [Text(""), body, *more] if rows else []
    return Group(*parts, Text(""), *(Text(sentence) for sentence in last))


_COLUMNS: Final = ("rank", "node", "state", "step", "phase", "for", "exit")


def rank_rows(document: Document) -> list[tuple[object, ...]]:
    """All ranks, those that are furthest behind first."""
    agents = (document["coordinator"] or {}).get("agents", [])
    ranks = sorted(
        ((str(agent.get("node", "")), rank) for agent in agents for rank in agent.get("ranks", [])), key=_behind
    )
    return [
        (
            rank["rank"],
            node,
            rank.get("state", ""),
            "" if rank.get("step") is None else rank["step"],
            rank.get("phase", ""),
            f"{rank['phase_age_s']:.1f} s" if rank.get("is_attached") else "",
            "" if rank.get("exit_code") is None else rank["exit_code"],
        )
        for node, rank in ranks
    ]


def _behind(placed: tuple[str, dict[str, Any]]) -> tuple[float, float, int]:
    rank = placed[1]
    return _number(rank.get("step")), -_number(rank.get("phase_age_s")), int(rank["rank"])


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else -1.0
