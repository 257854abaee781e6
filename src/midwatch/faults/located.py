"""The answer of stage two: who it was, how sure that is, what it rests on."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from midwatch.faults.types import Confidence, Frame, RankEvidence, Suspect


class Located(msgspec.Struct, frozen=True, kw_only=True):
    """A culprit, several suspects, or nobody."""

    fault_class: str
    root: RankEvidence | None = None
    """The culprit's evidence; None when several are possible or a node is to blame."""
    root_node: str | None = None
    suspects: tuple[Suspect, ...] = ()
    victims: tuple[int, ...] = ()
    confidence: Confidence
    phrase: str = ""
    """Completes "rank 1 ..."; a whole sentence when there is no root."""
    message: str
    """Goes into the fingerprint."""
    frame: Frame | None = None
    lines: tuple[str, ...] = ()
    exit_code: int | None = None


def pick(
    fault_class: str,
    suspects: tuple[Suspect, ...],
    *,
    evidence: RankEvidence,
    phrase: str,
    message: str,
    frame: Frame | None,
    lines: tuple[str, ...],
    confidence: Confidence,
) -> Located:
    """Name the rank when there is one suspect, keep to the list when there are more."""
    is_alone = len(suspects) == 1
    nodes = {suspect.node for suspect in suspects}
    return Located(
        fault_class=fault_class,
        root=evidence if is_alone else None,
        root_node=nodes.pop() if len(nodes) == 1 else None,
        suspects=suspects,
        confidence=confidence,
        phrase=phrase if is_alone else f"ranks {', '.join(str(s.rank) for s in suspects)}: each {phrase}",
        message=message,
        frame=frame,
        lines=lines,
        exit_code=evidence.exit_code if is_alone else None,
    )


def share(ranks: Sequence[RankEvidence], reasons: tuple[str, ...], total: float = 1.0) -> tuple[Suspect, ...]:
    """Equal weights that add up to at most ``total``."""
    return tuple(
        Suspect(rank=rank.rank, node=rank.node, weight=int(total * 10_000 / len(ranks)) / 10_000, reasons=reasons)
        for rank in ranks
    )
