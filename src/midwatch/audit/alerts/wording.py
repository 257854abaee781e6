"""What the rules remember, whom they speak of, and the words they use."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from midwatch.audit.alerts.alert import clean
from midwatch.audit.line import LedgerLine
from midwatch.config import AlertKind
from midwatch.core import printable

DONE: Final = {
    "restart": "All ranks are started again from the newest verified checkpoint.",
    "stop": "The run ends here: starting it again would not help before something is changed.",
    "hold": "The run is held: nothing is started before things look well again, or somebody says so.",
    "requeue": "The run ends here, to be queued again.",
    "none": "Nothing was done about it.",
}
"""By the action of a verdict."""

OVER: Final[Mapping[AlertKind, str]] = {
    "breaker": "the circuit breaker closed",
    "anomaly": "numbers are within their bands again",
    "incident": "a fault is over",
    "held": "the run is no longer held",
    "ended": "the run goes on",
    "unverified": "a checkpoint was verified again",
    "push": "metrics are delivered again",
}

GRADES: Final = ("G0", "G1", "G2", "G3", "G4", "G5")


class Memory(msgspec.Struct):
    """What must be known to read the next line; kept from process to process."""

    on: dict[str, str] = {}
    """What began and has not ended: its name, and the key of its alert."""
    is_training: bool = False
    safe_ns: int = 0
    """When the newest checkpoint was verified, or training began."""
    safe_step: int | None = None


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Whom the alerts are about."""

    run_dir: str
    run: str = ""
    name: str = ""

    def command(self, verb: str, *more: str) -> str:
        """A command about this run, to be copied into a shell."""
        return shlex.join(["midwatch", *verb.split(" "), printable(self.run_dir), *map(printable, more)])


def name_of(line: LedgerLine) -> str:
    """The same for a line, whoever reads it."""
    return f"{line.writer}:{line.seq}"


def kind_of(what: str) -> Any:
    """Of what is on: ``incident`` of ``incident/i7``."""
    return what.partition("/")[0]


def text_of(line: LedgerLine, name: str) -> str:
    """A fact of a line, fit to be shown."""
    return clean(line.data.get(name, ""))


def whole(value: object) -> int:
    """A number, 0 for anything else."""
    return value if isinstance(value, int) else 0


def culprit_of(line: LedgerLine) -> dict[str, Any]:
    """Whom a verdict is laid to."""
    rank = line.data.get("root_rank")
    return {"rank": rank if isinstance(rank, int) else None, "node": text_of(line, "root_node")}
