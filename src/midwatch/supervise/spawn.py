"""From a command line to rank processes: what is run, with which environment, with which ties to the agent."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import IO, Final

import msgspec

from midwatch.config import OutsidePlace
from midwatch.core import SuperviseError, attempt_name
from midwatch.supervise.flight import switch_on
from midwatch.supervise.procs import ATTEMPT_VARIABLE, TAG_VARIABLE, die_with_parent
from midwatch.supervise.wire import StartRanks

_PYTHONS: Final = ("python", "python3")
_VALUE_FLAGS: Final = ("-W", "-X", "--check-hash-based-pycs")
"""Interpreter flags followed by a value."""


class NodeSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for every attempt of one launcher invocation on one node."""

    command: tuple[str, ...]
    """Resolved: an absolute program and its arguments."""
    node: str
    nproc: int
    tag: str
    run: str
    run_dir: str
    config_path: str
    log_limit_mb: int = 256
    """Of each output file; 0: no limit."""
    probes: tuple[str, ...] = ()
    """The site's own, run beside ours."""
    checkpoint_dirs: tuple[str, ...] = ()
    """Outside of the run folder."""
    place: OutsidePlace | None = None
    """Another launcher started us for this one rank; None: we start the ranks."""
    stdin_fd: int = -1
    """What that launcher gave its rank to read from; -1: nothing."""


def resolve_command(command: Sequence[str]) -> tuple[str, ...]:
    """What to execute for what the user typed: a script, ``-m module``, ``python ...`` or any program.

    Raises:
        SuperviseError: SV101 it cannot be started; nothing has been started then.
    """
    if not command:
        raise SuperviseError("SV101", "no command given", hint="Put it after two dashes: midwatch run -- train.py")
    first, rest = command[0], list(command[1:])
    if first == "-m":
        _check_module(rest[0] if rest else "")
        return (sys.executable, "-u", *command)
    if first.endswith(".py"):
        _check_script(first)
        return (sys.executable, "-u", *command)
    program = shutil.which(first)
    if program is None and first in _PYTHONS:
        program = sys.executable
    if program is None:
        raise SuperviseError("SV101", f"command not found or not executable: {first}", command=list(command))
    if Path(first).name in _PYTHONS:
        _check_python_arguments(rest)
    # Absolute without following links: a virtual environment's python is a link and must be called by its own name.
    return (str(Path(program).absolute()), *rest)


def _check_script(script: str) -> None:
    if not Path(script).is_file():
        raise SuperviseError("SV101", f"script not found: {script} (looked in {Path.cwd()})", script=script)


def _check_module(module: str) -> None:
    top = module.partition(".")[0]
    if not top or PathFinder.find_spec(top, [str(Path.cwd()), *sys.path]) is None:
        raise SuperviseError("SV101", f"module not found: {module or '(none given)'}", module=module)


def _check_python_arguments(arguments: Sequence[str]) -> None:
    words = iter(arguments)
    for word in words:
        if word in _VALUE_FLAGS:
            next(words, None)
        elif word == "-m" or word == "-c" or word == "-":
            return
        elif not word.startswith("-"):
            _check_script(word)
            return


def rank_environment(
    base: Mapping[str, str], setup: NodeSetup, start: StartRanks, local_rank: int, paths: Mapping[str, str]
) -> dict[str, str]:
    """The whole environment of one rank: torchrun's names first, then ours.

    Under another launcher everything that it has set stays as it is, and only names that it does not use are added.

    Args:
        base: The agent's own environment.
        setup: Of this node.
        start: Of this attempt.
        local_rank: Which one.
        paths: ``pulse`` and ``error``, the rank's files.
    """
    env = dict(base)
    env.update(_outside_place(setup.place) if setup.place else _torchrun_names(setup, start, local_rank, paths))
    env.update(
        MIDWATCH_RUN_DIR=setup.run_dir,
        MIDWATCH_RUN=setup.run,
        MIDWATCH_NODE=setup.node,
        MIDWATCH_PULSE=paths["pulse"],
        MIDWATCH_GATE="1",
    )
    env[TAG_VARIABLE] = setup.tag
    env[ATTEMPT_VARIABLE] = str(start.attempt)
    if setup.config_path:
        env["MIDWATCH_CONFIG"] = setup.config_path
    if setup.place is None and len(start.ranks) > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("PYTHONUNBUFFERED", "1")
    env.setdefault("PYTHONFAULTHANDLER", "1")
    # The pipes next to the slots, where the sweep finds them; the lists next to the logs, where people do.
    dumps = Path(paths["error"]).with_name(f"{setup.node}.flight-")
    switch_on(env, dump_stem=str(dumps), pipe_stem=f"{paths['pulse']}-flight-")
    return env


def _outside_place(place: OutsidePlace) -> dict[str, str]:
    """For the five lines, where the launcher has other words for it, or none."""
    names = {
        "MIDWATCH_RANK": place.rank,
        "MIDWATCH_WORLD_SIZE": place.world_size,
        "MIDWATCH_LOCAL_RANK": place.local_rank,
        "MIDWATCH_SLOT": 0,
    }
    if place.local_world_size:
        names["MIDWATCH_LOCAL_WORLD_SIZE"] = place.local_world_size
    return {name: str(value) for name, value in names.items()}


def _torchrun_names(setup: NodeSetup, start: StartRanks, local_rank: int, paths: Mapping[str, str]) -> dict[str, str]:
    rank, nproc = start.ranks[local_rank], len(start.ranks)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(start.world_size),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": str(start.group_rank),
        "GROUP_WORLD_SIZE": str(start.group_world_size),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(start.world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": start.master_addr,
        "MASTER_PORT": str(start.master_port),
        "TORCHELASTIC_RUN_ID": setup.run,
        "TORCHELASTIC_RESTART_COUNT": str(start.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(start.max_restarts),
        "TORCHELASTIC_ERROR_FILE": paths["error"],
        # The agent's own store is what makes torchrun's restarts meet the last attempt's keys: rank 0 hosts a new one.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def log_paths(run_dir: Path, attempt: int, node: str, rank: int) -> tuple[Path, Path, Path]:
    """Where a rank's stdout, stderr and torchelastic error file go."""
    folder = run_dir / "logs" / attempt_name(attempt)
    stem = f"{node}.r{rank:05d}"
    return folder / f"{stem}.out", folder / f"{stem}.err", folder / f"{stem}.error.json"


def start_rank(
    command: Sequence[str], env: Mapping[str, str], out: Path, err: Path, stdin_fd: int = -1
) -> subprocess.Popen[bytes]:
    """Start one rank: leader of its own session, killed with the agent, writing to its own files without us.

    Raises:
        SuperviseError: SV101 the program is gone or cannot be executed any more.
    """
    with open_output(out) as stdout, open_output(err) as stderr:
        try:
            return subprocess.Popen(
                list(command),
                env=dict(env),
                stdin=subprocess.DEVNULL if stdin_fd < 0 else stdin_fd,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                # Safe: the agent has a single thread.
                preexec_fn=die_with_parent(),
            )
        except OSError as error:
            raise SuperviseError("SV101", f"cannot start {command[0]}: {error.strerror}") from error


def open_output(path: Path) -> IO[bytes]:
    """A rank's own file, to be written without us; nothing where none can be made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab", buffering=0)
    except OSError:
        # A full or read-only run folder costs the output, not the training; the agent says so.
        return Path(os.devnull).open("ab", buffering=0)


def keep_stdin() -> int:
    """A descriptor of our own for what another launcher gave us to read from; -1 where there is none."""
    try:
        return os.dup(0)
    except OSError:
        return -1
