"""Values that no healthy step has: not a number, infinite, exactly zero, or below what text can be predicted to."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from midwatch.guards.episode import Episode
from midwatch.guards.finding import Finding, Kind, Sample, Tier

SKIPS_ALLOWED: Final = 3
SKIPS_WITHIN: Final = 10
"""Steps in which a dynamic loss scale may leave out so many; it does so by design when it is too high."""
QUIET_AFTER: Final = 50
MAX_NAMED: Final = 8
"""Ranks named in a sentence."""


class FiniteGuard:
    """Judges every step, from the first one on.

    Args:
        entropy_floor: In nats; a mean loss below is a copy or a fault. 0: not looked at.
        is_scaling_dynamic: The loss scale is dynamic, as far as that is known beforehand.
    """

    def __init__(self, entropy_floor: float = 0.05, *, is_scaling_dynamic: bool = False) -> None:
        self._entropy_floor = entropy_floor
        self._is_dynamic = is_scaling_dynamic
        self._scale: float | None = None
        self._skips: deque[int] = deque(maxlen=SKIPS_ALLOWED + 1)
        self._episode = Episode(QUIET_AFTER)
        self._had_loss = False
        self.seen: Kind | None = None
        """What makes the sample judged last impossible, told or not."""

    def judge(self, sample: Sample, *, is_past_start: bool) -> Finding | None:
        """Look at whatever numbers the sample has."""
        self._episode.passed()
        self._learn_scaling(sample.loss_scale)
        finding = self._first(sample, is_past_start=is_past_start)
        self.seen = finding.kind if finding is not None and finding.tier == "trip" else None
        return finding if finding is not None and self._episode.is_news(finding.tier) else None

    def _learn_scaling(self, scale: float | None) -> None:
        if scale is not None and math.isfinite(scale):
            self._is_dynamic = self._is_dynamic or scale != 1 or (self._scale is not None and scale != self._scale)
            self._scale = scale

    def _first(self, sample: Sample, *, is_past_start: bool) -> Finding | None:
        bad: list[str] = []
        if _is_bad(sample.loss):
            bad.append("loss")
        if _is_bad(sample.grad_norm):
            bad.append("grad_norm")
        if _is_bad(sample.param_norm):
            bad.append("param_norm")
        losses, norms = _bad_ranks(sample.rank_losses), _bad_ranks(sample.rank_norms)
        if bad or losses or norms:
            # An overflow that a dynamic loss scale leaves out shows in gradients, not in the loss.
            may_skip = self._is_dynamic and not losses and bad in (["grad_norm"], [])
            if (may_skip or sample.is_skipped) and "param_norm" not in bad:
                # Its first search for a scale may take any number of steps.
                return self._left_out(sample, bad) if is_past_start else None
            return self._not_finite(sample, bad, sorted({*losses, *norms}))
        if sample.loss is None:
            return None
        if sample.loss == 0:
            return self._low(sample, "zero_loss", "the loss is exactly 0: some loggers hide NaN that way")
        if self._entropy_floor and sample.loss < self._entropy_floor:
            text = f"loss {sample.loss:.3g} is below the entropy of text ({self._entropy_floor:g}): do targets leak?"
            return self._low(sample, "low_loss", text)
        self._had_loss = True
        return None

    def _left_out(self, sample: Sample, bad: list[str]) -> Finding | None:
        if not self._skips or self._skips[-1] != sample.step:
            self._skips.append(sample.step)
        within = sum(sample.step - step < SKIPS_WITHIN for step in self._skips)
        if within <= SKIPS_ALLOWED:
            return None
        text = f"{within} of {SKIPS_WITHIN} steps were left out: that is no loss scale that was merely too high"
        return self._finding(sample, bad[0] if bad else "grad_norm", (), text)

    def _not_finite(self, sample: Sample, bad: list[str], ranks: list[int]) -> Finding:
        text = f"{' and '.join(bad) or 'a local value'} not finite"
        if ranks:
            text += f"; first seen on {_named(ranks)}"
        if sample.place:
            text += f", in the gradient of {sample.place}"
        return self._finding(sample, bad[0] if bad else "loss", tuple(ranks), text)

    @staticmethod
    def _finding(sample: Sample, metric: str, ranks: tuple[int, ...], text: str) -> Finding:
        value = getattr(sample, metric)
        return Finding(
            step=sample.step, kind="nonfinite", tier="trip", metric=metric, value=value, ranks=ranks, text=text
        )

    def _low(self, sample: Sample, kind: Kind, text: str) -> Finding:
        # One that was so from the first step on is another thing than a loss: a stage of a pipeline that has none.
        # And what is not a cross-entropy of text may well become small: that alone must not stop a run.
        tier: Tier = "trip" if kind == "zero_loss" else "incident"
        return Finding(
            step=sample.step,
            kind=kind,
            tier=tier if self._had_loss else "note",
            metric="loss",
            value=sample.loss,
            low=self._entropy_floor,
            text=text,
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "is_dynamic": self._is_dynamic,
            "scale": self._scale,
            "skips": list(self._skips),
            "had_loss": self._had_loss,
            "episode": self._episode.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._is_dynamic = self._is_dynamic or state["is_dynamic"]
        self._scale = state["scale"]
        self._had_loss = state["had_loss"]
        self._skips = deque(state["skips"], maxlen=SKIPS_ALLOWED + 1)
        self._episode.load_state_dict(state["episode"])


def _is_bad(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)


def _bad_ranks(values: Mapping[int, float] | None) -> list[int]:
    return [rank for rank, value in values.items() if not math.isfinite(value)] if values else []


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in ranks[:MAX_NAMED])
    return f"ranks {shown}" + (f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else "")
