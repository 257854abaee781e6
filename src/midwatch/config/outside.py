"""This process's place in a job that another launcher started, as that launcher says it in the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from midwatch.core import SuperviseError

_TASKS: Final = re.compile(r"(\d+)(?:\(x(\d+)\))?")
"""Slurm's short form of tasks per node: ``8(x2),4`` is 8, 8, 4."""


class OutsidePlace(msgspec.Struct, frozen=True, kw_only=True):
    """Which rank of which world this process is to be."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int = 0
    """0: the launcher does not say."""

    @property
    def is_one_host(self) -> bool:
        """All ranks are known to be on this machine."""
        return self.local_world_size == self.world_size


class _Names(NamedTuple):
    """How one kind of launcher calls the three things that must be known."""

    rank: str
    world_size: str
    local_rank: str


_KINDS: Final = (
    _Names("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    _Names("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
"""torchrun and everything that speaks like it (Lightning, Ray, Accelerate), then srun."""


def read_outside_place(environ: Mapping[str, str] | None = None) -> OutsidePlace:
    """What the launcher around us says.

    Raises:
        SuperviseError: SV117 it says nothing, not enough, or what cannot be.
    """
    source: Mapping[str, str] = os.environ if environ is None else environ
    for names in _KINDS:
        if all(source.get(name, "").strip() for name in names):
            return _checked(source, names)
    missing = "; or ".join(_missing(source, names) for names in _KINDS)
    raise SuperviseError("SV117", f"the environment does not say which rank this is: missing {missing}")


def _missing(source: Mapping[str, str], names: _Names) -> str:
    return ", ".join(name for name in names if not source.get(name, "").strip())


def _checked(source: Mapping[str, str], names: _Names) -> OutsidePlace:
    rank, world_size, local_rank = (_number(source, name) for name in names)
    for name, value, limit in ((names.rank, rank, world_size), (names.local_rank, local_rank, world_size)):
        if value >= limit:
            raise SuperviseError("SV117", f"environment: {name}={value} but {names.world_size}={world_size}")
    local_world_size = _local_world_size(source, names)
    return OutsidePlace(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        # A count that does not even hold this rank is about something else.
        local_world_size=local_world_size if local_rank < local_world_size <= world_size else 0,
    )


def _number(source: Mapping[str, str], name: str) -> int:
    text = source[name].strip()
    if not (text.isascii() and text.isdigit()):
        raise SuperviseError("SV117", f"environment: {name}={text!r}: must be a whole number, 0 or more")
    return int(text)


def _local_world_size(source: Mapping[str, str], names: _Names) -> int:
    if names.rank == "SLURM_PROCID":
        per_node = source.get("SLURM_STEP_TASKS_PER_NODE") or source.get("SLURM_TASKS_PER_NODE", "")
        number = source.get("SLURM_NODEID", "")
        return tasks_on(per_node, int(number)) if number.isdecimal() else 0
    text = source.get("LOCAL_WORLD_SIZE", "").strip()
    return int(text) if text.isdecimal() else 0


def tasks_on(per_node: str, number: int) -> int:
    """How many tasks the node of that number has; 0 where the text does not tell."""
    for word in per_node.split(","):
        found = _TASKS.fullmatch(word.strip())
        if found is None:
            return 0
        number -= int(found[2] or 1)
        if number < 0:
            return int(found[1])
    return 0
