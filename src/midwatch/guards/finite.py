"""Values that no healthy step has: not a number, infinite, exactly zero, or below what text can be predicted to."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from midwatch.guards.episode import Episode
from midwatch.guards.finding import Finding, Kind, Sample, Tier, ranks_named
from midwatch.guards.search import MOST_LEFT_OUT, MOST_UNMOVED, ScaleSearch

SKIPS_ALLOWED: Final = 3
SKIPS_WITHIN: Final = 10
"""Steps in which a dynamic loss scale may leave out so many; it does so by design when it is too high."""
EARLY: Final = 2
"""Times as many at the start of a run, where gradients grow and shrink faster than they ever will again."""
QUIET_AFTER: Final = 50


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
        self._search = ScaleSearch()
        self._is_new_attempt = False
        self._skips: deque[int] = deque(maxlen=EARLY * SKIPS_ALLOWED + 1)
        self._episode = Episode(QUIET_AFTER)
        self._had_loss = False
        self.seen: Kind | None = None
        """What makes the sample judged last impossible, told or not."""

    def judge(self, sample: Sample, *, is_past_start: bool) -> Finding | None:
        """Look at whatever numbers the sample has."""
        self._episode.passed()
        has_fallen = self._learn_scaling(sample.loss_scale)
        finding = self._first(sample, has_fallen=has_fallen, is_past_start=is_past_start)
        self.seen = finding.kind if finding is not None and finding.tier == "trip" else None
        return finding if finding is not None and self._episode.is_news(finding.tier) else None

    @property
    def is_searching(self) -> bool:
        """The loss scale is not found yet, so that it may fall step after step."""
        return not self._search.is_over

    def resumed(self) -> None:
        """The next sample is the first after a resume. Where the scale begins anew there, so does the search for it."""
        self._is_new_attempt = True
        if self._scale is None:
            self._search = ScaleSearch(is_after_resume=True)

    def _learn_scaling(self, scale: float | None) -> bool:
        """Whether it fell, which tells of a step that was left out."""
        if scale is None or not math.isfinite(scale):
            return False
        last, self._scale = self._scale, scale
        self._is_dynamic = self._is_dynamic or scale != 1 or (last is not None and scale != last)
        if self._is_new_attempt:
            self._is_new_attempt = False
            if last is None or scale > 2 * last:
                self._search = ScaleSearch(is_after_resume=True)
                self._skips.clear()
            return False
        return last is not None and scale < last

    def _first(self, sample: Sample, *, has_fallen: bool, is_past_start: bool) -> Finding | None:
        bad: list[str] = []
        if _is_bad(sample.loss):
            bad.append("loss")
        if _is_bad(sample.grad_norm):
            bad.append("grad_norm")
        if _is_bad(sample.param_norm):
            bad.append("param_norm")
        losses, norms = _bad_ranks(sample.rank_losses), _bad_ranks(sample.rank_norms)
        has_bad = bool(bad or losses or norms)
        # An overflow that a dynamic loss scale leaves out shows in gradients, not in the loss.
        may_skip = self._is_dynamic and not losses and bad in (["grad_norm"], [])
        if has_bad and (not (may_skip or sample.is_skipped) or "param_norm" in bad):
            return self._not_finite(sample, bad, losses, norms)
        finding = self._left_out(sample, is_left_out=has_bad, has_fallen=has_fallen, is_past_start=is_past_start)
        if finding is not None or has_bad or sample.loss is None:
            return finding
        if sample.loss == 0:
            return self._low(sample, "zero_loss", "the loss is exactly 0: some loggers hide NaN that way")
        if self._entropy_floor and sample.loss < self._entropy_floor:
            text = f"loss {sample.loss:.3g} is below the entropy of text ({self._entropy_floor:g}): do targets leak?"
            return self._low(sample, "low_loss", text)
        self._had_loss = True
        return None

    def _left_out(self, sample: Sample, *, is_left_out: bool, has_fallen: bool, is_past_start: bool) -> Finding | None:
        """Count the steps that a loss scale leaves out.

        Args:
            is_left_out: By its numbers. A scale that falls is another rule's to judge, once one was found.
        """
        search, is_unmoved = self._search, sample.loss_scale is not None and not has_fallen
        # Only a word of the script's: it may count what it should tell, and that must not stop a run.
        tier: Tier = "trip" if is_left_out or self._scale is not None else "incident"
        is_left_out = is_left_out or (sample.is_skipped and not has_fallen)
        if not search.is_over:
            is_any = is_left_out or has_fallen
            search.take(sample.step, is_left_out=is_any, is_unmoved=is_unmoved, is_past_start=is_past_start)
            if search.is_over:
                self._skips.clear()
        if is_left_out and (not self._skips or self._skips[-1] != sample.step):
            self._skips.append(sample.step)
        if not search.is_over:
            return self._too_long(sample, tier) if search.is_too_long else None
        if not is_left_out:
            return None
        allowed = SKIPS_ALLOWED if is_past_start else EARLY * SKIPS_ALLOWED
        within = sum(sample.step - step < SKIPS_WITHIN for step in self._skips)
        if within <= allowed:
            return None
        text = f"{within} of {SKIPS_WITHIN} steps were left out: that is no loss scale that was merely too high"
        return _skipped(sample.step, tier, within, allowed, text)

    def _too_long(self, sample: Sample, tier: Tier) -> Finding:
        search = self._search
        search.end()
        if search.unmoved > MOST_UNMOVED:
            text = f"{search.unmoved} steps in a row were left out with the loss scale at {sample.loss_scale:g}"
            return _skipped(sample.step, tier, search.unmoved, MOST_UNMOVED, f"{text}: it is not what is wrong")
        text = f"{search.left_out} steps were left out from the beginning: no search for a loss scale takes so many"
        return _skipped(sample.step, tier, search.left_out, MOST_LEFT_OUT, text)

    @staticmethod
    def _not_finite(sample: Sample, bad: list[str], losses: list[int], norms: list[int]) -> Finding:
        ranks = sorted({*losses, *norms})
        text = f"{' and '.join(bad) or 'a local value'} not finite"
        if ranks:
            text += f"; first seen on {ranks_named(ranks)}"
        if sample.place:
            text += f", in the gradient of {sample.place}"
        metric = bad[0] if bad else "loss" if losses else "grad_norm"
        own = sample.rank_losses if losses else sample.rank_norms
        # Where only some ranks' own is not finite it is theirs that is told.
        value = getattr(sample, metric) if bad or not own else own[(losses or norms)[0]]
        return Finding(
            step=sample.step, kind="nonfinite", tier="trip", metric=metric, value=value, ranks=tuple(ranks), text=text
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
            low=self._entropy_floor if kind == "low_loss" else None,
            text=text,
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "is_dynamic": self._is_dynamic,
            "scale": self._scale,
            "skips": list(self._skips),
            "search": self._search.state_dict(),
            "is_new_attempt": self._is_new_attempt,
            "had_loss": self._had_loss,
            "episode": self._episode.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._is_dynamic = self._is_dynamic or state["is_dynamic"]
        self._scale = state["scale"]
        self._had_loss = state["had_loss"]
        self._skips = deque(state["skips"], maxlen=EARLY * SKIPS_ALLOWED + 1)
        self._is_new_attempt = state.get("is_new_attempt", False)
        if "search" in state:
            self._search.load_state_dict(state["search"])
        self._episode.load_state_dict(state["episode"])


def _skipped(step: int, tier: Tier, count: int, allowed: int, text: str) -> Finding:
    return Finding(
        step=step, kind="nonfinite", tier=tier, metric="skipped", value=float(count), high=float(allowed), text=text
    )


def _is_bad(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)


def _bad_ranks(values: Mapping[int, float] | None) -> list[int]:
    return [rank for rank, value in values.items() if not math.isfinite(value)] if values else []
