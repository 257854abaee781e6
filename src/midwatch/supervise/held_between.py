"""Hold a run that is not live, or let it go on: the next start in its folder begins with that.

Written into the coordinator's own ledger, which is free between runs: what is carried over is read from there alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from midwatch.audit import Ledger, read_ledger, read_run
from midwatch.core import SuperviseError
from midwatch.supervise.decide import RunFacts


def hold_between_runs(run_dir: Path, wish: Literal["hold", "resume"], reason: str, *, is_dry: bool = False) -> str:
    """Do it, and say in one sentence what was done.

    Args:
        run_dir: Of the run.
        wish: What to do.
        reason: The person's.
        is_dry: Only say it.

    Raises:
        SuperviseError: SV110 no run was ever supervised there. LedgerError: LG102 somebody writes there at this moment.
        StorageError: The folder cannot be written.
    """
    path, info = run_dir / "ledger" / "coordinator.jsonl", read_run(run_dir)
    if info is None or not path.is_file():
        raise SuperviseError("SV110", f"{run_dir} holds no run that was supervised", path=str(run_dir))
    facts = RunFacts.from_lines(read_ledger(path)).carried_over()
    done, lines = _hold(facts, reason) if wish == "hold" else _resume(facts, reason)
    if lines and not is_dry:
        with Ledger(path, run=info.run) as ledger:
            for event, data in lines:
                ledger.record(event, cause="person", **data)
    return done


_Lines = list[tuple[str, dict[str, Any]]]


def _hold(facts: RunFacts, reason: str) -> tuple[str, _Lines]:
    if facts.hold is not None:
        return f"held already: {facts.hold[1]}", []
    return "the next start here is held", [("hold.wanted", {"by": "person", "reason": reason, "unfit": []})]


def _resume(facts: RunFacts, reason: str) -> tuple[str, _Lines]:
    lines: _Lines = []
    if facts.restarts_used or facts.history:
        lines.append(("budget.refilled", {"by": "person", "reason": reason}))
    if facts.hold is not None:
        lines.append(("hold.ended", {"by": "person", "reason": reason}))
    words = ["no longer held"] if facts.hold is not None else []
    words.append("with full restart budgets" + (" again" if facts.restarts_used or facts.history else ""))
    return f"the next start here begins {', '.join(words)}", lines
