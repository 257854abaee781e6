"""What becomes of the numbers of a step: kept cheap in the loop, and turned into records a few steps later."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from midwatch.audit import Journal
from midwatch.checkpoint import ResumePoint, SaveHealth
from midwatch.core import SYSTEM_CLOCK
from midwatch.train.gauges import spelled_out

_log = logging.getLogger(__name__)

_OURS = frozenset({"step", "ts_ns", "step_s", "attempt"})
"""Fields that every record has already: a script's word for them must not move a record to another step."""
_PLAIN: Final = frozenset((float, int, str, bool))


class MetricLog:
    """One attempt's metrics. Values on a device are read when records are written, not when they are logged: reading
    one makes the host wait for the device."""

    def __init__(self, journal: Journal | None, every: int) -> None:
        self._journal = journal
        self._every = every
        self._waiting: list[dict[str, Any]] = []
        self._last: dict[str, Any] = {}
        self._is_closed = False
        self._newest = -1
        """The highest step that has a record, written or not."""
        self.late_steps = 0
        """So many steps later numbers of a step may still come (``note``): its record waits for them."""

    def begin(self) -> None:
        """A loop begins. What an earlier one has logged comes before the line that says so, and may be taken back."""
        if self._newest >= 0:
            self.flush()
        self._newest = -1

    def add(self, step: int | None, values: Mapping[str, Any], *, gives_way: bool = False) -> dict[str, Any]:
        """Keep one step's values; several calls in one step make one record.

        Args:
            step: The current one; None before the first.
            gives_way: To what was added of this step by the same name.

        Returns:
            The values as they are kept.

        Raises:
            TypeError: For anything but numbers, one-element tensors and text.
        """
        if self._is_closed and self._journal is not None:
            self._is_closed = False  # said once
            _log.warning("numbers are logged after the run was closed, and not kept: %s", ", ".join(values))
        values = spelled_out(values)
        kept = {
            name: value if type(value) in _PLAIN else _keep(name, value)
            for name, value in values.items()
            if name not in _OURS
        }
        self._last.update(kept)
        if self._journal is not None:
            record = self._record(step)
            record.update({**kept, **record} if gives_way else kept)
        return kept

    def note(self, step: int, numbers: Mapping[str, Any], *, is_better: bool = False) -> None:
        """Add numbers of midwatch's own to a step, also to one that is over; ``latest`` does not know them.

        Args:
            step: With a record or without.
            numbers: Values, or tensors that are midwatch's own.
            is_better: They replace what the script logged by the same name.
        """
        if self._journal is None or not numbers:
            return
        record = self._waiting_record(step)
        if record is None and step <= self._newest:
            # Written already: what comes now is a record of its own, and readers join them.
            self._write({"step": step, "ts_ns": SYSTEM_CLOCK.wall_ns(), **numbers})
            return
        record = record or self._record(step)
        for name, value in numbers.items():
            if is_better or record.get(name) is None:
                record[name] = value

    def annotate(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Add numbers to a step's record, if it has one."""
        record = self._waiting_record(step)
        if record is not None:
            record.update(numbers)

    def latest(self) -> dict[str, float]:
        """The last value of every number logged so far."""
        numbers = ((name, _number(value)) for name, value in self._last.items())
        return {name: _as_float(value) for name, value in numbers if isinstance(value, (int, float))}

    def flush(self) -> None:
        """Write what waits; a disk that refuses does not stop training (see ``Journal``)."""
        self._write_waiting(len(self._waiting))

    def close(self) -> None:
        self._is_closed = True
        self.flush()
        if self._journal is not None:
            self._journal.close()

    def _waiting_record(self, step: int | None) -> dict[str, Any] | None:
        return next((record for record in reversed(self._waiting) if record["step"] == step), None)

    def _record(self, step: int | None) -> dict[str, Any]:
        """The newest one, or one more behind it."""
        if self._waiting and self._waiting[-1]["step"] == step:
            return self._waiting[-1]
        if len(self._waiting) >= self._every + self.late_steps:
            self._write_waiting(self._every)
        record: dict[str, Any] = {"step": step, "ts_ns": SYSTEM_CLOCK.wall_ns()}
        self._waiting.append(record)
        self._newest = self._newest if step is None else max(self._newest, step)
        return record

    def _write_waiting(self, count: int) -> None:
        if self._journal is None:
            return
        for record in self._waiting[:count]:
            self._write(record)
        del self._waiting[:count]
        self._journal.flush()

    def _write(self, record: Mapping[str, Any]) -> None:
        assert self._journal is not None
        self._journal.append({name: _number(value) for name, value in record.items()})


def _keep(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        local = value.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        if local.numel() != 1:
            raise TypeError(f"run.log({name}=...) wants one number, not a tensor of shape {tuple(value.shape)}")
        if local.is_complex() or local.is_meta:
            raise TypeError(f"run.log({name}=...) wants a number, not a tensor of {local.dtype} on {local.device}")
        # A copy: the script may go on to change it in place.
        return local.item() if local.device.type == "cpu" else local.clone()
    if value is None or isinstance(value, (int, float, str)):
        return value
    try:
        item = value.item()  # a NumPy scalar
        return item if isinstance(item, (int, float, str)) else float(item)
    except (AttributeError, TypeError, ValueError) as error:
        raise TypeError(f"run.log({name}=...) wants a number or text, not a {type(value).__name__}") from error


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf  # an integer beyond what a float holds


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
