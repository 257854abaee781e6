#!/usr/bin/env python3
"""What checkpoints cost, beside a plain copy and beside what else one might use; one bar for each promise.

    make bench-checkpoint
    python bench/checkpoint.py [--rounds 5] [--only stall,load] [--params-m 92] [--json FILE] [--markdown]

About 1.1 GB of fp32 parameters and AdamW state in one process (the loop: two ranks). The cases of a round run one after
the other, each in a fresh process, the next round starts over: what is compared was measured seconds apart. Figures:

    stall    how long a warm save keeps training from the tensors, synchronous staging
    durable  from save() to committed: every byte and name forced to the medium
    overlap  what a 2 s step loses with overlapped staging: save() and the wait before the next optimizer step
    first    the first save of a run, and after a resume, against the following ones
    memory   what saving takes beside the state, over the process tree (PSS), with one and with two slots
    load     verified against unverified, safetensors and dcp.load, into tensors that exist, from the page cache;
             verified against unverified from the disk as well
    loop     two DDP ranks that save every ten steps against the same loop that never saves
    planning the work of rank 0 for a save of many simulated ranks: planning.py, with bars of its own

The exit code is 0 only if every bar holds. With a small --params-m fixed costs weigh more: that only checks that
everything runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import checkpoint_report as report
import peers
from checkpoint_children import Result, run_case, run_loop, sweep

OUT = Path(__file__).parent / "out"
FIGURES = ("stall", "durable", "overlap", "first", "memory", "load", "loop", "planning")
VARIANTS = ("never", "midwatch", "midwatch overlapped", "DCP async", "DCP async, reused stager", "torchsnapshot")
CASES: dict[str, tuple[str, ...]] = {
    "stall": ("stall", "dcp-default", "dcp-reused", "torchsnapshot", "torch_checkpointing"),
    "durable": ("stall", "dcp-sync"),
    "overlap": ("overlap",),
    "first": ("first",),
    "memory": ("memory-1", "memory-2"),
    "load": ("load", "safetensors", "dcp-sync"),
    "loop": (),
    "planning": (),
}
SLOW = ("torchsnapshot", "torch_checkpointing")
SAVES = {"dcp-default": 1, "dcp-reused": 2, "dcp-sync": 2, "overlap": 2, **dict.fromkeys(SLOW, 1)}
"""Warm saves a round, where not three: the others' take longest."""
ROUNDS = {"memory-1": 1, "memory-2": 1, **dict.fromkeys(SLOW, 3)}
"""Rounds out of five, where not all: memory does not vary, and the rest of the time is better spent on the ratios."""


def rounds_of(case: str, rounds: int) -> int:
    return max(1, round(rounds * ROUNDS.get(case, 5) / 5))


def cases_of(figures: list[str]) -> list[str]:
    return list(dict.fromkeys(case for figure in figures for case in CASES[figure]))


def one_round(number: int, figures: list[str], args: argparse.Namespace, folder: Path) -> dict[str, Result]:
    found: dict[str, Result] = {}

    def run(name: str, work: object) -> None:
        began = time.monotonic()
        assert callable(work)
        found[name] = work()
        took_s = time.monotonic() - began
        print(f"round {number + 1}: {name:32s} {took_s:5.0f} s  {found[name].get('error', '')}", flush=True)

    # Every other round backwards, so that no case always follows the same one.
    cases = [case for case in cases_of(figures) if number < rounds_of(case, args.rounds)]
    for case in reversed(cases) if number % 2 else cases:
        if case == "first":
            place = Path(tempfile.mkdtemp(dir=folder))
            for name in ("first", "first-resumed"):
                run(name, lambda place=place: run_case("first", args.params_m, 2, place, keep=True))
        else:
            run(case, lambda case=case: run_case(case, args.params_m, SAVES.get(case, 3), folder))
        sweep(folder)
    if "loop" in figures and number < rounds_of("loop", args.rounds):
        for variant in reversed(VARIANTS) if number % 2 else VARIANTS:
            run(f"loop {variant}", lambda variant=variant: run_loop(variant, args.pairs, folder))
            sweep(folder)
    return found


def rows_of(rounds: list[dict[str, Result]], figures: list[str]) -> list[report.Row]:
    makers = {
        "stall": report.stall_rows,
        "durable": report.durable_rows,
        "overlap": report.overlap_rows,
        "first": report.first_rows,
        "memory": report.memory_rows,
        "load": report.load_rows,
        "loop": lambda found: report.loop_rows(found, VARIANTS),
    }
    return [row for figure in figures if figure in makers for row in makers[figure](rounds)]


def planning_row() -> report.Row:
    """``planning.py`` prints its own figures; here only whether its bars hold."""
    code = subprocess.run([sys.executable, str(Path(__file__).with_name("planning.py"))]).returncode
    return report.Row("planning", "bars of planning.py that do not hold", float(bool(code)), 0.0, "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(FIGURES), help="figures, with commas between")
    parser.add_argument("--params-m", type=float, default=92.0, help="million parameters")
    parser.add_argument("--pairs", type=int, default=3, help="ten steps with a save and ten without, of the loop")
    parser.add_argument("--dir", type=Path, default=None, help="where to save; on the disk that is meant")
    parser.add_argument("--json", type=Path, default=OUT / "checkpoint.json")
    parser.add_argument("--markdown", action="store_true", help="print the table for a document")
    args = parser.parse_args()
    figures = [name for name in FIGURES if name in args.only.split(",")]
    if not figures:
        parser.error(f"--only takes {', '.join(FIGURES)}")
    trouble = peers.install()
    if trouble:
        print(f"other libraries: {trouble}", flush=True)
    began = time.monotonic()
    OUT.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=args.dir or OUT))
    rounds: list[dict[str, Result]] = []
    try:
        for number in range(args.rounds):
            rounds.append(one_round(number, figures, args, folder))
            args.json.write_text(json.dumps({"params_m": args.params_m, "rounds": rounds}, indent=1))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = rows_of(rounds, figures)
    if "planning" in figures:
        rows.append(planning_row())
    print("\n" + report.text(rows, markdown=args.markdown))
    for line in report.errors(rounds):
        print(f"not measured: {line}")
    print(f"\n{time.monotonic() - began:.0f} s; everything measured is in {args.json}")
    return 1 if any(row.verdict == "BROKEN" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
