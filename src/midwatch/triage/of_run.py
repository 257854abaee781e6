"""What the guards say of a run by what it wrote down: the end of its journals, a few thousand steps.

Evidence on demand. Training pays nothing for it, and as journals are kept the answer is the same the next morning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from midwatch.audit import journal_name, read_journal
from midwatch.config import GuardsConfig
from midwatch.core import MetricsError, TriageError
from midwatch.guards import Guards, sample_of
from midwatch.triage.replaying import Replayed

MOST_STEPS: Final = 5000
"""Half a second's work, and far beyond what any rule looks back to."""
MOST_BYTES: Final = 64 << 20
"""Of journals that are read for it, in about a second. What is longer is judged by ``midwatch triage --csv``."""
ATTEMPTS: Final = 8
"""The last ones that logged anything: one that was just begun knows too little."""


def replay_run(run_dir: Path, rules: GuardsConfig | None = None) -> Replayed:
    """Run all guards over what the last attempts logged.

    Args:
        rules: ``[guards]`` as the run has it.

    Raises:
        TriageError: TR101 there is nothing to judge, or too much to be read in a moment.
    """
    where = str(run_dir / "metrics")
    try:
        records = [one for one in read_journal(_newest(run_dir / "metrics")) if isinstance(one.get("step"), int)]
    except (OSError, MetricsError) as error:
        raise TriageError("TR101", f"{where}: {error}", path=where) from error
    if not records:
        raise TriageError("TR101", f"{where} holds no step of the last attempts", path=where)
    return replay_records(where, records[-MOST_STEPS:], Guards(rules))


def replay_records(path: str, records: Iterable[Mapping[str, Any]], guards: Guards) -> Replayed:
    """Run all guards over records in the order of their steps; a change of attempt is a resume."""
    result = Replayed(path=path, has_plan=guards.has_plan)
    inputs: Counter[str] = Counter()
    for number, (_, group) in enumerate(groupby(records, key=lambda one: one.get("attempt"))):
        for place, record in enumerate(group):
            step: int = record["step"]
            if number and not place:
                guards.resumed(step)
                result.resumes.append(step)
            sample = sample_of(step, record)
            result.findings += guards.observe(sample).findings
            result.rows += 1
            result.first_step = step if result.first_step is None else min(result.first_step, step)
            result.last_step = step if result.last_step is None else max(result.last_step, step)
            inputs.update(name for name in record if getattr(sample, name, None) is not None)
    inputs.pop("step", None)
    result.inputs = dict(inputs)
    return result


def _newest(folder: Path) -> list[Path]:
    found: list[Path] = []
    left = MOST_BYTES
    paths = filter(_is_first_rank, folder.glob("a*.jsonl"))
    for path in sorted(paths, key=lambda path: int(path.stem.removeprefix("a")), reverse=True):
        size = path.stat().st_size
        left -= size
        if left < 0 and not found:
            message = f"{path} is too long to be judged in a moment: `midwatch triage --csv` takes its time"
            raise TriageError("TR101", message, path=str(path))
        if left < 0 or len(found) == ATTEMPTS:
            break
        found += [path] if size else []
    return found[::-1]


def _is_first_rank(path: Path) -> bool:
    attempt = path.stem.removeprefix("a")
    return attempt.isdecimal() and path.name == journal_name(int(attempt))
