"""The demo's table, read from the run's ledger and set against the plan's record of what really fired when."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from midwatch.audit import LedgerLine, merged
from midwatch.testing.demo_curves import progress_stamps
from midwatch.testing.demo_report import FaultRow
from midwatch.testing.faultplan import FaultPlan, Firing, firings

DETECTIONS = {"fault.suspected", "node.lost", "checkpoint.failed"}


def read_rows(plan: FaultPlan, plan_path: Path, run_dir: Path) -> tuple[list[FaultRow], list[str]]:
    """One row a fault that fired, and what is wrong (a fault that never fired, a resume that was not proven)."""
    lines = merged(run_dir)
    stamps = progress_stamps(run_dir)
    fired = list(firings(plan_path))
    rows = [_row(number, firing, lines, stamps) for number, firing in enumerate(fired, 1)]
    missing = {fault.id for fault in plan.faults} - {firing.fault.id for firing in fired}
    problems = [f"fault {name} never fired" for name in sorted(missing)]
    for row in rows:
        if row.again_s is None:
            problems.append(f"fault {row.number} ({row.title}): no proven resume after it")
        if not row.is_culprit_right:
            problems.append(f"fault {row.number} ({row.title}): wrong culprit {row.culprit}")
    return rows, problems


def _row(number: int, firing: Firing, lines: list[LedgerLine], stamps: list[int]) -> FaultRow:
    fault = firing.fault
    after = [line for line in lines if line.ts_ns >= firing.ts_ns]
    detected = _first(after, lambda line: line.event in DETECTIONS)
    judged = _first(after, lambda line: line.event == "fault.judged")
    proven = _first(after, lambda line: line.event == "resume.proven")
    again_ns = next((ns for ns in stamps if proven is not None and ns > proven.ts_ns), None)
    failed_step = judged.step if judged is not None and judged.step is not None else fault.step
    resumed = proven.step if proven is not None else None
    culprit, is_right = _culprit(firing, judged)
    return FaultRow(
        number=number,
        title=fault.title,
        step=fault.step,
        detect_s=_seconds(firing.ts_ns, detected.ts_ns if detected else None),
        culprit=culprit,
        is_culprit_right=is_right,
        resumed_step=resumed,
        steps_redone=None if resumed is None else max(failed_step - resumed, 0),
        again_s=_seconds(firing.ts_ns, again_ns),
        remarks=tuple(_remarks(firing, after, proven)),
    )


def _culprit(firing: Firing, judged: LedgerLine | None) -> tuple[str, bool]:
    if judged is None:
        return "none", False
    rank, node = judged.data.get("root_rank"), judged.data.get("root_node")
    if firing.fault.kind == "kill_agent":
        return f"agent of {node}", rank is None and bool(node)
    return ("none" if rank is None else f"rank {rank}"), rank == firing.fault.rank


def _remarks(firing: Firing, after: list[LedgerLine], proven: LedgerLine | None) -> Iterable[str]:
    """What else the records say between the fault and the resume: damage found, saves lost."""
    if firing.note:
        yield firing.note
    for line in after:
        if proven is not None and line.ts_ns > proven.ts_ns:
            return
        if line.event == "checkpoint.rejected":
            yield f"{line.data.get('name', 'a checkpoint')} rejected and quarantined: {line.data.get('reason', '')}"
        if line.event == "checkpoint.failed":
            yield f"save lost: {line.data.get('message', '')}"


def _first(lines: list[LedgerLine], wanted: Callable[[LedgerLine], bool]) -> LedgerLine | None:
    return next((line for line in lines if wanted(line)), None)


def _seconds(begin_ns: int, end_ns: int | None) -> float | None:
    return None if end_ns is None else max(end_ns - begin_ns, 0) / 1e9
