"""The words by which PyTorch, gloo, NCCL, the interpreter and the kernel tell what happened; add new ones here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from midwatch.faults.frames import is_wrapper
from midwatch.faults.texts import Raised, plain, quote

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
    r"CUDA error: (?!out of memory|device-side assert)|uncorrectable (?:NVLink|ECC) error|CUDA driver error"
    r"|unspecified launch failure|GPU is lost|cudaError(?!MemoryAllocation)"
)
_IN_PASSING = re.compile(r"\[W\d.*socket\.cpp|^\[?I\d{3,}|^\[I\d")
"""Torch looks for addresses and waits for its store to come up, and warns of each try that did not succeed."""
_UNCAUGHT = re.compile(
    r"(?:what\(\):|terminated with exception:|terminate called after throwing an instance of)\s*(?P<text>.*)"
)
_ASSERTION = re.compile(r"device-side assert")
_WORKER_DIED = re.compile(r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:is killed by signal|exited unexpectedly)")
_SURROUNDINGS = re.compile(
    r"No space left on device|Disk quota exceeded|Input/output error|Stale file handle|Read-only file system"
    r"|Too many open files|Address already in use|Name or service not known|Temporary failure in name resolution"
    r"|Connection refused|Network is unreachable|Connection timed out|Max retries exceeded|Transport endpoint"
    r"|Resource temporarily unavailable"
)
_SURROUNDING_TYPES = (
    "ConnectionError", "ConnectionRefusedError", "ConnectionResetError", "ConnectionAbortedError", "TimeoutError",
    "BrokenPipeError", "gaierror", "SSLError", "HTTPError", "ReadTimeout", "ConnectTimeout", "BlockingIOError",
)  # fmt: skip
_STARTUP_TYPES = ("ModuleNotFoundError", "ImportError", "SyntaxError", "IndentationError", "TabError")
_STARTUP = re.compile(r"^usage: |: error: |can't open file '|No module named |command not found|: not found$")
_OOM_KILL = re.compile(
    r"(?:Killed process|Kill process|oom-kill:.*\bpid=|oom_reaper: reaped process) ?(?P<pid>\d{1,9})"
)
_XID = re.compile(r"NVRM: Xid .*?: (?P<xid>\d{1,4})\b")


def is_communication(raised: Raised) -> bool:
    """It failed because a peer or the network between them did."""
    text = f"{raised.message}\n{raised.detail}"
    if _NOT_A_VICTIM.search(text) or _MISMATCH.search(text):
        return False
    if raised.short_type in COMMUNICATION_TYPES:
        return True
    inner = next((frame for frame in raised.frames if not is_wrapper(frame)), None)
    in_library = inner is not None and "torch/distributed/" in inner.file
    return (raised.short_type == "RuntimeError" or in_library) and says_communication(raised.message)


def says_communication(text: str) -> bool:
    return _COMMUNICATION.search(text) is not None


def communication_line(lines: Sequence[str]) -> str:
    """The last line that speaks of a lost peer or a communication time-out; empty when none does.

    What is said in passing does not count, nor what this rank says of its own device.
    """
    own = (_IN_PASSING, _GPU, _NOT_A_VICTIM)
    spoken = (line for line in reversed(plain(lines)) if not any(pattern.search(line) for pattern in own))
    return next((quote(line) for line in spoken if says_communication(line)), "")


def abort_reason(lines: Sequence[str]) -> tuple[str, str] | None:
    """(fault class, line) where a process that aborted said why; None where it did not, or only of its peers.

    What C++ did not catch is told by ``what():``; what a thread of NCCL found is told by its watchdog, which aborts for
    the rank's own errors as well as for its peers'.
    """
    for line in reversed(plain(lines)):
        found = _UNCAUGHT.search(line)
        if found is None:
            continue
        text = found["text"]
        if _GPU_MEMORY.search(text):
            return "gpu_out_of_memory", quote(line)
        if _HOST_MEMORY.search(line):
            return "memory_error", quote(line)
        if _GPU.search(text):
            return "gpu_error", quote(line)
        if _ASSERTION.search(text):
            return "user_exception", quote(line)
    return None


def surroundings_line(lines: Sequence[str]) -> str:
    """The last line that blames the machine: its disk, its memory, its limits; empty when none does."""
    blaming = (line for line in reversed(plain(lines)) if _SURROUNDINGS.search(line) or _HOST_MEMORY.search(line))
    return next((quote(line) for line in blaming), "")


def named_pids(text: str) -> tuple[int, ...]:
    """The processes that a data loader says have died."""
    found = _WORKER_DIED.search(text)
    return tuple(int(number) for number in re.findall(r"\d{1,9}", found[0])) if found else ()


def mismatch_line(lines: Sequence[str]) -> str:
    """The last line that says that the ranks called different collectives; empty when none does."""
    return next((quote(line) for line in reversed(plain(lines)) if _MISMATCH.search(line)), "")


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


_XIDS_OF_PROGRAMS = frozenset({8, 13, 31, 32, 43, 45, 68, 69})
"""Bad addresses, illegal instructions, time-outs of a kernel, and processes that were ended: the program's doing."""


def is_broken_gpu(line: str) -> bool:
    """A kernel line in which the driver blames the device, its memory, its link or itself."""
    found = _XID.search(line)
    return found is not None and int(found["xid"]) not in _XIDS_OF_PROGRAMS
