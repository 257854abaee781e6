"""What Slurm tells a job step about its hosts; empty outside of Slurm."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Final

_PEERS: Final = 2
"""Enough to find the way to the others: each costs a look-up of its name, and all hosts of a job share a network."""
_WORDS: Final = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")
_BRACKETS: Final = re.compile(r"([^\[]*)\[([^\]]*)\](.*)")


def slurm_node(environ: Mapping[str, str] | None = None) -> str:
    """Slurm's name for this host; empty outside of a job."""
    source: Mapping[str, str] = os.environ if environ is None else environ
    return source.get("SLURMD_NODENAME", "") if source.get("SLURM_JOB_ID") else ""


def slurm_conf(environ: Mapping[str, str] | None = None) -> str:
    """Where Slurm's configuration lies; empty for its default."""
    return (os.environ if environ is None else environ).get("SLURM_CONF", "")


def slurm_peers(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Some hosts that reach this one over the job's network: others of this step, then the one it was launched from."""
    source: Mapping[str, str] = os.environ if environ is None else environ
    own = source.get("SLURMD_NODENAME", "") or os.uname().nodename
    nodes = source.get("SLURM_STEP_NODELIST") or source.get("SLURM_JOB_NODELIST", "")
    others = (name for name in expand_hosts(nodes) if name != own)
    launcher = source.get("SLURM_LAUNCH_NODE_IPADDR", "")
    return (*islice(others, _PEERS), *([launcher] if launcher else []))


def expand_hosts(text: str) -> Iterator[str]:
    """Slurm's short form, one name after the other: ``n[1-2,07],login`` is n1, n2, n07, login."""
    for word in _WORDS.findall(text):
        found = _BRACKETS.fullmatch(word.strip())
        if found is None:
            yield word.strip()
            continue
        head, ranges, tail = found.groups()
        for number in _numbers(ranges):
            yield from expand_hosts(f"{head}{number}{tail}")


def _numbers(ranges: str) -> Iterator[str]:
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and last.isdigit():
            yield from (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))
        else:
            yield first
