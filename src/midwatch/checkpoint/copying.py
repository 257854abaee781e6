"""The copy itself: from wherever the state lives into the staging buffer, in order with what training does.

Host tensors are copied by whichever thread runs ``run``. Tensors on a GPU go over a stream of their own: it first waits
for what training launched before the save, and ``release`` makes training's later kernels wait for it, so that a host
thread has to wait only for the launches, not for the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
"""(place in the staging buffer, live tensor)."""

OVERLAPPABLE = frozenset({"cpu", "cuda"})
"""Devices whose copies are known to keep their order with what training does."""


class Copy:
    """One set of tensors on its way. ``begin`` and ``release`` belong to the training thread, ``run`` to any."""

    def __init__(self, pairs: Sequence[Pair], streams: Streams) -> None:
        self._host = [pair for pair in pairs if not pair[1].is_cuda]
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
        with torch.no_grad():
            for view, tensor in self._host:
                view.copy_(tensor)
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
