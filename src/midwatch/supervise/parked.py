"""A process that has imported what the script imports, and from which ranks are forked in milliseconds.

Run as a file by the script's own interpreter, with the standard library alone, so that it works where midwatch is not
installed. It talks to the agent over a socket: first the modules to import, then one request for each start of ranks.

Forking is safe only while nothing but this one thread exists and no device was opened; both are looked at before each
fork, and refused otherwise. The script itself is never imported here: each rank reads and runs it anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
import types
from typing import Any

_MESSAGE_BYTES = 1 << 20
_FDS = 250
"""The kernel passes at most 253 descriptors in one message."""
_TRIAL_S = 1.0
_HEAD_START_S = 0.03
"""Rank 0 opens the store that the others connect to: one that finds nobody there tries again half a second later."""
_REPARENT_S = 5.0
"""For the in-between process to end, which takes a millisecond."""
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/infiniband")
_PR_SET_PDEATHSIG = 1
# Looked up before any fork: between fork and the script nothing should have to load libraries.
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def main() -> None:
    """Serve until the agent closes its end."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    agent = os.getppid()
    reply(channel, prepare(json.loads(channel.recv(_MESSAGE_BYTES))))
    while True:
        data, fds, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, _FDS)
        if not data:
            os._exit(0)
        request = json.loads(data)
        why = unsafe()
        if why:
            reply(channel, {"refused": why})
            continue
        rank = fork_all(channel, request, fds)
        if rank is not None:
            become(rank, request, fds, channel, agent)
            return


def reply(channel: socket.socket, answer: dict[str, Any]) -> None:
    channel.send(json.dumps(answer).encode())


def prepare(task: dict[str, Any]) -> dict[str, Any]:
    """Import; what cannot be imported alone is left to the script."""
    failed = 0
    asked = watch_for(frozenset(task.get("places", ())))
    for name in task["modules"]:
        if name in sys.modules:
            continue
        try:
            importlib.import_module(name)
        except BaseException:  # noqa: BLE001 - somebody else's module may raise anything, SystemExit included
            failed += 1
    gc.collect()
    gc.freeze()  # the collector must not touch, and so copy, what all ranks share
    if thread_count() > 1:
        stop_threads_that_can()
    return {
        "refused": unsafe() or misled(asked),
        "modules": len(sys.modules),
        "failed": failed,
        "memory_mb": memory_mb(),
    }


def unsafe() -> str:
    """Why a fork of this process would not be safe; empty when it is."""
    threads = thread_count()
    if threads > 1:
        return f"an import started {threads - 1} thread(s)"
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith(_DEVICES):
                return f"an import opened {target}"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "an import initialized the GPU"
    return ""


def watch_for(places: frozenset[str]) -> set[str]:
    """Notes from here on which of these variables anybody asks for; they are not set here.

    A module that takes its rank from the environment when it is imported would believe in every rank to be the first.
    """
    asked: set[str] = set()
    plain: Any = type(os.environ)

    class Watched(plain):
        def __getitem__(self, key: str) -> str:
            if key in places:
                asked.add(key)
            value: str = super().__getitem__(key)
            return value

    os.environ.__class__ = Watched
    return asked


def misled(asked: set[str]) -> str:
    """Why ranks must not share what was imported; empty when they may."""
    environment: Any = os.environ
    environment.__class__ = type(environment).__base__
    return f"an import asks for {', '.join(sorted(asked))}, which is another one for each rank" if asked else ""


def thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


def stop_threads_that_can() -> None:
    """Libraries that are made for it (OpenBLAS) end their threads at a fork; this one's child ends at once."""
    trial = os.fork()
    if trial == 0:
        os._exit(0)
    end = time.monotonic() + _TRIAL_S
    while os.waitpid(trial, os.WNOHANG)[0] == 0:
        if time.monotonic() > end:
            os.kill(trial, signal.SIGKILL)
            os.waitpid(trial, 0)
            return
        time.sleep(0.001)


