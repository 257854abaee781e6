"""``midwatch logs``: the output of all ranks in one view, what only a few of them say first."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

import click

from midwatch.cli._output import exits, json_option, plain, say, show_json
from midwatch.cli._places import run_argument, run_folder
from midwatch.core import SuperviseError
from midwatch.supervise import (
    Fold,
    LogFile,
    LogReader,
    attempts_with_logs,
    first_lines,
    log_files,
    parse_ranks,
    rank_ranges,
)

_LOOK_S: Final = 1.0
"""Between two looks with --follow: long enough for all ranks to have written the line of one step."""


@click.command("logs", short_help="The output of all ranks, folded.", epilog=exits(65, e65="no output there"))
@run_argument
@click.option("--attempt", type=click.IntRange(min=1), help="Of this attempt. Default: the newest.")
@click.option("--rank", "ranks", metavar="LIST", help="Of these ranks only, such as 0-7,12; of a single one, unfolded.")
@click.option(
    "--lines", type=click.IntRange(min=1), default=40, show_default=True, help="At most, for each set of ranks."
)
@click.option("--follow", "-f", is_flag=True, help="Show what is written from now on, and later attempts' output.")
@json_option
def command(
    run: Path | None, *, attempt: int | None, ranks: str | None, lines: int, follow: bool, is_json: bool
) -> None:
    """Show what the ranks of the run in the folder RUN have written.

    Lines that differ only in numbers are one line, with how many there are. They are ordered by who wrote them: what
    looks like trouble and what only a few ranks say comes first, what all say last. With --json and --follow there is
    one document a line.
    """
    folder = run_folder(run)
    wanted = _wanted(ranks)
    if follow:
        try:
            _Follower(folder, attempt, wanted, is_json=is_json).run()
        except KeyboardInterrupt:
            return
    files = _files(folder, attempt, wanted)
    document = _document(folder, files, lines)
    if is_json:
        show_json(document)
    else:
        _show(document)


def _wanted(ranks: str | None) -> list[range] | None:
    try:
        return None if ranks is None else parse_ranks(ranks)
    except ValueError:
        raise click.BadParameter(f"{ranks!r} is not a list such as 0-7,12", param_hint="--rank") from None


def _files(folder: Path, attempt: int | None, wanted: list[range] | None) -> list[LogFile]:
    attempts = attempts_with_logs(folder)
    chosen = attempt or max(attempts, default=0)
    files = _only(log_files(folder, chosen), wanted) if chosen in attempts else []
    if not files:
        known = ", ".join(str(number) for number in attempts[-5:]) or "none"
        what = (
            f"attempt {chosen} of these ranks" if chosen and wanted else f"attempt {chosen}" if chosen else "any rank"
        )
        raise SuperviseError("SV110", f"no output of {what} in {folder}; attempts with output: {known}")
    return files


def _only(files: list[LogFile], wanted: list[range] | None) -> list[LogFile]:
    return files if wanted is None else [file for file in files if any(file.rank in part for part in wanted)]


# --- one look ------------------------------------------------------------------------------------------------------


def _document(folder: Path, files: list[LogFile], most: int) -> dict[str, Any]:
    ranks = sorted({file.rank for file in files})
    document: dict[str, Any] = {
        "run_dir": str(folder),
        "attempt": files[0].attempt,
        "ranks": rank_ranges(ranks),
        "nodes": sorted({file.node for file in files}),
    }
    if len(ranks) == 1:
        return {**document, **_unfolded(files, most)}
    fold = Fold(ranks)
    silent = set(ranks)
    for file in files:
        lines = [*first_lines(file), *LogReader(file).lines(is_last=True)]
        fold.add(file.rank, lines, file.stream)
        silent -= {file.rank} if lines else set()
    return {
        **document,
        "silent_ranks": rank_ranges(sorted(silent)),
        "sections": _sections(fold, len(ranks), most),
        "left_out": fold.left_out,
    }


def _unfolded(files: list[LogFile], most: int) -> dict[str, Any]:
    """One rank: stdout and stderr one after the other, for nothing says how they were interleaved."""
    lines: list[dict[str, Any]] = []
    hidden = 0
    for file in files:
        texts = list(LogReader(file).lines(is_last=True))
        hidden += max(0, len(texts) - most)
        lines += [{"text": text, "stream": file.stream, "count": 1} for text in texts[-most:]]
    section = {"ranks": str(files[0].rank), "is_all": True, "lines": lines, "hidden": hidden}
    return {"silent_ranks": "" if lines else str(files[0].rank), "sections": [section], "left_out": 0}


def _sections(fold: Fold, total: int, most: int) -> list[dict[str, Any]]:
    sections: list[dict[str, Any]] = []
    for ranks, groups in fold.groups():
        lines = [
            {
                "text": group.text if group.is_same else group.masked,
                "newest": group.text,
                "stream": group.stream,
                "count": group.count,
                "is_alarming": group.is_alarming,
            }
            for group in groups[-most:]
        ]
        hidden = max(0, len(groups) - most)
        sections.append({"ranks": rank_ranges(ranks), "is_all": len(ranks) == total, "lines": lines, "hidden": hidden})
    return sections


def _show(document: dict[str, Any]) -> None:
    nodes = document["nodes"]
    where = plain(nodes[0]) if len(nodes) == 1 else f"{len(nodes)} nodes"
    many = "," in document["ranks"] or "-" in document["ranks"]
    say(f"attempt {document['attempt']}, {'ranks' if many else 'rank'} {document['ranks']} on {where}")
    if document["silent_ranks"]:
        say(f"no output at all: {document['silent_ranks']}", fg="yellow")
    for section in document["sections"]:
        if many:
            say(f"\n--- {'all ranks' if section['is_all'] else 'only ' + section['ranks']}")
        if section["hidden"]:
            say(f"      ({section['hidden']} earlier ones: --lines shows more)")
        for line in section["lines"]:
            times = f"{line['count']}x" if line["count"] > 1 else ""
            say(f"{times:>6} {line['stream']}  {plain(line['text'])}", fg="red" if line.get("is_alarming") else None)
    if document["left_out"]:
        say(f"({document['left_out']} lines that differ too much are not shown: --rank shows one rank's)", fg="yellow")


# --- from now on ---------------------------------------------------------------------------------------------------


class _Follower:
    """Reads on in all files, and turns to the next attempt when there is one."""

    def __init__(self, folder: Path, attempt: int | None, wanted: list[range] | None, *, is_json: bool) -> None:
        self._folder = folder
        self._fixed = attempt
        self._wanted = wanted
        self._is_json = is_json
        self._attempt = 0
        self._readers: dict[Path, LogReader] = {}

    def run(self) -> None:
        """Until the terminal interrupts."""
        self._turn(is_first=True)
        while True:
            self._look()
            time.sleep(_LOOK_S)
            self._turn(is_first=False)

    def _turn(self, *, is_first: bool) -> None:
        newest = self._fixed or max(attempts_with_logs(self._folder), default=0)
        if newest != self._attempt:
            self._look(is_last=True)
            self._attempt, self._readers = newest, {}
            if not self._is_json:
                say(f"--- attempt {newest}")
        for file in _only(log_files(self._folder, newest), self._wanted) if newest else ():
            if file.path not in self._readers:
                # What is there when we come is old; what a later attempt or a late rank begins with is new.
                self._readers[file.path] = LogReader(file, newest_bytes=1 if is_first else 0)

    def _look(self, *, is_last: bool = False) -> None:
        fold = Fold(reader.file.rank for reader in self._readers.values())
        for reader in self._readers.values():
            fold.add(reader.file.rank, list(reader.lines(is_last=is_last)), reader.file.stream)
        for ranks, groups in fold.groups():
            for group in groups:
                self._tell(rank_ranges(ranks), group.stream, group.text, group.count, is_alarming=group.is_alarming)

    def _tell(self, ranks: str, stream: str, text: str, count: int, *, is_alarming: bool) -> None:
        if self._is_json:
            document = {"attempt": self._attempt, "ranks": ranks, "stream": stream, "text": text, "count": count}
            show_json(document, is_line=True)
            return
        say(f"[{ranks}] {plain(text)}", fg="red" if is_alarming else None)
