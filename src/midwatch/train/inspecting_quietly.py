"""Looking must never end training: a look that fails is the last of its kind, and is told of once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from midwatch.core import GuardError, Recorder

_log = logging.getLogger(__name__)
_Given = ParamSpec("_Given")
_Seen = TypeVar("_Seen")


def is_recorded() -> bool:
    """A graph is being made of what runs now: a look would be done once and never again, or not even that once."""
    is_compiling = torch.compiler.is_compiling()
    return is_compiling or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


class Quietly:
    """One kind of look. Nothing collective may run inside: the other ranks would wait for one that gave up.

    Args:
        what: The key of ``[guards.inspect]`` that switches this kind off.
    """

    def __init__(self, what: str, recorder: Recorder, *, is_off: bool = False) -> None:
        self.is_off = is_off
        self._what = what
        self._recorder = recorder

    def do(self, look: Callable[_Given, _Seen], *args: _Given.args, **kwargs: _Given.kwargs) -> _Seen | None:
        """What the look returns; None once one of this kind has failed."""
        if self.is_off:
            return None
        try:
            return look(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever a model's tensors and hooks can do, training goes on
            self._end(error)
            return None

    def _end(self, error: Exception) -> None:
        self.is_off = True
        why = f"{type(error).__name__}: {error}"
        told = GuardError("GD105", f"the model is not inspected any more (guards.inspect.{self._what}): {why}")
        _log.warning("[%s] %s", told.code, told.message, exc_info=error)
        self._recorder.record("guard.inspection_ended", what=self._what, why=why[:300])
