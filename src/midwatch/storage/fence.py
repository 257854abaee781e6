"""Fencing: the attempt number is the epoch, and the newest claim on disk holds the run.

A rank that was cut off (frozen, partitioned) may wake after its run has been taken over. Two rules make it harmless:

1. It looks before it leaps: ``Fence.check`` before each commit, move of ``latest``, prune and upload refuses when a
   newer claim exists.
2. It may still leap in the moment between look and leap. So each claim lists the checkpoints that were committed when
   it was made; a checkpoint of an older attempt that a newer claim does not list was committed too late, and readers
   pass over it.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from midwatch.core import SYSTEM_CLOCK, UNREADABLE, FencedError, attempt_name, parse_checkpoint_name
from midwatch.storage import ops
from midwatch.storage.atomic import canonical_json, create_exclusive
from midwatch.storage.reading import read_regular

_CLAIM = re.compile(r"a(\d{4,})\.json")

MAX_CLAIM_RACES = 1000
"""Claims lost to others in a row before giving up; real launches race with a handful."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Who made a claim."""

    host: str
    pid: int


class AttemptClaim(msgspec.Struct, frozen=True, kw_only=True):
    """``attempts/a0001.json``: the run belongs to this attempt until a newer claim appears."""

    schema: int = 1
    attempt: int
    run: str
    claimed_ns: int
    holder: Holder
    inventory: tuple[str, ...] = ()


def _folder(run_dir: Path) -> Path:
    return run_dir / "attempts"


def _attempts(run_dir: Path) -> list[int]:
    try:
        names = [path.name for path in _folder(run_dir).iterdir()]
    except FileNotFoundError:
        return []
    return [int(match[1]) for name in names if (match := _CLAIM.fullmatch(name))]


def newest_attempt(run_dir: Path) -> int:
    """The attempt that holds the run; 0 when none was ever claimed."""
    return max(_attempts(run_dir), default=0)


def claim_attempt(run_dir: Path, *, run: str, inventory: Sequence[str], attempt: int | None = None) -> int:
    """Take the run over: every older attempt is fenced off when this returns.

    Args:
        inventory: Names of all checkpoints committed at this moment (``checkpoint.format.committed_names``).
        attempt: Claim exactly this number; None takes the next free one.

    Raises:
        FencedError: CK401 when the given number is taken or a newer claim exists.

    Durability: survives power loss when it returns.
    """
    ops.make_dirs(_folder(run_dir))
    for _ in range(MAX_CLAIM_RACES):
        newest = newest_attempt(run_dir)
        number = newest + 1 if attempt is None else attempt
        if number <= newest:
            break
        if _write_claim(run_dir, run, number, inventory):
            return number
        if attempt is not None:
            break
    raise FencedError("CK401", f"attempt {attempt} of {run_dir} is taken: {newest_attempt(run_dir)} is the newest")


def _write_claim(run_dir: Path, run: str, attempt: int, inventory: Sequence[str]) -> bool:
    claim = AttemptClaim(
        attempt=attempt,
        run=run,
        claimed_ns=SYSTEM_CLOCK.wall_ns(),
        holder=Holder(host=socket.gethostname(), pid=os.getpid()),
        inventory=tuple(sorted(inventory)),
    )
    path = _folder(run_dir) / f"{attempt_name(attempt)}.json"
    return create_exclusive(path, canonical_json(claim) + b"\n", mode=0o644)


def read_claims(run_dir: Path) -> list[AttemptClaim]:
    """All readable claims, oldest first; a damaged one is skipped: its number still fences."""
    claims: list[AttemptClaim] = []
    for attempt in sorted(_attempts(run_dir)):
        try:
            data = read_regular(_folder(run_dir) / f"{attempt_name(attempt)}.json")
            claims.append(msgspec.json.decode(data, type=AttemptClaim))
        except (OSError, *UNREADABLE):
            continue
    return claims


class Fence:
    """One attempt's right to write."""

    def __init__(self, run_dir: Path, attempt: int) -> None:
        self.run_dir = run_dir
        self.attempt = attempt

    def check(self) -> None:
        """Raises FencedError CK401 when a newer attempt holds the run."""
        newest = newest_attempt(self.run_dir)
        if newest > self.attempt:
            raise FencedError(
                "CK401",
                f"attempt {self.attempt} of {self.run_dir} may no longer write: attempt {newest} holds the run",
                attempt=self.attempt,
                newest=newest,
            )


def late_commits(run_dir: Path, committed: Mapping[str, str]) -> set[str]:
    """The checkpoints committed by an attempt after it had been superseded: never resume from these.

    A name of attempt ``a`` is late when some claim ``b > a`` does not list it in its inventory.

    Args:
        committed: Names, each with its run: a claim says nothing about another run's attempts.
    """
    claims = read_claims(run_dir)
    late: set[str] = set()
    for name, run in committed.items():
        parsed = parse_checkpoint_name(name)
        newer = (claim for claim in claims if parsed and claim.attempt > parsed.attempt and claim.run == run)
        if any(name not in claim.inventory for claim in newer):
            late.add(name)
    return late
