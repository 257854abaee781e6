"""The table of the fault benchmark, and which bars do not hold."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from fault_cells import FAULT_STEP, HANG_FAULTS, NOBODY_TO_BLAME, Cell


def report(cells: list[Cell], faults: list[str]) -> int:
    head = ("fault", "torchrun: training again s", "midwatch: training again s", "torchrun blames", "midwatch blames")
    print("\n| " + " | ".join((*head, "class", "left", "bars")) + " |")
    print("|---|---|---|---|---|---|---|---|")
    is_good = True
    for fault in faults:
        theirs = [c for c in cells if c.fault == fault and c.launcher == "torchrun"]
        ours = [c for c in cells if c.fault == fault and c.launcher == "midwatch"]
        broken = list(broken_bars(fault, theirs, ours))
        is_good &= not broken
        seconds = ["-" if fault in NOBODY_TO_BLAME else median(c.train_s for c in side) for side in (theirs, ours)]
        print(
            f"| {fault} | {seconds[0]} | {seconds[1]} | {blames(theirs)} | "
            f"{blames(ours)} | {ours[0].fault_class if ours else ''} | {sum(len(c.leftovers) for c in ours)} | "
            f"{'; '.join(broken) or 'ok'} |"
        )
    return 0 if is_good else 1


def broken_bars(fault: str, theirs: list[Cell], ours: list[Cell]) -> Iterator[str]:
    if any(c.leftovers for c in ours):
        yield "left something running"
    if fault in ("none", "longpause"):
        if any(c.attempts != 1 or c.rc != 0 for c in ours):
            yield "false alarm"
        return
    if fault.startswith("launcher"):
        return
    if not all(c.is_culprit_right for c in ours):
        yield "culprit wrong"
    if not all(c.is_class_right for c in ours):
        yield "called something else"
    if fault == "determ" and any(c.rc != 93 for c in ours):
        yield "not stopped with 93"
    if fault == "mismatch" and any(c.differed_at is not None and c.differed_at - FAULT_STEP > 3 for c in ours):
        yield "out of step for more than 3 steps"
    if any(c.train_s is None for c in ours) and fault != "determ":
        yield "did not train again"
    known = [c.train_s for c in theirs if c.train_s is not None]
    mine = [c.train_s for c in ours if c.train_s is not None]
    if known and mine and statistics.median(mine) > statistics.median(known) + 0.5:
        yield "slower than torchrun + 0.5 s"
    if fault in HANG_FAULTS:
        yield from broken_hang_bars(fault, ours)


def broken_hang_bars(fault: str, ours: list[Cell]) -> Iterator[str]:
    for c in ours:
        if c.suspected_s is None or c.confirmed_s is None or c.deadline_s is None:
            yield "never suspected or confirmed"
        elif c.deadline_s > 5.0 or c.suspected_s > c.deadline_s + 1 or c.confirmed_s > c.deadline_s + 2:
            yield f"late: deadline {c.deadline_s}, suspected {c.suspected_s}, confirmed {c.confirmed_s}"
        elif fault == "sigstop" and c.confirmed_s > 2:
            yield f"a stopped rank took {c.confirmed_s} s"


def median(values: Iterator[float | None]) -> str:
    known = list(values)
    if not known:
        return "-"
    numbers = [v for v in known if v is not None]
    never = len(known) - len(numbers)
    text = f"{statistics.median(numbers):.2f}" if numbers else ""
    return text + (f" (never: {never} of {len(known)})" if never else "")


def blames(cells: list[Cell]) -> str:
    named = {c.blamed_node if c.fault == "node_agent_kill9" else c.blamed for c in cells}
    is_right = all(c.is_culprit_right or c.fault in NOBODY_TO_BLAME for c in cells)
    return ", ".join(sorted("-" if who is None else str(who) for who in named)) + ("" if is_right else " WRONG")
