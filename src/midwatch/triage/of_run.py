"""What the guards say of a run: what they found as it trained, and what they find now in the end of its journals.

Evidence on demand. Training pays nothing for it, and as ledgers and journals are kept the answer is the same the next
morning.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from midwatch.audit import Branches, journal_name, read_branches
from midwatch.config import GuardsConfig
from midwatch.core import MetricsError, TriageError
from midwatch.guards import NUMBERS, Guards, sample_of
from midwatch.triage.live import found_live, merged_findings, were_on
from midwatch.triage.replaying import Replayed

MOST_STEPS: Final = 5000
"""Half a second's work, and far beyond what any rule looks back to."""
MOST_BYTES: Final = 16 << 20
"""Of journals that are read for it, in about a second; of a longer one its end."""
ATTEMPTS: Final = 8
"""The last ones that logged anything: one that was just begun knows too little."""
_OF_FIRST_RANK: Final = re.compile(r"a(\d{4,9})-r00000\.jsonl")


def replay_run(run_dir: Path, rules: GuardsConfig | None = None) -> Replayed:
    """Run all guards over what the last attempts logged, and put what they found live before it.

    Args:
        rules: ``[guards]`` as the run has it.

    Raises:
        TriageError: TR101 there is nothing to judge, and nothing was found live.
    """
    rules = rules or GuardsConfig()
    folder = run_dir / "metrics"
    branches, trouble = Branches([], []), None
    try:
        branches = _branches(folder)
    except TriageError as error:
        trouble = error
    logged = [record for record in branches.records if isinstance(record.get("step"), int)]
    steps = logged[-MOST_STEPS:]
    replayed = replay_records(str(folder), steps, Guards(rules))
    live = found_live(run_dir, _attempts(run_dir, _of(logged)), branches, rules.off)
    if trouble is not None and not live.findings:
        raise trouble
    # What was wrong long ago and lasts is told once, so only notes grow old.
    seen = [one for one in live.findings if one.tier != "note" or one.step >= (replayed.first_step or 0)]
    replayed.findings = merged_findings(seen, replayed.findings)
    replayed.seen_live, replayed.left_out = len(seen), live.left_out
    replayed.was_watched = not live.remarks and were_on(run_dir, _of(steps))
    replayed.off = rules.off
    replayed.remarks += [*([trouble.message] if trouble is not None else []), *live.remarks]
    return replayed


def replay_records(path: str, records: Iterable[Mapping[str, Any]], guards: Guards) -> Replayed:
    """Run all guards over records in the order of their steps; a change of attempt is a resume."""
    result = Replayed(path=path, has_plan=guards.has_plan)
    inputs: Counter[str] = Counter()
    for number, (_, group) in enumerate(groupby(records, key=lambda one: one.get("attempt"))):
        for place, record in enumerate(_joined(group)):
            step: int = record["step"]
            if number and not place:
                guards.resumed(step)
                result.resumes.append(step)
            sample = sample_of(step, record)
            result.findings += guards.observe(sample).findings
            result.rows += 1
            result.first_step = step if result.first_step is None else min(result.first_step, step)
            result.last_step = step if result.last_step is None else max(result.last_step, step)
            inputs.update(name for name in (*NUMBERS, "lr") if getattr(sample, name) is not None)
    result.inputs = dict(inputs)
    return result


def _joined(records: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """One record for each step: numbers that came late have one of their own, behind those of later steps."""
    steps: dict[int, dict[str, Any]] = {}
    for record in records:
        steps.setdefault(record["step"], {}).update(record)
    return iter(steps.values())


def _branches(folder: Path) -> Branches:
    try:
        branches = read_branches(_newest(folder), MOST_BYTES)
    except (OSError, MetricsError) as error:
        raise TriageError("TR101", f"{folder}: {error}", path=str(folder)) from error
    if not any(isinstance(record.get("step"), int) for record in branches.records):
        raise TriageError("TR101", f"{folder} holds no step of the last attempts", path=str(folder))
    return branches


def _of(records: Iterable[Mapping[str, Any]]) -> set[int]:
    return {record["attempt"] for record in records if isinstance(record["attempt"], int)}


def _attempts(run_dir: Path, logged: set[int]) -> list[int]:
    """Those that logged the steps that are judged, and later ones that got no further; the last ones where none did."""
    names = (_OF_FIRST_RANK.fullmatch(path.name) for path in (run_dir / "ledger").glob("a*.jsonl"))
    found = sorted(int(name[1]) for name in names if name)
    return sorted(logged.union(one for one in found if one > max(logged))) if logged else found[-ATTEMPTS:]


def _newest(folder: Path) -> list[Path]:
    found: list[Path] = []
    left = MOST_BYTES
    paths = filter(_is_first_rank, folder.glob("a*.jsonl"))
    for path in sorted(paths, key=lambda path: int(path.stem.removeprefix("a")), reverse=True):
        size = path.stat().st_size
        left -= size
        if (left < 0 and found) or len(found) == ATTEMPTS:
            break
        found += [path] if size else []
    return found[::-1]


def _is_first_rank(path: Path) -> bool:
    attempt = path.stem.removeprefix("a")
    return attempt.isdecimal() and path.name == journal_name(int(attempt))
