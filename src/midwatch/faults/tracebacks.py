"""Reading what the interpreter printed last: tracebacks, chains of them, faulthandler's report of a fatal signal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from midwatch.faults.texts import PREFIX, Raised, plain
from midwatch.faults.types import Frame
from midwatch.faults.wordings import is_communication

DETAIL_LINES = 12
"""Of a message of several lines, so much is read."""
_LAST_LINES = 5
"""Behind a traceback: what a script still says when it has given up."""

_HEADER = re.compile(r"^\s*(?:Original )?Traceback \(most recent call last\):\s*$")
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d{1,9}),? in (?P<function>\S.*)$')
_EXCEPTION = re.compile(r"^(?P<type>[A-Za-z_][\w.]*?)(?:: (?P<message>.*))?$")
_CHAIN = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_FATAL = re.compile(r"^Fatal Python error: (?P<what>.+)$")
_CURRENT_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-fA-F]+.*\(most recent call first\):")


class Fatal(msgspec.Struct, frozen=True, kw_only=True):
    """What faulthandler printed."""

    what: str
    frames: tuple[Frame, ...]


def find_raised(lines: Sequence[str]) -> Raised | None:
    """The exception that ended the process.

    In a chain the last one is what the author wanted to say, unless communication is part of it: a failed clean-up
    after an error of its own (error first) and a wrapper around a lost peer (peer first) are both told by the first.
    """
    text = plain(lines)
    found = _all_raised(text)
    if not found:
        return _bare_syntax_error(text)
    at = len(found) - 1
    while at > 0 and found[at].is_chained:
        at -= 1
    first, last = found[at], found[-1]
    return first if is_communication(first) or is_communication(last) else last


def _bare_syntax_error(lines: list[str]) -> Raised | None:
    """The interpreter prints no header when the script itself does not parse."""
    for line in reversed(lines):
        match = _EXCEPTION.match(line)
        if match and match["type"] in ("SyntaxError", "IndentationError", "TabError"):
            return Raised(type=match["type"], message=match["message"] or "", frames=())
    return None


def _all_raised(lines: list[str]) -> list[Raised]:
    found: list[Raised] = []
    is_chained = False
    at = 0
    while at < len(lines):
        if lines[at].strip() in _CHAIN:
            is_chained = True
        elif _HEADER.match(lines[at]):
            raised, at = _read_traceback(lines, at + 1, is_chained=is_chained)
            if raised is not None:
                found.append(raised)
            is_chained = False
            continue
        at += 1
    return found


def _read_traceback(lines: list[str], at: int, *, is_chained: bool) -> tuple[Raised | None, int]:
    frames: list[Frame] = []
    while at < len(lines):
        line = lines[at]
        match = _FRAME.match(line)
        if match:
            frames.append(_frame(match))
        elif line and not line[0].isspace():
            break
        at += 1
    if at >= len(lines):
        return None, at
    match = _EXCEPTION.match(lines[at])
    if match is None:
        return None, at
    end = at + 1
    while end < len(lines) and end - at < DETAIL_LINES and _is_detail(lines[end]):
        end += 1
    raised = Raised(
        type=match["type"],
        message=match["message"] or "",
        frames=tuple(reversed(frames)),
        detail="\n".join(lines[at + 1 : end]),
        is_chained=is_chained,
    )
    return raised, end


def _frame(match: re.Match[str]) -> Frame:
    return Frame(function=match["function"].rstrip(), file=match["file"], line=int(match["line"]))


def _is_detail(line: str) -> bool:
    return bool(line.strip()) and line.strip() not in _CHAIN and not _HEADER.match(line)


def ends_uncaught(lines: Sequence[str]) -> bool:
    """The log ends with a traceback that nobody caught: the process is unwinding, not carrying on.

    Told by the ``[rank1]: `` that torch's exception hook puts before each line; a logged, handled traceback has none.
    """
    last = next((line for line in reversed(lines) if line.strip()), "")
    return PREFIX.match(last) is not None and any(_HEADER.match(line) for line in plain(lines))


def is_last_word(lines: Sequence[str]) -> bool:
    """The log ends with a traceback: it is why the process ended, whatever code it ended with."""
    text = plain(lines)
    starts = [at for at, line in enumerate(text) if _HEADER.match(line)]
    if not starts:
        return False
    raised, end = _read_traceback(text, starts[-1] + 1, is_chained=False)
    return raised is not None and sum(bool(line.strip()) for line in text[end:]) <= _LAST_LINES


def raised_from_error_file(content: dict[str, Any]) -> Raised | None:
    """Of a torchelastic error file: ``{"message": {"message": .., "extraInfo": {"py_callstack": ..}}}``."""
    message = content.get("message")
    if isinstance(message, dict):
        info = message.get("extraInfo")
        stack = info.get("py_callstack") if isinstance(info, dict) else None
        if isinstance(stack, str):
            raised = find_raised(stack.splitlines())
            if raised is not None:
                return raised
        message = message.get("message")
    if not isinstance(message, str) or not message.strip():
        return None
    match = _EXCEPTION.match(message.strip().splitlines()[0])
    return Raised(type=match["type"], message=match["message"] or "", frames=()) if match else None


def find_fatal(lines: Sequence[str]) -> Fatal | None:
    """The last faulthandler report, with the stack of the thread that crashed."""
    text = plain(lines)
    for at in range(len(text) - 1, -1, -1):
        match = _FATAL.match(text[at])
        if match:
            return Fatal(what=match["what"], frames=_fatal_frames(text[at + 1 :]))
    return None


def _fatal_frames(lines: list[str]) -> tuple[Frame, ...]:
    frames: list[Frame] = []
    is_inside = False
    for line in lines:
        if _CURRENT_THREAD.match(line):
            if is_inside:
                break
            is_inside = line.startswith("Current")
            continue
        match = _FRAME.match(line)
        if is_inside and match:
            frames.append(_frame(match))
        elif is_inside and frames and not line.strip():
            break
    return tuple(frames)
