"""Rules that others publish for a loss that goes wrong, written anew from their description, to compare with."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

OLMO_WINDOW = 128
OLMO_SIGMAS = 6.0
FOUNDRY_FACTOR = 2.0
FOUNDRY_PATIENCE = 4
FOUNDRY_CAP = 10.0


def olmo_core(values: Sequence[float]) -> list[int]:
    """Indices above mean + 6 standard deviations of the last 128 values, once 64 are there.

    Source: allenai/OLMo-core, its optimizer that skips steps; used there on the loss and on the gradient norm.
    """
    last: deque[float] = deque(maxlen=OLMO_WINDOW)
    found: list[int] = []
    for at, value in enumerate(values):
        if len(last) >= OLMO_WINDOW // 2:
            limit = statistics.fmean(last) + OLMO_SIGMAS * statistics.stdev(last)
            # What is not a number is no more above the limit than below it; a step with it is left out, too.
            if not value <= limit:
                found.append(at)
        last.append(value if value - value == 0 else statistics.fmean(last) if last else 0.0)
    return found


def llm_foundry(values: Sequence[float], total: int) -> list[int]:
    """Indices where the loss was at least twice the window's mean five times in a row, or half a window over the cap.

    Source: mosaicml/llm-foundry, its callback that kills a run at a spike: a window of 100 steps or 5 % of the run, and
    a cap that is the highest loss of the first window, at most 10.
    """
    size = max(100, total // 20)
    window: deque[float] = deque(maxlen=size)
    cap, in_a_row = FOUNDRY_CAP, 0
    found: list[int] = []
    for at, value in enumerate(values):
        if len(window) == size:
            mean = statistics.fmean(window)
            in_a_row = in_a_row + 1 if value >= FOUNDRY_FACTOR * mean else 0
            if in_a_row > FOUNDRY_PATIENCE or sum(one > cap for one in window) > size // 2:
                found.append(at)
        window.append(value)
        if at == size - 1:
            cap = min(FOUNDRY_CAP, max(window))
    return found
