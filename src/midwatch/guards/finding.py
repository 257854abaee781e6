"""What goes into the guards, one step's numbers, and what comes out: findings and a judgement on the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec

from midwatch.config import GuardKind

Tier = Literal["note", "incident", "trip"]
"""note: worth a line. incident: warn and gather evidence, training goes on. trip: no further step before a decision."""

TIERS: Final[tuple[Tier, ...]] = ("note", "incident", "trip")

Kind = GuardKind
"""One word a rule."""

MAX_NAMED: Final = 8
"""Ranks named in a sentence."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One step's numbers, as far as they are known. They must be the same on all ranks, so that all decide alike.

    A step may come in several samples (the loss before the optimizer's step, the rest after it). Each number counts
    once a step.
    """

    step: int
    loss: float | None = None
    """Mean over all ranks, in nats."""
    grad_norm: float | None = None
    """Of the whole model, before clipping."""
    lr: float | tuple[float | None, ...] | None = None
    """Of each parameter group, in the optimizer's order; None for one that is not known."""
    loss_scale: float | None = None
    is_skipped: bool = False
    """The optimizer left this step out, as a dynamic loss scale does after an overflow."""
    param_norm: float | None = None
    update_ratio: float | None = None
    """Norm of the update divided by the norm of the weights."""
    unchanged_share: float | None = None
    """Share of the parameters with a gradient that the step left exactly as they were."""
    rank_losses: Mapping[int, float] | None = None
    """Local values, before the reduction."""
    rank_norms: Mapping[int, float] | None = None
    rank_gradients: Mapping[int, float] | None = None
    """Norms of the ranks' own gradients, which no reduction has mixed yet. Only of ranks that hold the same
    parameters; a loss scale that all have alike does not matter."""
    checksums: Mapping[int, str] | None = None
    """Of the parameters, of ranks that should hold the same ones."""
    are_replicas_certain: bool = True
    """False: that these ranks should hold the same is a guess."""
    place: str = ""
    """The tensors where something is wrong with the ranks' values, by name, where that is known."""
    repeated_share: float | None = None
    """Share of the batch's rows that occur in it more than once."""
    seen_share: float | None = None
    """Share of the batch's rows that an earlier step had already."""
    rank_repeated: Mapping[int, float] | None = None
    """The highest of these shares that a rank has for itself, where ranks differ, by rank."""
    rank_seen: Mapping[int, float] | None = None
    token_entropy: float | None = None
    """Of the batch's tokens, in bits."""
    token_distance: float | None = None
    """Jensen-Shannon distance of the batch's tokens from those of the steps before, 0 to 1."""
    same_rows_ranks: float | None = None
    """How many ranks read the same rows as another one that should read others."""
    same_rows: tuple[int, ...] = ()
    """Which, where that is known."""
    source_z: float | None = None
    """How far the source that is farthest from its share is, in standard deviations."""
    source: str = ""
    """Which, in words; it decides nothing, and may be known on one rank only."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one rule saw, and what it had expected."""

    step: int
    kind: Kind
    tier: Tier
    metric: str
    value: float | None = None
    low: float | None = None
    """The band that was expected of ``value``, in its unit; None where it is open. What lies on the edge of it, or
    beyond, was found. Which rules have one: docs/explanation/guards.md."""
    high: float | None = None
    z: float | None = None
    """How far outside, in robust standard deviations of what came before; None for rules that are exact."""
    ranks: tuple[int, ...] = ()
    """The ranks it was seen on, where one can tell."""
    text: str = ""

    def __str__(self) -> str:
        return f"step {self.step}: {self.text} ({self.tier})"


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """The guards' word on one sample."""

    step: int
    findings: tuple[Finding, ...] = ()
    """What is new: a state of affairs that lasts is told once, and again when it gets worse."""
    is_anomalous: bool = False
    """The loss is not what it should be. So many steps in a row (``guards.trip_after``) are a trip."""
    is_impossible: bool = False
    """Values that no healthy step has; an overflow that the loss scale leaves out by itself is not meant."""
    is_outlier: bool = False
    """Some signal is out of its band, told or not: from here on checkpoints may be in doubt."""
    z: float | None = None
    """The loss against its trend."""
    is_silent: bool = False
    """The loss is logged now and then, and was not at this step: nobody knows what it was."""

    @property
    def ok(self) -> bool:
        """False where the optimizer should not make this step."""
        return not self.is_impossible and self.tier != "trip"

    @property
    def tier(self) -> Tier | None:
        """The worst of the findings."""
        return worst(finding.tier for finding in self.findings)


def worst(tiers: Iterable[Tier]) -> Tier | None:
    """The highest of some tiers; None of none."""
    return max(tiers, key=TIERS.index, default=None)


def ranks_named(ranks: Sequence[int]) -> str:
    """Some ranks, at least one, in a sentence; of many the first."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:MAX_NAMED]))
    return f"ranks {shown}" + (f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else "")
