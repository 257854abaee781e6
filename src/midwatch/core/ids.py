"""Names of runs, attempts and checkpoints, and how they are spelled on disk."""

from __future__ import annotations

import re
import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple


def new_run_id() -> str:
    """A fresh run id such as ``r20261129-7f3a9c12``: sortable by day, unique by 32 random bits."""
    return f"r{datetime.now(UTC):%Y%m%d}-{secrets.token_hex(4)}"


def boot_id() -> str:
    """Of the running kernel: equal in two places if and only if they share one boot of one machine.

    Raises:
        OSError: This kernel does not tell.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def attempt_name(attempt: int) -> str:
    """``a0003`` for attempt 3. Attempts count from 1."""
    return f"a{attempt:04d}"


class CheckpointName(NamedTuple):
    """Which step, written by which attempt; two attempts may both write step 500 and must not collide."""

    step: int
    attempt: int

    def __str__(self) -> str:
        return f"step-{self.step:08d}-{attempt_name(self.attempt)}"


_NAME = re.compile(r"step-(\d{8,})-a(\d{4,})")


def parse_checkpoint_name(name: str) -> CheckpointName | None:
    """The parsed folder name, or None for a folder that is not a committed checkpoint of ours."""
    match = _NAME.fullmatch(name)
    return CheckpointName(int(match[1]), int(match[2])) if match else None
