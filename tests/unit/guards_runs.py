"""Made-up runs for the tests of the guards: a loss that falls like a power, with noise of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from midwatch.config import GuardsConfig
from midwatch.guards import Finding, Guards, Sample

Change = Callable[[int, dict[str, Any]], None]


def healthy(steps: int, *, seed: int = 0, noise: float = 0.01) -> Iterable[dict[str, Any]]:
    source = random.Random(seed)
    for step in range(steps):
        loss = 10.0 * (step + 10) ** -0.2 * (1 + source.gauss(0, noise))
        norm = 0.5 * (1 + abs(source.gauss(0, 0.1)))
        yield {"step": step, "loss": loss, "grad_norm": norm}


def run(
    steps: int, change: Change | None = None, *, config: GuardsConfig | None = None, guards: Guards | None = None
) -> list[Finding]:
    """Everything found in a run of which some steps were changed."""
    guards = guards or Guards(config)
    found: list[Finding] = []
    for values in healthy(steps):
        if change is not None:
            change(values["step"], values)
        found += guards.observe(Sample(**values)).findings
    return found


def kinds(found: Iterable[Finding]) -> list[tuple[str, str, int]]:
    return [(one.kind, one.tier, one.step) for one in found]
