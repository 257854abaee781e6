"""What is known of a run beside its numbers: the planned schedule, where it was resumed, how it scales its loss."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from midwatch.config import GuardsConfig, ScheduleConfig
from midwatch.core import UNREADABLE, TriageError
from midwatch.storage import open_regular

MAX_BYTES: Final = 1 << 20
_MOST_STEPS: Final = 2**53
"""As many as a float can hold."""
_SCALINGS: Final = ("dynamic", "static", "off", "none")
_KINDS: Final = {
    "const": "constant",
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "wsd": "wsd",
}


class ScheduleFacts(msgspec.Struct, frozen=True, kw_only=True):
    """As in ``[guards.schedule]``; null for what is not known."""

    kind: str | None = None
    peak_lr: float | None = None
    warmup_steps: int | None = None
    total_steps: int | None = None
    floor_ratio: float | None = None
    decay_start: int | None = None

    @property
    def is_silent(self) -> bool:
        """It tells of no plan."""
        return (self.kind or "").lower() == "unknown" or self == ScheduleFacts()

    def faults(self) -> Iterator[str]:
        """What keeps the plan from being used: a value that none can be, or one that is missing."""
        kind = _KINDS.get((self.kind or "").lower())
        if self.kind is None:
            yield "schedule.kind is not told"
        elif kind is None:
            yield f'schedule.kind "{self.kind[:80]}" is none of {", ".join(dict.fromkeys(_KINDS.values()))}'
        if self.peak_lr is None:
            yield "schedule.peak_lr is not told"
        elif not 0 < self.peak_lr < math.inf:
            yield f"schedule.peak_lr {self.peak_lr} is not above 0"
        if self.floor_ratio is not None and not 0 <= self.floor_ratio <= 1:
            yield f"schedule.floor_ratio {self.floor_ratio} is not between 0 and 1"
        counts = {name: getattr(self, name) for name in ("warmup_steps", "total_steps", "decay_start")}
        below = [f"schedule.{name} {count} is below 0" for name, count in counts.items() if (count or 0) < 0]
        yield from below
        if kind not in (None, "constant") and not below:
            yield from self._of_its_end(("warmup_steps", "decay_start") if kind == "wsd" else ("warmup_steps",))

    def _of_its_end(self, begins: tuple[str, ...]) -> Iterator[str]:
        if self.total_steps is None:
            yield "schedule.total_steps is not told"
            return
        for name in begins:
            begin: int = getattr(self, name) or 0
            if self.total_steps <= begin:
                yield f"schedule.total_steps {self.total_steps} is not beyond schedule.{name} {begin}"


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The file given with ``--facts``. Keys that are not known here are passed over."""

    schedule: ScheduleFacts | None = None
    resumes: tuple[int, ...] | None = None
    """The first step after each resume."""
    world_size: int | None = None
    max_grad_norm: float | None = None
    loss_scaling: str | None = None
    precision: str | None = None

    @property
    def is_scaling_dynamic(self) -> bool:
        return (self.loss_scaling or "").lower() == "dynamic"

    def remarks(self) -> list[str]:
        """What the file says and nobody can use, so that a slip of the pen turns no check off unsaid."""
        faults = "; ".join(self._faults())
        said = [f"the learning rate is held against no plan, for of the facts {faults}"] if faults else []
        if self.loss_scaling is not None and self.loss_scaling.lower() not in _SCALINGS:
            said.append(f'of the facts loss_scaling "{self.loss_scaling[:80]}" is none of {", ".join(_SCALINGS)}')
        return said

    def _faults(self) -> list[str]:
        return [] if self.schedule is None or self.schedule.is_silent else list(self.schedule.faults())

    def guards(self) -> GuardsConfig:
        """The settings for the guards: the defaults, and the plan unless it has a fault."""
        plan = self.schedule or ScheduleFacts()
        kind = "unknown" if self._faults() else _KINDS.get((plan.kind or "").lower(), "unknown")
        return GuardsConfig(
            schedule=ScheduleConfig(
                kind=kind,  # pyright: ignore[reportArgumentType]  # a word of the table above
                peak_lr=max(0.0, plan.peak_lr or 0.0),
                warmup_steps=_steps(plan.warmup_steps),
                total_steps=_steps(plan.total_steps),
                floor_ratio=min(1.0, max(0.0, plan.floor_ratio or 0.0)),
                decay_start=_steps(plan.decay_start),
            )
        )


def _steps(count: int | None) -> int:
    return min(_MOST_STEPS, max(0, count or 0))


def read_facts(path: Path) -> Facts:
    """Read a JSON file.

    Raises:
        TriageError: TR103 it is not there or cannot be read, no JSON object, or a value is of the wrong kind.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise TriageError("TR103", f"{path}: {_why(path, error)}", path=str(path)) from error
    if len(data) > MAX_BYTES:
        raise TriageError("TR103", f"{path}: larger than 1 MiB, not a file of facts", path=str(path))
    try:
        return msgspec.json.decode(data.removeprefix(b"\xef\xbb\xbf"), type=Facts, strict=False)
    except UNREADABLE as error:
        raise TriageError("TR103", f"{path}: {error}", path=str(path)) from error


def _why(path: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if path.is_dir():
        return "is a folder, not a file of facts"
    return error.strerror or str(error)
