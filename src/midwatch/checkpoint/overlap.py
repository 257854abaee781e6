"""The copy that goes on while training computes the next gradients, and the proof that nothing changed meanwhile.

Between two optimizer steps weights and moments are constant, so they may be copied behind the next forward and
backward. Every optimizer of the process is held back before its step until the copy is safe; a script cannot forget it.
What goes past optimizers (weights set by hand, a step hidden in a CUDA graph) is noticed afterwards: by PyTorch's
counters of in-place changes, and, since fused kernels and sharded tensors do not count, by samples of the bytes.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, cast

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import GlobalOptimizerPreHook, register_optimizer_step_pre_hook

from midwatch.checkpoint.copying import Copy, Pair
from midwatch.core import CheckpointError

COPY_TIMEOUT_S = 600.0
"""Covers the copy of a rank's whole state; memory or bus would have to be a hundred times slower than usual."""

_SAMPLES = 32
"""Tensors whose first and last element are compared; one optimizer step changes nearly all of them."""


class Proof:
    """That tensors did not change between two moments. Made at the first, asked at the second.

    Args:
        keys: Names of the pairs, for the message.
        pairs: What is being copied.
        frozen: Pairs copied at the first moment already that every optimizer step changes: its step counters.
    """

    def __init__(self, keys: Sequence[str], pairs: Sequence[Pair], frozen: Sequence[Pair] = ()) -> None:
        self._keys = keys
        self._tensors = [tensor for _, tensor in pairs]
        self._versions = [tensor._version for tensor in self._tensors]
        on_host = [
            (key, *pair)
            for key, pair in zip(keys, pairs, strict=True)
            if pair[1].device.type == "cpu" and pair[1].numel() > 0
        ]
        stride = max(1, len(on_host) // _SAMPLES)
        chosen = on_host[::stride][:_SAMPLES] + [("the state of an optimizer", *pair) for pair in frozen[:_SAMPLES]]
        # As they are now: by the end copy and tensor may agree on a value that came after this moment.
        self._samples = [(key, copy, live, _ends(live)) for key, copy, live in chosen]

    def changed(self) -> list[str]:
        """Keys whose tensors changed, as far as can be told; reads the copy, so it must be complete."""
        found = [
            key
            for key, tensor, before in zip(self._keys, self._tensors, self._versions, strict=True)
            if tensor._version != before
        ]
        return found or [key for key, copy, live, then in self._samples if _ends(live) != then or _ends(copy) != then]


def _ends(tensor: torch.Tensor) -> list[list[int]]:
    """The bytes of the first and of the last element: bits, because NaN is not equal to itself."""
    dim = tensor.dim()
    elements = [tensor[(at,) * dim].clone().reshape(1) for at in (0, -1)]
    return [cast("list[int]", element.view(torch.uint8).tolist()) for element in elements]


class Flight:
    """One copy under way. ``hold`` may be called by any thread; the rest belongs to the training thread."""

    def __init__(self, copy: Copy, proof: Proof, running: Future[None]) -> None:
        self.copy = copy
        self.held_s = 0.0
        """What optimizer steps waited for it."""
        self.error: CheckpointError | None = None
        self._proof = proof
        self._running = running
        self._lock = threading.Lock()
        self._is_held = False

    def hold(self) -> None:
        """Return when the state may change: what was to be copied from it is safe, or known to be lost.

        Blocking: for the rest of the copy; on a GPU for its launches only, the kernels launched later wait there.
        """
        began = time.perf_counter()
        with self._lock:
            if not self._is_held:
                self.error = self._settle()
                # Not before: an interrupt in the wait ends it, and the next step must wait again.
                self._is_held = True
            self.held_s += time.perf_counter() - began

    def _settle(self) -> CheckpointError | None:
        try:
            fault = self._running.exception(COPY_TIMEOUT_S)
        except TimeoutError:
            return CheckpointError("CK301", f"the copy into staging memory did not end within {COPY_TIMEOUT_S:.0f} s")
        if fault is not None:
            return CheckpointError("CK301", f"the copy into staging memory failed: {type(fault).__name__}: {fault}")
        self.copy.release()
        changed = self._proof.changed()
        if not changed:
            return None
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        message = f"{changed[0]}{more} changed while the snapshot was copied, and not in an optimizer step"
        return CheckpointError("CK307", message, keys=changed[:50])

    @property
    def is_done(self) -> bool:
        """Whether all bytes are in the arena, or never will be."""
        return self._running.done() and (self._running.exception() is not None or self.copy.is_done)

    @property
    def is_over(self) -> bool:
        """Whether the thread has let go of the arena."""
        return self._running.done()

    def finish(self) -> None:
        """Wait for all bytes."""
        self.hold()
        if self.error is None:
            self.copy.finish()


class Copier:
    """The background thread, and the guard before every optimizer step of the process.

    Args:
        before_step: Called (in whatever thread steps) before an optimizer step, for as long as the copier is open.
    """

    def __init__(self, before_step: Callable[[], None]) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="midwatch-staging")
        # Not to be traced: compiled into a step it would run once and never again.
        hook = cast("GlobalOptimizerPreHook", torch.compiler.disable(_weak(before_step)))
        self._guard = register_optimizer_step_pre_hook(hook)

    def start(self, copy: Copy, proof: Proof) -> Flight:
        """Begin to copy the state of this moment."""
        copy.begin()
        return Flight(copy, proof, self._thread.submit(copy.run))

    def drain(self) -> bool:
        """Wait until no copy is under way, not even one whose flight was lost; False when one hangs.

        Blocking: ``COPY_TIMEOUT_S``.
        """
        return not wait([self._thread.submit(lambda: None)], COPY_TIMEOUT_S).not_done

    def close(self) -> None:
        """End the thread after its copy, and let optimizers alone."""
        self._guard.remove()
        self._thread.shutdown()


def _weak(method: Callable[[], None]) -> Callable[[Optimizer, Any, Any], None]:
    """PyTorch keeps hooks for the life of the process; an owner that is forgotten must not live on in one."""
    reference = weakref.WeakMethod(method)

    def call(_optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        live = reference()
        if live is not None:
            live()

    return call
