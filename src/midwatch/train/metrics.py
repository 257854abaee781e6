"""What ``run.log`` does with numbers: keep them cheap in the loop, turn them into records a few steps later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from midwatch.audit import Journal
from midwatch.checkpoint import ResumePoint, SaveHealth
from midwatch.core import SYSTEM_CLOCK

_OURS = frozenset({"step", "ts_ns", "step_s", "attempt"})
"""Fields that every record has already: a script's word for them must not move a record to another step."""


class MetricLog:
    """One attempt's metrics. Values on a device are read when records are written, not when they are logged: reading
    one makes the host wait for the device."""

    def __init__(self, journal: Journal | None, every: int) -> None:
        self._journal = journal
        self._every = every
        self._waiting: list[dict[str, Any]] = []
        self._last: dict[str, Any] = {}

    def add(self, step: int | None, step_s: float | None, values: dict[str, Any]) -> None:
        """Keep one step's values; several calls in one step make one record."""
        kept = {name: _keep(name, value) for name, value in values.items() if name not in _OURS}
        self._last.update(kept)
        if self._journal is None:
            return
        if self._waiting and self._waiting[-1]["step"] == step:
            self._waiting[-1].update(kept)
            return
        if len(self._waiting) >= self._every:
            self.flush()
        record = {"step": step, "ts_ns": SYSTEM_CLOCK.wall_ns(), **kept}
        if step_s is not None:
            record["step_s"] = round(step_s, 6)
        self._waiting.append(record)

    def annotate(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add our own numbers to a step's record, if the script logged that step; ``latest`` does not know them."""
        if self._waiting and self._waiting[-1]["step"] == step:
            self._waiting[-1].update(numbers)

    def latest(self) -> dict[str, float]:
        """The last value of every number logged so far."""
        numbers = {name: _number(value) for name, value in self._last.items()}
        return {name: float(value) for name, value in numbers.items() if isinstance(value, (int, float))}

    def flush(self) -> None:
        """Write what waits; a disk that refuses does not stop training (see ``Journal``)."""
        if self._journal is None:
            return
        for record in self._waiting:
            self._journal.append({name: _number(value) for name, value in record.items()})
        self._waiting.clear()
        self._journal.flush()

    def close(self) -> None:
        self.flush()
        if self._journal is not None:
            self._journal.close()


def _keep(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        local = value.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        if local.numel() != 1:
            raise TypeError(f"run.log({name}=...) wants one number, not a tensor of shape {tuple(value.shape)}")
        # A copy: the script may go on to change it in place.
        return local.item() if local.device.type == "cpu" else local.clone()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "item"):  # a NumPy scalar
        return value.item()
    raise TypeError(f"run.log({name}=...) wants a number or text, not a {type(value).__name__}")


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def save_numbers(step: int, health: SaveHealth, resumed: ResumePoint | None) -> dict[str, float]:
    """What the metrics journal says of saving; a step that was resumed from is safe as well."""
    safe = health.verified_step
    if safe is None and resumed is not None:
        safe = resumed.step
    numbers: dict[str, float | None] = {
        "checkpoint_stall_s": health.stall_s,
        "checkpoint_failed_in_a_row": health.failed_in_a_row,
        "checkpoint_skipped": health.skipped,
        "checkpoint_verified_age_steps": None if safe is None else step - safe,
    }
    return {name: round(value, 6) for name, value in numbers.items() if value is not None}