def memory_mb() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def fork_all(channel: socket.socket, request: dict[str, Any], fds: list[int]) -> int | None:
    """Fork every rank from a process in between, whose end makes the agent (a subreaper) their parent.

    Returns:
        In a rank its place in the request; None in this process, which stays parked.
    """
    read, write = os.pipe()
    between = os.fork()
    if between == 0:
        pids: list[int] = []
        for number in range(len(request["ranks"])):
            pid = os.fork()
            if pid == 0:
                os.close(read)
                os.close(write)
                return number
            pids.append(pid)
        os.write(write, json.dumps(pids).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        pids_text = file.read()
    os.waitpid(between, 0)
    for fd in fds:
        os.close(fd)
    reply(channel, {"pids": json.loads(pids_text or b"[]"), "memory_mb": memory_mb()})
    return None


def become(number: int, request: dict[str, Any], fds: list[int], channel: socket.socket, agent: int) -> None:
    """Turn this copy into the rank: its own session, files, environment and death, then the script."""
    end = time.monotonic() + _REPARENT_S
    while os.getppid() != agent:
        if time.monotonic() > end:
            os._exit(1)
        time.sleep(0.0002)
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != agent:
        os._exit(1)
    os.setsid()
    out, err = fds[2 * number], fds[2 * number + 1]
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, place in ((nothing, 0), (out, 1), (err, 2)):
        os.dup2(fd, place)
    for fd in {nothing, channel.detach(), *fds} - {0, 1, 2}:
        os.close(fd)
    env: dict[str, str] = {**request["env"], **request["ranks"][number]}
    show_as(request["shown"], env)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(request["cwd"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.unfreeze()
    if env.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy.random" in sys.modules:
        numpy.random.seed()  # its generator was seeded before the fork: ranks would draw the same numbers
    if env["RANK"] != "0":
        time.sleep(_HEAD_START_S)
    is_safe_path = request["is_safe_path"] or bool(env.get("PYTHONSAFEPATH"))
    run(request["kind"], request["target"], request["arguments"], is_safe_path=is_safe_path)


def run(kind: str, target: str, arguments: list[str], *, is_safe_path: bool) -> None:
    """What the interpreter would do with this command line; exceptions end the process as they would there."""
    sys.argv = [target, *arguments]
    try:
        if kind == "module":
            if not is_safe_path:
                sys.path.insert(0, os.getcwd())
            sys.argv[0] = "-m"
            runpy.run_module(target, run_name="__main__", alter_sys=True)
            return
        if not is_safe_path:
            sys.path.insert(0, os.path.dirname(os.path.realpath(target)))
        with open(target, "rb") as file:
            code = compile(file.read(), target, "exec", dont_inherit=True)
        module = types.ModuleType("__main__")
        module.__file__ = target
        module.__dict__.update(__builtins__=__builtins__, __cached__=None, __package__=None)
        sys.modules["__main__"] = module
        exec(code, module.__dict__)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 - whatever the script raised is shown as the interpreter shows it
        trace = error.__traceback__ and error.__traceback__.tb_next  # without this frame of ours
        error = error.with_traceback(trace)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error, trace)
        raise SystemExit(1) from None


def show_as(command: list[str], env: dict[str, str]) -> None:
    """Let ``ps`` and ``/proc`` show the rank's command line, and our sweep find its attempt in ``/proc/PID/environ``.

    Both are read from this process's own memory, where the parked process left room; what does not fit is cut.
    """
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    arg_start, arg_end, env_start, env_end = (int(field) for field in fields[45:49])
    if not 0 < arg_start < arg_end <= env_start <= env_end:
        return
    room = arg_end - arg_start
    text = b"\0".join(word.encode(errors="surrogateescape") for word in command)[: room - 1]
    ctypes.memmove(arg_start, text.ljust(room, b"\0"), room)
    block = ctypes.string_at(env_start, env_end - env_start)
    name = b"MIDWATCH_ATTEMPT="
    at = block.find(b"\0" + name)
    if at >= 0:
        start = at + 1 + len(name)
        size = block.index(b"\0", start) - start
        value = env["MIDWATCH_ATTEMPT"].encode()[:size]
        ctypes.memmove(env_start + start, value.ljust(size, b" "), size)


if __name__ == "__main__":
    main()
