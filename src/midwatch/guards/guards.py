"""All detectors behind one call a step.

Example::

    guards = Guards(config.guards)
    judgement = guards.observe(Sample(step=step, loss=loss, grad_norm=norm, lr=lr))
    for finding in judgement.findings:
        print(finding)

Pure and deterministic: no clock, no I/O, no randomness. Ranks that are given the same numbers decide the same. The
state is plain data that JSON carries exactly, so guards that were saved and loaded go on as if nothing had happened;
``state_dict`` and ``load_state_dict`` have the names that ``run.track`` looks for.
"""

from __future__ import annotations

import math
from typing import Any, Final, TypeGuard

from midwatch.config import GuardsConfig
from midwatch.guards.batches import BatchGuard
from midwatch.guards.finding import Finding, Judgement, Sample
from midwatch.guards.finite import FiniteGuard
from midwatch.guards.level import LevelGuard
from midwatch.guards.norms import NormGuard
from midwatch.guards.plateau import PlateauGuard
from midwatch.guards.ranks import RankGuard
from midwatch.guards.replicas import ReplicaGuard
from midwatch.guards.resumes import ResumeTest
from midwatch.guards.scaling import ScaleGuard
from midwatch.guards.schedule import Schedule, ScheduleGuard
from midwatch.guards.spikes import SpikeGuard
from midwatch.guards.start import TEST_STEP, StartGuard
from midwatch.guards.updates import UpdateGuard

START_STEPS: Final = 200
"""Statistical rules are armed at this step and with this many values: every early false alarm that was measured fell
before step 200."""
AFTER_WARMUP: Final = 128
"""And so many steps after the warm-up."""

STATE_VERSION: Final = 1


