"""The mapping table, read once at import: fault class -> scope, grade, action, budget. The only list of classes."""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Literal

import msgspec

from midwatch.faults.types import Action, Grade

Scope = Literal["rank", "node", "code", "data", "network", "storage", "fleet", "none"]
Budget = Literal["code", "memory", "crash", "hang", "node", "network", "any", "none"]
"""The keys of ``restart.limits``; what only ``max_restarts`` limits; what costs nothing."""
NOBODY = 1000
"""The order of a class that is no rank's own failure."""


class FaultClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row; the columns are explained at the top of ``classes.toml``."""

    name: str
    title: str
    scope: Scope
    grade: Grade
    action: Action = "restart"
    budget: Budget = "node"
    repeat: Literal["never", "step", "any"]
    order: int = NOBODY
    stop_code: str = ""
    is_hardware: bool = msgspec.field(default=False, name="hardware")
    """Once is enough to leave the node out."""
    is_unclear: bool = msgspec.field(default=False, name="unclear")
    """Only victims were seen: worth a second look."""

    @property
    def is_counted(self) -> bool:
        """A restart after it uses up budget."""
        return self.budget != "none"

    @property
    def can_hit_fleet(self) -> bool:
        """Many nodes with it at once mean something wider than each of them (a bug in the code hits all, too)."""
        return self.scope in ("rank", "node", "network", "storage")


def _load() -> dict[str, FaultClass]:
    text = resources.files("midwatch.faults").joinpath("classes.toml").read_text(encoding="utf-8")
    rows = tomllib.loads(text)
    return {name: msgspec.convert({"name": name, **row}, FaultClass) for name, row in rows.items()}


CLASSES = _load()


def class_of(name: str) -> FaultClass:
    """The row of a class; ``unknown`` for a name of a newer version."""
    return CLASSES.get(name, CLASSES["unknown"])
