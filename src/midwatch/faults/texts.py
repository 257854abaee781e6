"""What a log tail says: the last uncaught exception, a fatal signal's stack, a communication library's words.

Log lines are foreign text: matched, cut to length and quoted, never formatted with.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from midwatch.faults.types import Frame

LINE_LENGTH = 300
"""A quoted line is cut here."""
DETAIL_LINES = 12
"""Of a message of several lines, so much is read."""

_PREFIX = re.compile(r"^\[(?:default\d+|rank ?\d+)\]:\s?")
_HEADER = re.compile(r"^\s*(?:Original )?Traceback \(most recent call last\):\s*$")
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:,)? in (?P<function>.+?)\s*$')
_EXCEPTION = re.compile(r"^(?P<type>[A-Za-z_][\w.]*?)(?:: (?P<message>.*))?$")
_CHAIN = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_FATAL = re.compile(r"^Fatal Python error: (?P<what>.+)$")
_CURRENT_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-fA-F]+.*\(most recent call first\):")


class Raised(msgspec.Struct, frozen=True, kw_only=True):
    """One exception of a traceback, innermost frame first."""

    type: str
    message: str
    frames: tuple[Frame, ...]
    detail: str = ""
    """The lines after the first one: libraries put the useful half there."""
    is_chained: bool = False
    """It came while or because the one before it in the text was handled."""

    @property
    def short_type(self) -> str:
        return self.type.rsplit(".", 1)[-1]

    @property
    def line(self) -> str:
        return quote(f"{self.type}: {self.message}" if self.message else self.type)


class Fatal(msgspec.Struct, frozen=True, kw_only=True):
    """What faulthandler printed."""

    what: str
    frames: tuple[Frame, ...]


def quote(line: str) -> str:
    """A foreign line as evidence: one line, bounded, nothing a terminal would obey."""
    line = " ".join("".join(c if c.isprintable() else " " for c in line).split())
    return line if len(line) <= LINE_LENGTH else line[: LINE_LENGTH - 1] + "…"


def plain(lines: Iterable[str]) -> list[str]:
    """Without the ``[rank1]: `` that torch puts before each line."""
    return [_PREFIX.sub("", line.rstrip("\n")) for line in lines]


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
            frames.append(Frame(function=match["function"], file=match["file"], line=int(match["line"])))
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


def _is_detail(line: str) -> bool:
    return bool(line.strip()) and line.strip() not in _CHAIN and not _HEADER.match(line)


def ends_uncaught(lines: Sequence[str]) -> bool:
    """The log ends with a traceback that nobody caught: the process is unwinding, not carrying on.

    Told by the ``[rank1]: `` that torch's exception hook puts before each line; a logged, handled traceback has none.
    """
    last = next((line for line in reversed(lines) if line.strip()), "")
    return _PREFIX.match(last) is not None and any(_HEADER.match(line) for line in plain(lines))


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
            frames.append(Frame(function=match["function"], file=match["file"], line=int(match["line"])))
        elif is_inside and frames and not line.strip():
            break
    return tuple(frames)


# --- wordings --------------------------------------------------------------------------------------------------------

COMMUNICATION_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "ProcessGroupError")
_COMMUNICATION = re.compile(
    r"gloo/transport/|Connection closed by (?:remote )?peer|Connection reset by peer|connectFullMesh"
    r"|Application timeout caused pair closure|Timed out waiting \d+ ?ms for (?:recv|send)"
    r"|remote process exited or there was a network error|ncclRemoteError|ncclSystemError|NCCL (?:error|communicator)"
    r"|Watchdog caught collective operation timeout|ProcessGroupNCCL's watchdog|NCCL watchdog thread terminated"
    r"|failure detected by watchdog|heartbeat monitor|HeartbeatMonitor"
    r"|TCPStore|client socket has timed out|socket has failed|wait timeout after \d+ ?ms"
    r"|failed to (?:recv|send), got|Broken pipe|Stop_waiting response",
    re.IGNORECASE,
)
_NOT_A_VICTIM = re.compile(
    r"invalid usage|Duplicate GPU detected|Multiple ranks are using the same GPU|Mismatched NCCL version"
    r"|No space left on device|out of memory|unhandled cuda error|invalid argument|Address already in use|EADDRINUSE",
    re.IGNORECASE,
)
"""Texts of a communication error that speak of this rank itself, not of a peer."""
_MISMATCH = re.compile(
    r"op\.preamble\.length <= op\.nbytes|Detected mismatch between collectives on ranks"
    r"|Collectives differ in the following aspects|mismatch.{0,40}collective",
    re.IGNORECASE,
)
_HOST_MEMORY = re.compile(
    r"can't allocate memory|Cannot allocate memory|std::bad_alloc|Unable to allocate .{0,40}for an array"
)
_GPU_MEMORY = re.compile(r"(?:CUDA|HIP|GPU) out of memory|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED")
_GPU = re.compile(
    r"CUDA error: (?!out of memory)|uncorrectable (?:NVLink|ECC) error|CUDA driver error|device-side assert"
    r"|unspecified launch failure|GPU is lost|cudaError(?!MemoryAllocation)"
)
_WORKER_DIED = re.compile(r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:is killed by signal|exited unexpectedly)")
_SURROUNDINGS = re.compile(
    r"No space left on device|Disk quota exceeded|Input/output error|Stale file handle|Read-only file system"
    r"|Too many open files|Address already in use|Name or service not known|Temporary failure in name resolution"
    r"|Connection refused|Network is unreachable|Connection timed out|Max retries exceeded|Transport endpoint"
)
_SURROUNDING_TYPES = (
    "ConnectionError", "ConnectionRefusedError", "ConnectionResetError", "ConnectionAbortedError", "TimeoutError",
    "BrokenPipeError", "gaierror", "SSLError", "HTTPError", "ReadTimeout", "ConnectTimeout", "BlockingIOError",
)  # fmt: skip
_STARTUP_TYPES = ("ModuleNotFoundError", "ImportError", "SyntaxError", "IndentationError", "TabError")
_STARTUP = re.compile(r"^usage: |: error: |can't open file '|No module named |command not found|: not found$")
_OOM_KILL = re.compile(r"(?:Killed process|Kill process|oom-kill:.*\bpid=|oom_reaper: reaped process) ?(?P<pid>\d+)")
_XID = re.compile(r"NVRM: Xid .*?: (?P<xid>\d+)")


def is_communication(raised: Raised) -> bool:
    """It failed because a peer or the network between them did."""
    text = f"{raised.message}\n{raised.detail}"
    if _NOT_A_VICTIM.search(text) or _MISMATCH.search(text):
        return False
    if raised.short_type in COMMUNICATION_TYPES:
        return True
    in_library = bool(raised.frames) and "torch/distributed/" in raised.frames[0].file
    return (raised.short_type == "RuntimeError" or in_library) and says_communication(raised.message)


def says_communication(text: str) -> bool:
    return _COMMUNICATION.search(text) is not None


def communication_line(lines: Sequence[str]) -> str:
    """The last line that speaks of a lost peer or a communication time-out; empty when none does."""
    return next((quote(line) for line in reversed(plain(lines)) if says_communication(line)), "")


def classify_raised(raised: Raised) -> str:
    """The fault class of an uncaught exception, as far as its own text tells."""
    text = f"{raised.message}\n{raised.detail}"
    kind = raised.short_type
    if _MISMATCH.search(text):
        return "collective_mismatch"
    if is_communication(raised):
        return "peers_lost"
    if kind == "OutOfMemoryError" or _GPU_MEMORY.search(text):
        return "gpu_out_of_memory"
    if kind == "MemoryError" or _HOST_MEMORY.search(text):
        return "memory_error"
    if _WORKER_DIED.search(text):
        return "data_worker_died"
    if kind == "AcceleratorError" or _GPU.search(text):
        return "gpu_error"
    if kind in _STARTUP_TYPES:
        return "startup_error"
    if kind in _SURROUNDING_TYPES or _SURROUNDINGS.search(text):
        return "environment_error"
    return "user_exception"


def startup_line(lines: Sequence[str]) -> str:
    """A line by which an interpreter, shell or argument parser refused the command; empty when there is none."""
    return next((quote(line) for line in reversed(plain(lines)) if _STARTUP.search(line)), "")


def oom_killed_pids(kernel_lines: Iterable[str]) -> dict[int, str]:
    """pid -> the kernel's line about killing it for memory."""
    found: dict[int, str] = {}
    for line in kernel_lines:
        match = _OOM_KILL.search(line)
        if match:
            found.setdefault(int(match["pid"]), quote(line))
    return found


def xid_line(kernel_lines: Iterable[str]) -> str:
    """The first NVIDIA Xid report; empty when there is none."""
    return next((quote(line) for line in kernel_lines if _XID.search(line)), "")


def last_lines(lines: Sequence[str], count: int = 3) -> tuple[str, ...]:
    """The last lines that say anything."""
    return tuple(quote(line) for line in plain(lines) if line.strip())[-count:]
