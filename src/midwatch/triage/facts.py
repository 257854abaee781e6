"""What is known of a run beside its numbers: the planned schedule, where it was resumed, how it scales its loss."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from midwatch.config import GuardsConfig, ScheduleConfig
from midwatch.core import UNREADABLE, TriageError

MAX_BYTES: Final = 1 << 20
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
        return self.loss_scaling == "dynamic"

    def guards(self) -> GuardsConfig:
        """The settings for the guards: the defaults, and the plan."""
        plan = self.schedule or ScheduleFacts()
        kind = _KINDS.get((plan.kind or "").lower(), "unknown")
        return GuardsConfig(
            schedule=ScheduleConfig(
                kind=kind,  # pyright: ignore[reportArgumentType]  # a word of the table above
                peak_lr=plan.peak_lr or 0.0,
                warmup_steps=_steps(plan.warmup_steps),
                total_steps=_steps(plan.total_steps),
                floor_ratio=min(1.0, max(0.0, plan.floor_ratio or 0.0)),
                decay_start=_steps(plan.decay_start),
            )
        )


def _steps(count: int | None) -> int:
    """A number of steps that a float can hold."""
    return min(2**53, max(0, count or 0))


def read_facts(path: Path) -> Facts:
    """Read a JSON file.

    Raises:
        TriageError: TR103 it is not there, no JSON object, or a value is of the wrong kind.
    """
    if not path.is_file():
        raise TriageError("TR103", f"{path}: no such file", path=str(path))
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise TriageError("TR103", f"{path}: larger than 1 MiB, not a file of facts", path=str(path))
    try:
        return msgspec.json.decode(data.removeprefix(b"\xef\xbb\xbf"), type=Facts, strict=False)
    except UNREADABLE as error:
        raise TriageError("TR103", f"{path}: {error}", path=str(path)) from error
