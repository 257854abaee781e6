"""``judge``: the stages in a row. Pure: the same evidence gives the same verdict, now and from its bundle."""

from __future__ import annotations

from midwatch.faults import grade, texts, wordings
from midwatch.faults.fingerprint import fingerprint
from midwatch.faults.locate import locate
from midwatch.faults.located import Located
from midwatch.faults.read import RankFact, read_rank
from midwatch.faults.types import Evidence, Verdict

EVIDENCE_LINES = 12


def judge(evidence: Evidence, *, same_failure_limit: int = 2, widths: grade.Widths = grade.DEFAULT_WIDTHS) -> Verdict:
    """What happened, who did it, how wide it is, what to do.

    ``action`` is "none" exactly when this is not a fault (a pause, a busy rank, a rank that ended in peace).

    Args:
        evidence: One incident.
        same_failure_limit: So many equal failures without progress stop the run.
        widths: From where on a fault is wide.
    """
    located = locate(evidence, _read(evidence))
    step = _step(evidence, located)
    mark = fingerprint(located.fault_class, located.message, located.frame)
    policy = grade.decide(
        located, evidence, fingerprint=mark, step=step, same_failure_limit=same_failure_limit, widths=widths
    )
    root = located.root
    return Verdict(
        incident=evidence.incident,
        fault_class=located.fault_class,
        summary=_summary(located, step, policy.why),
        root_rank=root.rank if root else None,
        root_node=located.root_node or None,
        suspects=located.suspects,
        victims=located.victims,
        confidence=located.confidence,
        grade=policy.grade,
        action=policy.action,
        rule=policy.rule,
        fingerprint=mark,
        step=step,
        exit_code=located.exit_code,
        causal_nodes=grade.causal_nodes(located),
        is_hardware=grade.is_hardware(located),
        domain=policy.domain,
        evidence=tuple(dict.fromkeys(texts.quote(line) for line in located.lines))[:EVIDENCE_LINES],
    )


def _read(evidence: Evidence) -> list[RankFact]:
    by_node: dict[str, list[str]] = {}
    for node, line in evidence.kernel_lines:
        by_node.setdefault(node, []).append(line)
    facts: list[RankFact] = []
    for rank in evidence.ranks:
        lines = by_node.get(rank.node, [])
        facts.append(read_rank(rank, wordings.oom_killed_pids(lines), wordings.xid_line(lines), evidence.lived_s))
    return facts


def _step(evidence: Evidence, located: Located) -> int | None:
    """The culprit's step; with nobody named, the lowest one known."""
    if located.root is not None and located.root.step is not None:
        return located.root.step
    return min((rank.step for rank in evidence.ranks if rank.step is not None), default=None)


def _summary(located: Located, step: int | None, why: str) -> str:
    """One plain sentence without a full stop, for it is quoted inside others."""
    root = located.root
    at = f" at step {step}" if step is not None else ""
    at += f" (data position {root.position})" if root is not None and root.position else ""
    at += f"; {why}" if why else ""
    if root is None:
        return texts.quote((located.phrase or located.message) + at)
    pid = f", pid {root.pid}" if root.pid else ""
    return texts.quote(f"rank {root.rank} (node {root.node or '?'}{pid}) {located.phrase}{at}")
