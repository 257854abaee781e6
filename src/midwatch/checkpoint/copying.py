"""The copy itself: from wherever the state lives into the staging buffer, in order with what training does.

Host tensors are copied by whichever thread runs ``run``, with helpers while training waits for it. Tensors on a GPU go
over a stream of their own: it first waits for what training launched before the save, and ``release`` makes training's
later kernels wait for it, so that a host thread has to wait only for the launches, not for the bytes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from midwatch.checkpoint.identity import Identity

Pair = tuple[torch.Tensor, torch.Tensor]
"""(place in the staging buffer, live tensor)."""

OVERLAPPABLE = frozenset({"cpu", "cuda"})
"""Devices whose copies are known to keep their order with what training does."""


MOST_HANDS = 4
"""Threads of one rank that copy host tensors at once: beyond a few, memory is the limit and not the cores."""

_ONE_HANDED_BYTES = 32 * 2**20
"""Less than this is copied sooner than others are called."""

_PIECE_BYTES = 16 * 2**20
"""Larger tensors are dealt out in pieces, so that no hand is left with one of them at the end."""


class Hands:
    """Threads that help the training thread copy while it has to wait anyway.

    One core does not fill the memory's bandwidth, and those that compute the step are idle during a save.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count - 1, "midwatch-copy") if count > 1 else None

    def copy(self, pairs: Sequence[Pair]) -> None:
        """Copy all pairs of host tensors; holds no lock of Python while bytes move."""
        if self._pool is None or sum(tensor.nbytes for _, tensor in pairs) < _ONE_HANDED_BYTES:
            _copy(iter(pairs))
            return
        # One iterator for all: whoever is free takes the next piece, and taking it is one step of the interpreter.
        pieces = iter([piece for pair in pairs for piece in _pieces(*pair)])
        others = [self._pool.submit(_copy, pieces) for _ in range(self.count - 1)]
        try:
            _copy(pieces)
        finally:
            for other in others:
                other.result()

    def close(self) -> None:
        """End the threads; ``copy`` must not be called again."""
        if self._pool is not None:
            self._pool.shutdown()


def spare_hands(identity: Identity) -> int:
    """How many threads of this rank may copy: its share of the cores this process may use."""
    ranks_here = len(identity.node_ranks) or identity.world_size
    return max(1, min(MOST_HANDS, len(os.sched_getaffinity(0)) // ranks_here))


def _copy(pairs: Iterator[Pair]) -> None:
    with torch.no_grad():
        for view, tensor in pairs:
            view.copy_(tensor)


def _pieces(view: torch.Tensor, tensor: torch.Tensor) -> Iterator[Pair]:
    if tensor.nbytes <= _PIECE_BYTES or not tensor.is_contiguous():
        yield view, tensor
        return
    count = _PIECE_BYTES // tensor.element_size()
    with torch.no_grad():
        yield from zip(view.view(-1).split(count), tensor.detach().view(-1).split(count), strict=True)


class Copy:
    """One set of tensors on its way. ``begin`` and ``release`` belong to the training thread, ``run`` to any.

    Args:
        hands: Who copies the host tensors; None: whichever thread calls ``run``, alone.
    """

    def __init__(self, pairs: Sequence[Pair], streams: Streams, hands: Hands | None = None) -> None:
        self._host = [pair for pair in pairs if not pair[1].is_cuda]
        self._hands = hands
        self._lanes = [_Lane(stream, pairs) for stream, pairs in streams.split(pairs)]
        self.seconds = 0.0

    def begin(self) -> None:
        """Mark the moment whose state is meant."""
        for lane in self._lanes:
            lane.begin()

    def run(self) -> None:
        """Copy host tensors and launch the others; ``is_done`` says when the bytes are there. Holds no lock of Python
        while bytes move."""
        began = time.perf_counter()
        for lane in self._lanes:
            lane.launch()
        if self._hands is not None:
            self._hands.copy(self._host)
        else:
            _copy(iter(self._host))
        self.seconds = time.perf_counter() - began

    def release(self) -> None:
        """After ``run``: what training launches from now on comes after the copy."""
        for lane in self._lanes:
            lane.release()

    @property
    def is_done(self) -> bool:
        """After ``run``: whether every byte has arrived."""
        return all(lane.is_done for lane in self._lanes)

    def finish(self) -> None:
        """After ``run``: wait for the last byte."""
        began = time.perf_counter()
        for lane in self._lanes:
            lane.finish()
        self.seconds += time.perf_counter() - began


class Streams:
    """One stream a GPU, made at first need and kept."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def split(self, pairs: Sequence[Pair]) -> list[tuple[Any, list[Pair]]]:
        """Pairs with tensors on a GPU, by that GPU's stream."""
        lanes: dict[torch.device, list[Pair]] = {}
        for pair in pairs:
            if pair[1].is_cuda:
                lanes.setdefault(pair[1].device, []).append(pair)
        return [(self._stream(device), lane) for device, lane in lanes.items()]

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device=device)
        return self._streams[device]


class _Lane:
    """One GPU's part of a copy."""

    def __init__(self, stream: Any, pairs: list[Pair]) -> None:
        self._stream = stream
        self._pairs = pairs
        self._ready: Any = torch.cuda.Event()
        self._done: Any = torch.cuda.Event()

    def begin(self) -> None:
        self._ready.record(torch.cuda.current_stream(self._stream.device))

    def launch(self) -> None:
        with torch.no_grad(), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            for view, tensor in self._pairs:
                view.copy_(tensor, non_blocking=True)
                # Should the tensor be given up meanwhile, its memory is not handed out again before the copy is over.
                tensor.record_stream(self._stream)
            self._done.record(self._stream)

    def release(self) -> None:
        torch.cuda.current_stream(self._stream.device).wait_event(self._done)

    @property
    def is_done(self) -> bool:
        return bool(self._done.query())

    def finish(self) -> None:
        self._done.synchronize()
