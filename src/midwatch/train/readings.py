"""One step's numbers as the guards want them: taken from what the script logs, agreed on by all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import torch
from torch.distributed.tensor import DTensor

from midwatch.checkpoint import ControlGroup
from midwatch.core import GuardError
from midwatch.guards import NUMBERS, Sample, sample_of

MEANT: Final = ("loss", "grad_norm")
"""Numbers that may differ from rank to rank; the mean over the ranks that have one counts."""
TAKEN: Final = ("lr", *(name for name in NUMBERS if name not in MEANT), "skipped")
"""Numbers that are the same on all ranks: the lowest rank's counts, so that one rank may log for all."""
NAMES: Final = (*MEANT, *TAKEN, "position", "now_us", "place")
RANKS_AT_ONCE: Final = 64
"""Up to so many ranks the numbers of each are exchanged at every step. Beyond, a sum over all is begun at one step and
looked at one step later: a ring through thousands of ranks takes longer than anybody would wait."""


class Readings:
    """What was logged since the last step, on this rank."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def add(self, values: Mapping[str, Any]) -> None:
        """Keep the numbers that the guards know, by their names in ``run.log``. Nothing is waited for."""
        for name in (*MEANT, *TAKEN):
            if name in values:
                self._values[name] = _kept(values[name])

    def take(self) -> OnTheWay:
        """What there is, on its way to the host; begins anew."""
        values, self._values = self._values, {}
        return OnTheWay(values)


class OnTheWay:
    """Numbers of one step. Those on a GPU are copied behind its work of now; ``numbers`` waits for that alone."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = {name: _begin_copy(value) for name, value in values.items()}
        devices = {value.device for value in values.values() if isinstance(value, torch.Tensor) and value.is_cuda}
        self._copied = [_marked(device) for device in devices]

    def numbers(self) -> dict[str, float]:
        """On the host."""
        for event in self._copied:
            event.synchronize()
        found = {name: _number(value) for name, value in self._values.items()}
        return {name: value for name, value in found.items() if value is not None}


class Agreed:
    """One step's numbers, the same on every rank."""

    def __init__(self, step: int, found: Mapping[str, float], by_rank: Mapping[str, dict[int, float]]) -> None:
        self.step = step
        self.now_ns = int(found.get("now_us", 0.0)) * 1000
        self.position = int(found["position"]) if "position" in found else None
        self._found = found
        self._by_rank = by_rank

    def sample(self, lr_factor: float) -> Sample:
        """For the guards; ``lr_factor``: what was decided against the plan is no departure from it."""
        known = {name: value for name, value in self._found.items() if name not in ("position", "now_us", "place")}
        if "lr" in known:
            known["lr"] /= lr_factor
        sample = sample_of(self.step, known)
        ranks = {"rank_losses": self._by_rank.get("loss"), "rank_norms": self._by_rank.get("grad_norm")}
        return msgspec.structs.replace(sample, **ranks)


class Exchange:
    """Brings the ranks' numbers together. ``agree`` is collective."""

    def __init__(self, group: ControlGroup) -> None:
        self._group = group
        self._flight: tuple[int, Any, torch.Tensor] | None = None

    @property
    def is_late(self) -> bool:
        """The numbers of a step come out one step later."""
        return self._group.world_size > RANKS_AT_ONCE

    def agree(self, step: int, mine: Mapping[str, float], now_us: int, *, is_early: bool = False) -> Agreed | None:
        """This step's numbers; for very many ranks those of the step before, None at first.

        Args:
            is_early: Before the optimizer's step, which must be so on all ranks.

        Raises:
            GuardError: GD103 on every rank: some judge before the optimizer's step and others do not. With very many
                ranks this is not seen.

        Blocking: until all ranks are there, which after a step of synchronous training they are.
        """
        numbers = {**mine, "place": 2.0 * step + (not is_early)}
        if self._group.rank == 0:
            numbers["now_us"] = float(now_us)
        if self._group.world_size == 1:
            return Agreed(step, numbers, {})
        if not self.is_late:
            return self._gathered(step, numbers)
        before = self.finish()
        box = _summands(numbers, self._group.rank)
        self._flight = (step, self._group.start_sum(box), box)
        return before

    def finish(self) -> Agreed | None:
        """What is still on its way, so that no rank leaves a collective the others are in."""
        if self._flight is None:
            return None
        step, handle, box = self._flight
        self._flight = None
        handle.wait()
        return _from_sums(step, box.tolist())

    def _gathered(self, step: int, numbers: Mapping[str, float]) -> Agreed:
        row = [float(name in numbers) for name in NAMES] + [numbers.get(name, 0.0) for name in NAMES]
        table = self._group.gather_numbers(torch.tensor(row, dtype=torch.float64)).tolist()
        _refuse_apart([line[-1] for line in table])
        found: dict[str, float] = {}
        by_rank: dict[str, dict[int, float]] = {}
        for column, name in enumerate(NAMES):
            have = {rank: line[len(NAMES) + column] for rank, line in enumerate(table) if line[column]}
            if not have:
                continue
            found[name] = _mean(list(have.values())) if name in MEANT else have[min(have)]
            if name in MEANT and len(set(have.values())) > 1:
                by_rank[name] = have
        return Agreed(step, found, by_rank)


def _refuse_apart(places: list[float]) -> None:
    if len(set(places)) > 1:
        common = max(set(places), key=places.count)
        odd = [rank for rank, place in enumerate(places) if place != common]
        raise GuardError("GD103", f"ranks {odd[:8]} are at another place of the loop than the others", ranks=odd)


def _mean(values: list[float]) -> float:
    # All alike: exactly that number, whatever their count.
    return values[0] if len(set(values)) == 1 else sum(values) / len(values)


def _summands(numbers: Mapping[str, float], rank: int) -> torch.Tensor:
    """Per name: value, whether there is one, whether it is not finite, and then which rank (from 1)."""
    rows: list[list[float]] = []
    for name in NAMES:
        value = numbers.get(name)
        is_mine = value is not None and (name in MEANT or rank == 0)
        if value is None or not is_mine:
            rows.append([0.0, 0.0, 0.0, 0.0])
        elif math.isfinite(value):
            rows.append([value, 1.0, 0.0, 0.0])
        else:
            rows.append([0.0, 1.0, 1.0, rank + 1.0])
    return torch.tensor(rows, dtype=torch.float64)


def _from_sums(step: int, rows: list[list[float]]) -> Agreed:
    found: dict[str, float] = {}
    by_rank: dict[str, dict[int, float]] = {}
    for name, (total, count, broken, who) in zip(NAMES, rows, strict=True):
        if not count:
            continue
        found[name] = math.nan if broken else total / count
        if broken == 1 and name in MEANT:
            by_rank[name] = {int(who) - 1: math.nan}
    return Agreed(step, found, by_rank)


def _kept(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        local = value.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        # A copy: the script may go on to change it in place.
        return local.item() if local.device.type == "cpu" else local.clone()
    return value


def _begin_copy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        return value
    return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)


def _marked(device: torch.device) -> Any:
    event: Any = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def _number(value: Any) -> float | None:
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None  # beyond what a float holds there is nothing to judge
