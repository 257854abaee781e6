"""What the guards found while a run trained, as its ledger has it: first-hand.

They see more than a journal keeps: every step's learning rates and loss scale, each rank's own loss, the gradients
before they are summed, the replicas' checksums. So a replay of the journal can only add to what they said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from midwatch.audit import Branches, LedgerLine, read_ledger, read_record
from midwatch.core import LedgerError, attempt_name
from midwatch.guards import TIERS, Finding

MOST_BYTES: Final = 64 << 20
"""Of ledgers that are read for it."""
MOST_FINDINGS: Final = 10_000
SAME_WITHIN: Final = 50
"""Steps within which a rule tells of one state of affairs once, so that two findings of a kind are the same one."""
_NUMBERS: Final = ("value", "low", "high", "z")


class Live(msgspec.Struct, kw_only=True):
    """What the guards said of some attempts."""

    findings: list[Finding] = []
    """In the order of the steps; without those of steps that were rolled back."""
    left_out: dict[str, int] = {}
    """The oldest ones beyond what is kept, by tier."""
    remarks: list[str] = []
    """What could not be read."""
    unknown: int = 0
    """Findings that this version does not understand."""


def found_live(run_dir: Path, attempts: Iterable[int], branches: Branches, off: Iterable[str] = ()) -> Live:
    """The findings in the ledgers of rank 0, which speaks for all ranks.

    Args:
        attempts: Of these.
        branches: Which of their steps count.
        off: Kinds that the run does not look for any more.
    """
    live = Live()
    left, kinds_off = MOST_BYTES, frozenset(off)
    for attempt in sorted(attempts, reverse=True):
        path = run_dir / "ledger" / f"{attempt_name(attempt)}-r00000.jsonl"
        try:
            left -= path.stat().st_size
            if left < 0:
                live.remarks.append(f"the ledgers up to attempt {attempt} are too long to be read in a moment")
                break
            _read(path, branches, live)
        except FileNotFoundError:
            live.remarks.append(f"attempt {attempt} has no ledger: what the guards found as it trained is not known")
        except (LedgerError, OSError) as error:
            live.remarks.append(f"what the guards found in attempt {attempt} cannot be read: {error}")
    if live.unknown:
        live.remarks.append(
            f"{live.unknown} findings of the guards are not understood: of another version of midwatch?"
        )
    found = sorted((one for one in live.findings if one.kind not in kinds_off), key=_step)
    live.left_out = Counter(one.tier for one in found[:-MOST_FINDINGS])
    live.findings = found[-MOST_FINDINGS:]
    return live


def were_on(run_dir: Path, attempts: Iterable[int]) -> bool:
    """Whether guards watched all of these attempts, as far as their records say so."""
    records = [read_record(run_dir, attempt) for attempt in attempts]
    actions = [one and one.provenance.operational.values.get("guards.action") for one in records]
    return bool(actions) and all(action not in (None, "off") for action in actions)


def merged_findings(live: Iterable[Finding], replayed: Iterable[Finding]) -> list[Finding]:
    """All of both in the order of the steps, what both found once: as the guards saw it live."""
    first_hand = list(live)
    steps: dict[str, list[Finding]] = {}
    for one in first_hand:
        steps.setdefault(one.kind, []).append(one)
    others = [one for one in replayed if not any(_covers(known, one) for known in steps.get(one.kind, ()))]
    return sorted([*first_hand, *others], key=_step)


def _covers(known: Finding, one: Finding) -> bool:
    is_near = abs(known.step - one.step) < SAME_WITHIN
    return is_near and TIERS.index(known.tier) >= TIERS.index(one.tier)


def _read(path: Path, branches: Branches, live: Live) -> None:
    expected = 0
    for line in read_ledger(path):
        if line.seq != expected:
            live.remarks.append(
                f"lines before line {line.seq + 1} of {path.name} are damaged (`midwatch ledger verify`)"
            )
        expected = line.seq + 1
        if line.event == "guard.found" and line.step is not None:
            _take(line, line.step, branches, live)


def _take(line: LedgerLine, step: int, branches: Branches, live: Live) -> None:
    if branches.is_rolled_back(line.attempt, step, line.ts_ns):
        return
    try:
        live.findings.append(msgspec.convert({**_with_numbers(line.data), "step": step}, Finding))
    except (msgspec.ValidationError, ValueError):
        live.unknown += 1


def _with_numbers(data: Mapping[str, Any]) -> dict[str, Any]:
    """A ledger has words for what is not finite."""
    words = {name: float(data[name]) for name in _NUMBERS if isinstance(data.get(name), str)}
    return {**data, **words}


def _step(finding: Finding) -> int:
    return finding.step
