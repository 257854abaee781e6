"""What a person does to a run's checkpoints from the command line, written into the run's own record."""

from __future__ import annotations

import os
import pwd
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from midwatch.audit import Ledger, read_run
from midwatch.checkpoint.format import read_resumes
from midwatch.cli._places import Place
from midwatch.core import NullRecorder, Recorder
from midwatch.storage import newest_attempt

LEDGER_FILE = "by-hand.jsonl"


def claims_folder(place: Place) -> Path:
    """Where the attempts' claims lie: in the run folder, else beside the checkpoints."""
    return place.run_dir if place.run_dir is not None else place.root.absolute().parent


def run_id(place: Place) -> str:
    """The run these checkpoints are pruned for; empty when the folder belongs to no run that is known."""
    info = read_run(claims_folder(place))
    return info.run if info else ""


def in_use(place: Place) -> set[str]:
    """What the newest attempt began from: while it lives it may have to go back there."""
    records = read_resumes(claims_folder(place))
    record = records.get(newest_attempt(claims_folder(place)))
    return {record.name} if record is not None and record.name and not record.run else set()


@contextmanager
def record_by_hand(place: Place) -> Generator[Recorder]:
    """The run's record for what follows; without a known run nothing is recorded.

    Raises:
        LedgerError: LG102 when another such command is at work.
    """
    run = run_id(place)
    if not run:
        yield NullRecorder()
        return
    ledger = Ledger(claims_folder(place) / "ledger" / LEDGER_FILE, run=run, node=os.uname().nodename)
    try:
        yield ledger
    finally:
        ledger.close()


def who() -> str:
    """User and host, for the record."""
    uid = os.getuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = str(uid)
    return f"{name}@{os.uname().nodename}"


def facts(name: str, step: int, **more: Any) -> dict[str, Any]:
    """What a record of an act on one checkpoint holds."""
    return {"step": step, "name": name, "by": who(), **more}
