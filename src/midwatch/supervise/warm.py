"""Warm restarts: the agent's side of the parked process that ranks of the next attempt are forked from.

Most of a restart is importing. The parked process has done that already; ranks forked from it are the agent's own
children, with the session, files and environment of a cold start. Where forking would not be safe, or the command is
not a Python script, the start is a cold one, and it is said why.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from midwatch.supervise.procs import ATTEMPT_VARIABLE, die_with_parent

_FLAGS_WITH_VALUE: Final = ("-W", "-X", "--check-hash-based-pycs")
_NOT_FLAGS: Final = ("-", "--help", "--version")
_NOT_LETTERS: Final = frozenset("cmihV?")
"""Of flags written together (``-um``), these need more than is understood here."""
_PREPARE_S: Final = 120.0
"""For the imports on a slow network mount; nothing waits for them."""
_FORK_S: Final = 2.0
"""For one answer: forking takes milliseconds, and a start that waits longer is better a cold one."""
_MOST_RANKS: Final = 100
_ATTEMPT_ROOM: Final = " " * 12
"""The parked process's own environment holds so much room for the number of the attempt."""
_PLACES: Final = (
    *("RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE"),
    "MIDWATCH_PULSE",
)
"""Of one rank in one attempt: the parked process has none of them, and nothing that it imports may ask for them."""


class PythonCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A command line that runs a script or a module."""

    program: str
    flags: tuple[str, ...]
    kind: str
    """``script`` or ``module``."""
    target: str
    arguments: tuple[str, ...]

    @property
    def is_safe_path(self) -> bool:
        return any(flag in ("-P", "-I") for flag in self.flags)


def parse_command(command: Sequence[str]) -> PythonCommand | None:
    """None for anything but ``python [flags] script.py ...`` and ``python [flags] -m module ...``."""
    if not command or not Path(command[0]).name.startswith("python"):
        return None
    flags: list[str] = []
    words = iter(command[1:])
    for word in words:
        if word in _NOT_FLAGS:
            return None
        if word in _FLAGS_WITH_VALUE:
            flags += [word, next(words, "")]
        elif word == "-m":
            target = next(words, "")
            return _command(command[0], flags, "module", target, words)
        elif word.startswith("-"):
            if not word.startswith(("-W", "-X", "--")) and not _NOT_LETTERS.isdisjoint(word[1:]):
                return None
            flags.append(word)
        else:
            return _command(command[0], flags, "script", word, words)
    return None


def _command(program: str, flags: list[str], kind: str, target: str, words: Any) -> PythonCommand | None:
    if not target:
        return None
    return PythonCommand(program=program, flags=tuple(flags), kind=kind, target=target, arguments=tuple(words))


class ForkedRank:
    """A rank that was not started by ``Popen``: what is used of one, for our own adopted child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        """Blocking: until the end; called once a pidfd has told of it."""
        code = self._reap(0)
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:
                self.returncode = -9  # somebody else collected it; only a sweep of killed processes does
            else:
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Parked:
    """At most one parked process, started once it is known what to import, kept from attempt to attempt.

    Args:
        command: Of the ranks.
        say: Tells people, with a level.
        spared: Pids that a teardown must not touch; ours is kept in it.
    """

    def __init__(self, command: Sequence[str], say: Callable[[str, str], None], spared: set[int]) -> None:
        self._shown = list(command)
        self._command = parse_command(command)
        self._is_told = False
        self._say = say
        self._spared = spared
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._due = 0.0
        self.is_ready = False
        self.memory_mb = 0

    @property
    def is_wanted(self) -> bool:
        """There is something to park and nothing parked yet. Says once why not, where that was never possible."""
        if self._command is None and not self._is_told:
            self._is_told = True
            self._say("restarts are cold: only `python script.py` and `python -m module` can be prepared", "info")
        return self._command is not None and self._process is None

    def park(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        """Start importing, beside training; ``look`` notices when it is done.

        Args:
            modules: In order.
            env: Of any rank of this node.
        """
        assert self._command is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        base = {name: value for name, value in env.items() if name not in _PLACES}
        base[ATTEMPT_VARIABLE] = _ATTEMPT_ROOM
        # The last argument only makes room for the ranks' own command line.
        room = "." * max(1, sum(len(word.encode()) + 1 for word in self._shown))
        program = [self._command.program, *self._command.flags, *([] if self._command.is_safe_path else ["-P"])]
        try:
            self._process = subprocess.Popen(
                [*program, str(Path(__file__).with_name("parked.py")), str(theirs.fileno()), room],
                env=base,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
                preexec_fn=die_with_parent(),
            )
        except OSError as error:
            ours.close()
            self._give_up(f"it cannot be started: {error}")
            return
        finally:
            theirs.close()
        self._spared.add(self._process.pid)
        self._channel = ours
        self._due = time.monotonic() + _PREPARE_S
        with contextlib.suppress(OSError):
            ours.send(json.dumps({"modules": list(modules), "places": _PLACES}).encode())
        ours.setblocking(False)

    def look(self) -> None:
        """Has the parked process answered, or died? Never blocks; call it now and then."""
        if self._process is None or self._channel is None:
            return
        if self._process.poll() is not None:
            self._give_up("the parked process ended")
        elif not self.is_ready:
            answer = self._receive()
            if answer is not None:
                self._take_in(answer)
            elif time.monotonic() > self._due:
                self._give_up(f"its imports took more than {_PREPARE_S:g} s")

    def _take_in(self, answer: dict[str, Any]) -> None:
        if answer["refused"]:
            self._give_up(str(answer["refused"]))
            return
        self.is_ready, self.memory_mb = True, int(answer["memory_mb"])
        what = f"{answer['modules']} modules are imported in a parked process of {self.memory_mb} MB"
        self._say(f"the next restart is warm: {what}", "info")

    def fork(self, envs: Sequence[Mapping[str, str]], files: Sequence[tuple[IO[bytes], IO[bytes]]]) -> list[ForkedRank]:
        """Fork one rank for each environment; an empty list when the start must be a cold one.

        Blocking: a few milliseconds a rank; at most 2 s, then the parked process is given up.
        """
        self.look()
        if not self.is_ready or self._channel is None or self._command is None or len(envs) > _MOST_RANKS:
            return []
        # What they share travels once: a message holds some 200 kB, and the environment of a site may be large.
        shared = dict(set(envs[0].items()).intersection(*(env.items() for env in envs)))
        request = {
            "env": shared,
            "ranks": [{name: value for name, value in env.items() if name not in shared} for env in envs],
            "shown": self._shown,
            "cwd": str(Path.cwd()),
            "kind": self._command.kind,
            "target": self._command.target,
            "arguments": list(self._command.arguments),
            "is_safe_path": self._command.is_safe_path,
        }
        channel = self._channel
        channel.settimeout(_FORK_S)
        try:
            socket.send_fds(channel, [json.dumps(request).encode()], [f.fileno() for pair in files for f in pair])
            answer = json.loads(channel.recv(1 << 16))
        except (OSError, ValueError) as error:
            self._give_up(f"it does not answer: {type(error).__name__}")
            return []
        channel.setblocking(False)
        if answer.get("refused"):
            self._give_up(str(answer["refused"]))
        pids = answer.get("pids", [])
        if len(pids) != len(envs):
            for pid in pids:
                os.kill(pid, 9)
            return []
        self.memory_mb = int(answer["memory_mb"])
        return [ForkedRank(pid) for pid in pids]

    def close(self) -> None:
        """End the parked process; its ranks do not depend on it."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._spared.discard(self._process.pid)
        self.is_ready = False

    def _receive(self) -> dict[str, Any] | None:
        assert self._channel is not None
        try:
            data = self._channel.recv(1 << 16)
            return json.loads(data) if data else None
        except (BlockingIOError, ValueError):
            return None
        except OSError:
            return None

    def _give_up(self, why: str) -> None:
        """For the rest of this launcher: what was unsafe once is so again."""
        self.close()
        self._command, self._is_told = None, True
        self._say(f"restarts are cold: {why}", "warning")
