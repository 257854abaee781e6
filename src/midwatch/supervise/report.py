"""The report of an incident: one paragraph for people, without the names that the machinery uses, and where to look."""

from __future__ import annotations

from typing import Final

from midwatch.core import printable
from midwatch.faults import Evidence, Suspect, Verdict, class_of
from midwatch.supervise.loglines import rank_ranges

_SURE: Final = {
    "certain": "There is no doubt about it",
    "likely": "This is likely, not certain",
    "weak": "This is a guess",
    "unknown": "Nothing is known for certain",
}
_REACH: Final = {
    "G0": "nothing is broken: it was asked for",
    "G1": "it reaches no further than that rank",
    "G2": "it concerns one machine",
    "G3": "it concerns several machines that have something in common",
    "G4": "it concerns many machines at once",
    "G5": "it lies in the script, its data or its surroundings, and will happen again",
}
_DONE: Final = {
    "restart": "All ranks are started again from the newest verified checkpoint.",
    "stop": "The run ends here: starting it again would not help before something is changed.",
    "hold": "The run is held: nothing is started before things look well again, or somebody says so.",
    "requeue": "The run ends here, to be queued again.",
    "none": "Nothing was done about it.",
}
_QUOTED: Final = 40
"""Lines of evidence in the report; all of them are in ``verdict.json``."""


def report_text(verdict: Verdict, evidence: Evidence, files: tuple[str, ...] = ()) -> str:
    """What a person reads first. Everything in it that came from outside is on one line and moves no cursor.

    Args:
        verdict: The conclusion.
        evidence: What it was drawn from.
        files: Beside the report, for more.
    """
    parts = [f"Incident {verdict.incident}", "", _paragraph(verdict), ""]
    others = [suspect for suspect in verdict.suspects if suspect.rank != verdict.root_rank or verdict.root_rank is None]
    if others and verdict.confidence != "certain":
        parts += ["Others that come into question:", *(f"  - {_suspect(suspect)}" for suspect in others), ""]
    if verdict.evidence:
        parts += ["What this rests on:", *(f"  - {printable(line)}" for line in verdict.evidence[:_QUOTED]), ""]
    if evidence.lost_nodes:
        parts += [f"Nodes that do not answer: {', '.join(printable(node) for node in evidence.lost_nodes)}", ""]
    if files:
        parts += [f"Beside this file: {', '.join(files)}", ""]
    return "\n".join(parts)


def _paragraph(verdict: Verdict) -> str:
    sentences = [f"{_start(printable(verdict.summary).rstrip('.'))}.", f"In other words: {_kind(verdict)}."]
    if verdict.root_rank is None and not verdict.root_node:
        sentences.append(f"Nobody in particular is to blame. {_SURE[verdict.confidence]}; {_REACH[verdict.grade]}.")
    else:
        sentences.append(
            f"The cause is laid to {_where(verdict)}. {_SURE[verdict.confidence]}; {_REACH[verdict.grade]}."
        )
    if verdict.domain:
        sentences.append(f"What the failed machines share: {printable(verdict.domain)}.")
    if verdict.victims:
        one = len(verdict.victims) == 1
        who = f"{'Rank' if one else 'Ranks'} {rank_ranges(sorted(verdict.victims))}"
        sentences.append(f"{who} stopped because of it and {'is' if one else 'are'} not to blame.")
    sentences.append(_DONE[verdict.action])
    if verdict.advice:
        sentences.append(f"{_start(printable(verdict.advice))}.")
    return " ".join(sentences)


def _where(verdict: Verdict) -> str:
    rank = "" if verdict.root_rank is None else f"rank {verdict.root_rank}"
    node = f"node {printable(verdict.root_node)}" if verdict.root_node else ""
    step = "" if verdict.step is None else f" at step {verdict.step}"
    return f"{' on '.join(word for word in (rank, node) if word)}{step}"


def _kind(verdict: Verdict) -> str:
    return class_of(verdict.fault_class).title.rstrip(".")


def _suspect(suspect: Suspect) -> str:
    who = f"node {printable(suspect.node)}" if suspect.rank is None else f"rank {suspect.rank}"
    reasons = f": {'; '.join(printable(reason) for reason in suspect.reasons)}" if suspect.reasons else ""
    return f"{who} ({suspect.weight:.0%}){reasons}"


def _start(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