class Guards:
    """The detectors of one run.

    Args:
        config: ``[guards]``; the defaults are what was measured.
        is_scaling_dynamic: A dynamic loss scale is in use, so that some steps are left out by design. Learned from
            ``Sample.loss_scale`` otherwise.
    """

    def __init__(self, config: GuardsConfig | None = None, *, is_scaling_dynamic: bool = False) -> None:
        config = config or GuardsConfig()
        self._off = frozenset(config.off)
        self._start = max(START_STEPS, config.schedule.warmup_steps + AFTER_WARMUP)
        self._step: int | None = None
        self._taken: set[str] = set()
        self._finite = FiniteGuard(config.entropy_floor, is_scaling_dynamic=is_scaling_dynamic)
        self._spikes = SpikeGuard(config.spike_z, config.trip_after)
        self._level = LevelGuard()
        self._plateau = PlateauGuard()
        has_warmup = config.schedule.warmup_steps > 0
        self._begin = StartGuard(max(TEST_STEP, self._start)) if has_warmup else None
        self._norms = NormGuard()
        schedule = Schedule(config.schedule)
        self._schedule = ScheduleGuard(schedule) if schedule.is_known else None
        self._scaling = ScaleGuard()
        self._updates = UpdateGuard()
        self._resume = ResumeTest()
        self._losses = RankGuard("loss")
        self._rank_norms = RankGuard("grad_norm")
        self._rank_gradients = RankGuard("own_grad_norm")
        self._replicas = ReplicaGuard()
        self._batches = BatchGuard()

    def observe(self, sample: Sample) -> Judgement:
        """Judge one sample. Never raises for what the numbers are."""
        if sample.step != self._step:
            self._step = sample.step
            self._taken.clear()
        found: list[Finding | None] = [self._finite.judge(sample, is_past_start=sample.step >= self._start)]
        is_bad = self._finite.seen is not None and self._finite.seen not in self._off
        self._take_loss(sample, found)
        is_high = "loss" in self._taken and self._spikes.is_outlier and "spike" not in self._off
        is_outlier = is_bad or is_high or (self._level.is_risen and "level_rise" not in self._off)
        is_outlier |= self._take_norm(sample, found, is_high=is_high)
        is_outlier |= self._take_settings(sample, found)
        self._take_updates(sample, found)
        self._take_ranks(sample, found)
        self._take_batch(sample, found)
        findings = tuple([one for one in found if one is not None and one.kind not in self._off])
        return Judgement(
            step=sample.step,
            findings=findings,
            is_anomalous=is_bad or is_high,
            is_impossible=is_bad,
            is_outlier=is_outlier or (bool(findings) and any(one.tier != "note" for one in findings)),
            z=self._spikes.z if "loss" in self._taken else None,
            is_silent=not is_bad and sample.loss is None and "loss" not in self._taken and self._spikes.has_any,
        )

    @property
    def has_plan(self) -> bool:
        """The planned learning rate is known."""
        return self._schedule is not None

    def resumed(self, step: int) -> None:
        """``step``, the next one, is the first after a resume; the state of the guards must be that of the step before.

        Call it after ``load_state_dict``.
        """
        self._resume.resumed(self._spikes.trend)
        self._updates.resumed(step)
        self._finite.resumed()
        self._scaling.resumed()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _is_new(self, name: str) -> bool:
        """A number counts once a step."""
        if name in self._taken:
            return False
        self._taken.add(name)
        return True

    def _take_loss(self, sample: Sample, found: list[Finding | None]) -> None:
        loss = sample.loss
        if not _is_usable(loss) or not self._is_new("loss"):
            return
        step = sample.step
        is_past_start = step >= self._start
        found.append(self._spikes.judge(step, loss, is_past_start=is_past_start))
        trend = self._spikes.trend
        scale = trend.scale if is_past_start and trend.is_armed else None
        found.append(self._level.judge(step, loss, scale, trend.grain))
        found.append(self._plateau.judge(step, loss))
        if self._begin is not None:
            found.append(self._begin.judge(step, loss))
        found.append(self._resume.judge(step, loss))

    def _take_norm(self, sample: Sample, found: list[Finding | None], *, is_high: bool) -> bool:
        norm = sample.grad_norm
        if not _is_usable(norm) or not self._is_new("grad_norm"):
            return False
        found += self._norms.judge(sample.step, norm, is_loss_outlier=is_high, is_past_start=sample.step >= self._start)
        return self._norms.is_outlier and "grad_spike" not in self._off

    def _take_settings(self, sample: Sample, found: list[Finding | None]) -> bool:
        is_outlier = False
        if sample.lr is not None and self._schedule is not None and self._is_new("lr"):
            found.append(self._schedule.judge(sample.step, sample.lr))
            is_outlier = self._schedule.is_outlier and "lr_off_plan" not in self._off
        if sample.loss_scale is not None and self._is_new("loss_scale"):
            is_past_start, is_searching = sample.step >= self._start, self._finite.is_searching
            scaling = self._scaling
            found.append(
                scaling.judge(sample.step, sample.loss_scale, is_searching=is_searching, is_past_start=is_past_start)
            )
        return is_outlier

    def _take_updates(self, sample: Sample, found: list[Finding | None]) -> None:
        step, updates = sample.step, self._updates
        is_past_start = step >= self._start
        if _is_usable(sample.update_ratio) and self._is_new("update_ratio"):
            found.append(updates.judge_ratio(step, sample.update_ratio, is_past_start=is_past_start))
        if _is_usable(sample.param_norm) and self._is_new("param_norm"):
            found.append(updates.judge_norm(step, sample.param_norm, is_past_start=is_past_start))
        if _is_finite(sample.unchanged_share) and self._is_new("unchanged_share"):
            found.append(updates.judge_unchanged(step, sample.unchanged_share))

    def _take_ranks(self, sample: Sample, found: list[Finding | None]) -> None:
        if sample.rank_losses and self._is_new("rank_losses"):
            found += self._losses.judge(sample.step, sample.rank_losses)
        if sample.rank_norms and self._is_new("rank_norms"):
            found += self._rank_norms.judge(sample.step, sample.rank_norms)
        if sample.rank_gradients and self._is_new("rank_gradients"):
            found += self._rank_gradients.judge(sample.step, sample.rank_gradients)
        if sample.checksums and self._is_new("checksums"):
            is_certain, place = sample.are_replicas_certain, sample.place
            found.append(self._replicas.judge(sample.step, sample.checksums, is_certain=is_certain, place=place))

    def _take_batch(self, sample: Sample, found: list[Finding | None]) -> None:
        step, batches = sample.step, self._batches
        if _is_finite(sample.seen_share) and self._is_new("seen_share"):
            found.append(batches.judge_seen(step, sample.seen_share, sample.rank_seen))
        if _is_finite(sample.repeated_share) and self._is_new("repeated_share"):
            found.append(batches.judge_repeated(step, sample.repeated_share, sample.rank_repeated))
        if _is_finite(sample.token_entropy) and sample.token_entropy >= 0 and self._is_new("token_entropy"):
            found.append(batches.judge_entropy(step, sample.token_entropy))
        if _is_usable(sample.token_distance) and self._is_new("token_distance"):
            found.append(batches.judge_distance(step, sample.token_distance))
        if _is_finite(sample.same_rows_ranks) and self._is_new("same_rows_ranks"):
            found.append(batches.judge_shared(step, sample.same_rows_ranks, sample.same_rows))
        if _is_finite(sample.source_z) and self._is_new("source_z"):
            found.append(batches.judge_mix(step, sample.source_z, sample.source))

    # --- the state ------------------------------------------------------------------------------------------------

    @property
    def _parts(self) -> dict[str, Any]:
        parts: dict[str, Any] = {
            "finite": self._finite,
            "spikes": self._spikes,
            "level": self._level,
            "plateau": self._plateau,
            "norms": self._norms,
            "scaling": self._scaling,
            "updates": self._updates,
            "resume": self._resume,
            "losses": self._losses,
            "rank_norms": self._rank_norms,
            "rank_gradients": self._rank_gradients,
            "replicas": self._replicas,
            "batches": self._batches,
        }
        optional = {"schedule": self._schedule, "begin": self._begin}
        return parts | {name: part for name, part in optional.items() if part is not None}

    def state_dict(self) -> dict[str, Any]:
        """Everything learned so far, as plain data."""
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        return {"version": STATE_VERSION, "step": self._step, "taken": sorted(self._taken), "parts": parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state. One of another version is left aside: the detectors then learn anew."""
        if state.get("version") != STATE_VERSION:
            return
        self._step = state["step"]
        self._taken = set(state["taken"])
        for name, part in self._parts.items():
            if name in state["parts"]:
                part.load_state_dict(state["parts"][name])


def _is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _is_usable(value: float | None) -> TypeGuard[float]:
    """Has a logarithm."""
    return value is not None and 0 < value < math.inf
