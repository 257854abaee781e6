"""Waiting that happens inside torch: for a loader's next batch, for a collective. The one place that wraps its classes
to see it.

Wrapped once for the whole process, and doing nothing unless a loop is timed: a microsecond a call. Where a version of
torch has no such class, that part of a step is not seen. Of a collective the host sees what it waits for itself:
gloo's, but not NCCL's, which the GPU waits for, and not those that DDP waits for inside its backward pass. DDP measures
these itself now and then, and tells.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import FunctionType
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch.utils.data import dataloader

from midwatch.train.steptime import Part, StepTime

_log = logging.getLogger(__name__)

_Call = Callable[..., Any]
_DDP_KEYS: Final = ("backward_comm_time", "backward_compute_comm_overlap_time")


class Waits:
    """Who is told of waiting now."""

    times: ClassVar[StepTime | None] = None
    _wrapped: ClassVar[set[tuple[type, str]]] = set()

    @classmethod
    def watch(cls, times: StepTime, data: Any, *, has_peers: bool) -> None:
        """Tell ``times`` from now on. Call it from the training thread.

        Args:
            data: What the script tracks as its data: an iterator of its own kind is watched as well.
        """
        cls.times = times
        cls._wrap(getattr(dataloader, "_BaseDataLoaderIter", None), "__next__", _next_batch)
        # Only where the class is written in Python: others do not let their methods be replaced.
        for owner in type(data).__mro__:
            if isinstance(vars(owner).get("__next__"), FunctionType):
                cls._wrap(owner, "__next__", _next_batch)
                break
        if has_peers and dist.is_available():
            cls._wrap(getattr(dist, "Work", None), "wait", _wait_for_peers)

    @classmethod
    def unwatch(cls, times: StepTime) -> None:
        """Tell it no more; another one that was told meanwhile is left alone."""
        if cls.times is times:
            cls.times = None

    @classmethod
    def _wrap(cls, owner: type | None, name: str, timed: Callable[[_Call], _Call]) -> None:
        call = getattr(owner, name, None)
        if owner is None or call is None or (owner, name) in cls._wrapped:
            return
        try:
            setattr(owner, name, timed(call))
        except (AttributeError, TypeError) as error:
            _log.info("waiting in %s.%s is not seen: %s", owner.__name__, name, error)
            return
        cls._wrapped.add((owner, name))


class DdpTimer:
    """What a model's DDP measured: in each of its first ten steps, and then in every hundredth."""

    def __init__(self, model: Any) -> None:
        inner = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
        is_ddp = dist.is_available() and isinstance(inner, torch.nn.parallel.DistributedDataParallel)
        self._read: Callable[[], dict[str, Any]] | None = None
        if is_ddp:
            self._read = getattr(inner, "_get_ddp_logging_data", None)

    def wait_s(self) -> float | None:
        """How long the backward pass waited for gradients of peers when its own work was done; None: not known."""
        if self._read is None:
            return None
        try:
            measured = self._read()
            took, overlapped = (measured[key] for key in _DDP_KEYS)
        except (AssertionError, KeyError, RuntimeError) as error:
            _log.debug("DDP does not tell its times: %s", error)
            return None
        return max(0, took - overlapped) / 1e9


# --- seen in the stack of a rank that hangs, where their names tell what it does (faults.frames) ---------------------


def _timed(part: Part, call: _Call, args: Any, kwargs: Any) -> Any:
    times = Waits.times
    if times is None or not times.enter(part):
        return call(*args, **kwargs)
    try:
        return call(*args, **kwargs)
    finally:
        times.leave()


def _next_batch(call: _Call) -> _Call:
    @functools.wraps(call)
    def next_batch(*args: Any, **kwargs: Any) -> Any:
        return _timed("data_wait", call, args, kwargs)

    return next_batch


def _wait_for_peers(call: _Call) -> _Call:
    @functools.wraps(call)
    def wait_for_peers(*args: Any, **kwargs: Any) -> Any:
        return _timed("communication", call, args, kwargs)

    return wait_for_peers
