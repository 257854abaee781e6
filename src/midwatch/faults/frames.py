"""What a stack says: where the user's code is, and whether the rank waits for others.

Measured on every hang we could make: a rank whose innermost Python frame is inside ``torch.distributed`` waits for
somebody; a rank anywhere else while its peers wait is the one they wait for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from midwatch.faults.types import Frame, RankEvidence

Place = Literal["collective", "gate", "backward", "user", "ended", "unknown"]
"""Where a rank is. ``backward`` is autograd's C++ engine: DDP waits for its all-reduce there, and computes there."""

BUSY_SHARE = 0.2
"""CPU seconds per second from which a process is taken to do something (an idle wait measures below 0.02)."""
BUSY_BYTES = 65_536
"""Bytes per second from which a process is taken to read or write; keep-alives and logs stay far below."""

_OURS = re.compile(
    r"(^|/)midwatch/(core|config|storage|checkpoint|pulse|faults|guards|audit|supervise|train|testing|cli|integrations"
    r"|__init__\.py|__main__\.py)"
)
_COMMUNICATION = re.compile(r"(^|/)torch/(distributed/|nn/parallel/distributed\.py)|(^|/)lib(gloo|nccl)")
_ALSO_COMPUTES = re.compile(
    r"torch/distributed/(checkpoint|optim|pipelining|tensor|_tensor|fsdp|algorithms|_composable|run|launch|elastic)\b"
)
"""Parts of torch.distributed in which a rank also computes or writes: there the function's name decides."""
_WAITS = re.compile(
    r"(?:^|[_.])(?:a?wait[a-z]*|i?send|i?recv|(?:all_?)?(?:gather|reduce)|all_?to_?all|scatter|broadcast|barrier|exchange"
    r"|agree|gate)(?:[_.0-9]|$)",
    re.IGNORECASE,
)
"""Whole words: a sharding that is propagated does not wait at a gate."""
_AUTOGRAD = re.compile(r"(^|/)torch/autograd/(graph|__init__)\.py$")
_LIBRARY = re.compile(
    r"(site|dist)-packages/|/lib(64)?/python3(\.\d+)?/|^<frozen |^<__array_function__|^<eval_with_key>"
)
_STORAGE = re.compile(
    r"/(ssl|socket|http/client|shutil|zipfile|zipfile/__init__|tarfile|gzip|bz2|lzma)\.py$"
    r"|(^|/)(urllib3|botocore|aiobotocore|boto3|s3transfer|fsspec|s3fs|gcsfs|adlfs|h5py|zarr|numpy/lib/.*npyio"
    r"|google/(cloud/storage|resumable_media)|torch/serialization|torch/utils/data/dataloader|safetensors/)"
)
"""Where data comes from a store or goes there: such a wait may be long, and rightly so. What the workers of a loader
wait for is not seen from the rank itself."""
_LOOK_THROUGH = (
    *("/threading.py", "/queue.py", "/selectors.py", "/multiprocessing/connection.py", "/multiprocessing/queues.py"),
    *("/concurrent/futures/_base.py", "/concurrent/futures/thread.py", "torch/_ops.py"),
)
"""Wait functions of the interpreter and torch's operator call: who called them says what is waited for."""
_WRAPPERS = ("/midwatch/train/waits.py", "/midwatch/train/collectives.py")


def is_ours(frame: Frame) -> bool:
    """A frame of midwatch itself (not of a user's folder that happens to be called midwatch)."""
    return _OURS.search(frame.file) is not None


def is_wrapper(frame: Frame) -> bool:
    """What is laid around torch's own calls to time or count them: as if it were not there."""
    return frame.file.endswith(_WRAPPERS)


def is_user(frame: Frame) -> bool:
    """A frame of the user's own code: no library, no interpreter, not ours."""
    return bool(frame.file) and not is_ours(frame) and _LIBRARY.search(frame.file) is None


def user_frame(stack: Sequence[Frame]) -> Frame | None:
    """The innermost frame of the user's own code."""
    return next((frame for frame in stack if is_user(frame)), None)


def is_collective(frame: Frame) -> bool:
    """Inside the communication library, where nothing is computed."""
    if not _COMMUNICATION.search(frame.file):
        return False
    return not _ALSO_COMPUTES.search(frame.file) or _WAITS.search(frame.function) is not None


def place_of_stack(stack: Sequence[Frame]) -> Place:
    """Where the innermost frames are, looking through wait functions that serve any purpose."""
    for frame in stack:
        if is_wrapper(frame):
            if _WAITS.search(frame.function):
                return "collective"  # also where the script itself waits for a call that it began before
            continue
        if is_collective(frame):
            return "collective"
        if is_ours(frame):
            # Our gate and control group wait for the peers; anything else of ours is this rank's own work.
            return "gate" if _WAITS.search(frame.function) else "user"
        if _AUTOGRAD.search(frame.file):
            return "backward"
        if not frame.file.endswith(_LOOK_THROUGH):
            return "user"
    return "user" if stack else "unknown"


def is_agreement(stack: Sequence[Frame]) -> bool:
    """It waits in a collective of midwatch's own: between two steps, so all of the script's are behind it."""
    passed = (*_LOOK_THROUGH, *_WRAPPERS)
    caller = next((f for f in stack if not is_collective(f) and not f.file.endswith(passed)), None)
    return caller is not None and is_ours(caller)


def place_of(rank: RankEvidence, window_s: float) -> Place:
    """Where a rank is, by its newest sample; one that changed its mind between samples is not waiting."""
    if rank.exit_code is not None or rank.proc_state in ("Z", "X"):
        return "ended"
    places: list[Place] = [place_of_stack(stack) for stack in rank.stacks if stack]
    if not places:
        return "unknown"
    if places[-1] == "backward":
        return "user" if is_busy(rank, window_s) else "collective"
    return places[-1]


def is_busy(rank: RankEvidence, window_s: float) -> bool:
    """It used the CPU between the samples."""
    return rank.cpu_delta_s is not None and window_s > 0 and rank.cpu_delta_s >= BUSY_SHARE * window_s


def is_transferring(rank: RankEvidence, window_s: float) -> bool:
    """It read or wrote between the samples."""
    return rank.io_delta is not None and window_s > 0 and rank.io_delta >= BUSY_BYTES * window_s


def is_storage(stack: Sequence[Frame]) -> bool:
    """The innermost frames are of a library that reads and writes files or objects, or loads data."""
    inner = [frame for frame in stack if not frame.file.endswith((*_LOOK_THROUGH, *_WRAPPERS))]
    return any(_STORAGE.search(frame.file) for frame in inner[:2])


def is_fetching(stack: Sequence[Frame]) -> bool:
    """A thread that the script itself made waits for a store; those of libraries may do so all the time."""
    return is_storage(stack) and user_frame(stack) is not None


def where(stack: Sequence[Frame]) -> str:
    """``function (file.py:12)`` of the user's innermost frame, else of the innermost one; empty without a stack."""
    frame = user_frame(stack) or (stack[0] if stack else None)
    return f"{frame.function} ({basename(frame.file)}:{frame.line})" if frame else ""


def basename(path: str) -> str:
    return path.rsplit("/", 1)[-1]
