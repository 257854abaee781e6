"""One step's numbers of this rank as the guards want them: what the script logs, and what midwatch measures itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from midwatch.guards import LR_NAMES, NUMBERS, Finding
from midwatch.train.tensors import Copied, begin_copy, local_part

if TYPE_CHECKING:
    from midwatch.train.agreement import Agreed

MEANT: Final = ("loss", "grad_norm")
"""Numbers that may differ from rank to rank; the mean over the ranks that have one counts."""
TAKEN: Final = (*LR_NAMES, *(name for name in NUMBERS if name not in MEANT), "skipped")
"""Numbers that are the same on all ranks: the lowest rank's counts, so that one rank may log for all."""
LOGGED: Final = (*MEANT, *TAKEN)
_LOGGED: Final = frozenset(LOGGED)


class Watch(Protocol):
    """Who adds midwatch's own numbers to those of the script, and is told what came of them."""

    def measured(self, step: int) -> Mapping[str, Any]:
        """At the end of a step; what the script logged by the same names counts above it."""
        ...

    def settled(self, step: int, numbers: dict[str, float]) -> None:
        """This rank's numbers of a step, on the host and not sent yet; more may be added."""
        ...

    def agreed(self, agreed: Agreed) -> None:
        """All ranks' numbers of a step; more of it may follow when it is done."""
        ...

    def found(self, findings: Iterable[Finding]) -> None:
        """What the guards saw."""
        ...


class Unwatched:
    """Nobody."""

    def measured(self, step: int) -> Mapping[str, Any]:
        return {}

    def settled(self, step: int, numbers: dict[str, float]) -> None:
        pass

    def agreed(self, agreed: Agreed) -> None:
        pass

    def found(self, findings: Iterable[Finding]) -> None:
        pass


class Readings:
    """What was logged since the last step, on this rank."""

    def __init__(self, watch: Watch | None = None) -> None:
        self._watch = watch or Unwatched()
        self._values: dict[str, Any] = {}

    def add(self, values: Mapping[str, Any]) -> None:
        """Keep the numbers that the guards know, by their names in ``run.log``; nobody may change them any more.

        Of several by one name the last one counts; but of several losses, as of the micro-batches of a step, none hides
        that another was not finite.
        """
        for name, value in values.items():
            if name in _LOGGED:
                was = self._values.get(name)
                self._values[name] = value if was is None or name not in MEANT else _unhidden(was, value)

    def put(self, values: Mapping[str, Any]) -> None:
        """Numbers of midwatch's own, by names that no script can log by."""
        self._values.update({name: _kept(value) for name, value in values.items()})

    def take(self, step: int | None = None) -> OnTheWay:
        """What there is, on its way to the host; begins anew.

        Args:
            step: It is done, and what midwatch measures goes with it.
        """
        values, self._values = self._values, {}
        if step is None:
            return OnTheWay(values)
        return OnTheWay({**self._watch.measured(step), **values}, step, self._watch)


class OnTheWay:
    """Numbers of one step. Those on a GPU are copied behind its work of now; ``numbers`` waits for that alone."""

    def __init__(self, values: Mapping[str, Any], step: int | None = None, watch: Watch | None = None) -> None:
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        self._values = {**values, **{name: begin_copy(value) for name, value in tensors.items()}} if tensors else values
        self._step = step
        self._watch = watch
        self._copied = Copied(value.device for value in tensors.values()) if tensors else None

    def numbers(self) -> dict[str, float]:
        """On the host. To be called once, in the order of the steps."""
        if self._copied is not None:
            self._copied.wait()
        found = {name: number for name, value in self._values.items() if (number := _number(value)) is not None}
        if self._step is not None and self._watch is not None:
            self._watch.settled(self._step, found)
        return found


def _unhidden(was: Any, value: Any) -> Any:
    """``value``, or NaN where ``was`` is not finite; of numbers on a GPU without waiting for it."""
    if not isinstance(value, (int, float, torch.Tensor)):
        return was
    if not isinstance(was, (float, torch.Tensor)):
        return value
    nothing = was - was
    if isinstance(nothing, torch.Tensor) and isinstance(value, torch.Tensor):
        nothing = nothing.to(value.device, non_blocking=True)
    return value + nothing


def _kept(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        local = local_part(value.detach())
        # A copy: the script may go on to change it in place.
        return local.item() if local.device.type == "cpu" else local.clone()
    return value


def _number(value: Any) -> float | None:
    if type(value) is float:
        return value
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None  # beyond what a float holds there is nothing to judge
