"""Evidence in the shapes that real processes left behind (gloo, two ranks), for the tests of judgement and decision."""

from __future__ import annotations

from typing import Any

from midwatch.faults import Evidence, Frame, RankEvidence

SCRIPT = "/home/ada/project/train.py"
TORCH = "/home/ada/venv/lib/python3.11/site-packages/torch"
STDLIB = "/usr/lib/python3.11"


def frame(function: str, file: str = SCRIPT, line: int = 1) -> Frame:
    return Frame(function=function, file=file, line=line)


MAIN = (frame("train", line=99), frame("main", line=327), frame("<module>", line=354))
IN_ALL_REDUCE = (
    frame("all_reduce", f"{TORCH}/distributed/distributed_c10d.py", 3252),
    frame("_exception_logger.<locals>.wrapper", f"{TORCH}/distributed/c10d_logger.py", 83),
    *MAIN,
)
IN_USER_SLEEP = (frame("load_batch", line=127), *MAIN)
IN_THREAD_WAIT = (
    frame("Condition.wait", f"{STDLIB}/threading.py", 327),
    frame("Event.wait", f"{STDLIB}/threading.py", 629),
    *IN_USER_SLEEP,
)
IN_BACKWARD = (
    frame("_engine_run_backward", f"{TORCH}/autograd/graph.py", 865),
    frame("backward", f"{TORCH}/autograd/__init__.py", 360),
    frame("Tensor.backward", f"{TORCH}/_tensor.py", 630),
    *MAIN,
)
IN_GATE = (
    frame("wait_for_go", "/home/ada/venv/lib/python3.11/site-packages/midwatch/train/gate.py", 40),
    frame("Run.steps", "/home/ada/venv/lib/python3.11/site-packages/midwatch/train/run.py", 120),
    *MAIN,
)
IN_COMPUTE = (frame("Linear.forward", f"{TORCH}/nn/modules/linear.py", 125), frame("forward", line=12), *MAIN)


def traceback(
    rank: int, *, frames: tuple[tuple[str, int, str], ...], error: str, prefix: bool = True
) -> tuple[str, ...]:
    mark = f"[rank{rank}]: " if prefix else ""
    lines = [f"{mark}Traceback (most recent call last):"]
    for file, line, function in frames:
        lines.append(f'{mark}  File "{file}", line {line}, in {function}')
        lines.append(f"{mark}    some_code(here)")
        lines.append(f"{mark}    ^^^^^^^^^^^^^^^")
    lines.append(f"{mark}{error}")
    return tuple(lines)


USER = ((SCRIPT, 354, "<module>"), (SCRIPT, 327, "main"), (SCRIPT, 94, "train"))
IN_LIBRARY = (
    *USER,
    (f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper"),
    (f"{TORCH}/distributed/distributed_c10d.py", 3252, "all_reduce"),
)
CLOSED = (
    "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:44710. This is typically caused by a remote worker crashing. Check the logs of the remote worker"
)
RESET = (
    "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:48319"
    ": Connection reset by peer. This is typically caused by a remote worker hanging or bugs in the application."
)
SEGFAULT = (
    "Fatal Python error: Segmentation fault",
    "",
    "Current thread 0x00007fb6cd7f2b80 (most recent call first):",
    f'  File "{STDLIB}/ctypes/__init__.py", line 519 in string_at',
    f'  File "{SCRIPT}", line 116 in load_batch',
    f'  File "{SCRIPT}", line 94 in train',
    "",
    "Extension modules: numpy._core._multiarray_umath, torch._C, torch._C._dynamo.autograd_compiler (total: 21)",
)


def bad_batch(rank: int = 1) -> tuple[str, ...]:
    return traceback(
        rank, frames=(*USER, (SCRIPT, 117, "load_batch")), error="RuntimeError: bad batch 4711 in /data/s1"
    )


def victim(rank: int = 0, *, error: str = CLOSED, at_s: float = 10.0, **more: Any) -> RankEvidence:
    return dead(rank, 1, at_s=at_s, stderr_tail=traceback(rank, frames=IN_LIBRARY, error=error), **more)


def dead(rank: int, exit_code: int, *, at_s: float = 10.0, **more: Any) -> RankEvidence:
    given = {"node": "n0", "pid": 4000 + rank, "exit_mono_ns": round(at_s * 1e9), **more}
    return RankEvidence(rank=rank, exit_code=exit_code, **given)


def alive(rank: int, stack: tuple[Frame, ...] = (), **more: Any) -> RankEvidence:
    stacks = (stack, stack) if stack else ()
    given = {"node": "n0", "pid": 4000 + rank, "proc_state": "S", "cpu_delta_s": 0.0, **more}
    return RankEvidence(rank=rank, stacks=stacks, **given)


def evidence(*ranks: RankEvidence, trigger: str = "exit", **more: Any) -> Evidence:
    return Evidence(incident="a0001-i01", trigger=trigger, ranks=ranks, **more)  # type: ignore[arg-type]
