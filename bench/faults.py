#!/usr/bin/env python3
"""Fault benchmark: midwatch beside torchrun, one fault at a time, measured from outside.

    python bench/faults.py list
    python bench/faults.py run --launcher midwatch --fault kill9
    python bench/faults.py compare [--rounds 3] [--faults kill9,segv]      medians, ratios, bars; by default every fault
    python bench/faults.py compare --rounds 1 --alone                      who is blamed for what, without torchrun
    python bench/faults.py speed [--rounds 5] [--faults kill9,raise]       from fault to training, beside torchrun
    python bench/faults.py restarts [--count 200]                          kill, restart, and again

For each cell: seconds from the fault until every rank of a new attempt finished a step, whom the launcher blames, and
what is left running when it is gone. torchrun runs with its shared-store defect switched off
(``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``): with its defaults two of three restarts never train again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

from fault_cells import FAULTS, HANG_FAULTS, Cell
from fault_report import report
from fault_restarts import restarts
from fault_speed import FAULTS_OF_SPEED, speed
from fault_trial import Trial

OUT = Path(__file__).parent / "out"


def compare(faults: list[str], rounds: int, out: Path, *, is_alone: bool = False) -> int:
    """Interleaves the launchers round by round, prints medians; the exit code says whether every bar holds."""
    cells: list[Cell] = []
    for _ in range(rounds):
        for fault in faults:
            launchers = (
                ["midwatch"]
                if is_alone or fault in (*HANG_FAULTS, "node_agent_kill9", "longpause", "mismatch")
                else ["torchrun", "midwatch"]
            )
            for launcher in launchers:
                cell = Trial(launcher, fault).run()
                cells.append(cell)
                out.parent.mkdir(parents=True, exist_ok=True)
                with out.open("a") as file:
                    file.write(json.dumps(asdict(cell)) + "\n")
                print(
                    f"{launcher:9s} {fault:20s} again {cell.train_s} s, blames {cell.blamed} {cell.fault_class} "
                    f"{cell.confidence}, rc {cell.rc}, left {cell.leftovers}",
                    flush=True,
                )
                if not cell.leftovers:
                    shutil.rmtree(cell.dir, ignore_errors=True)
    return report(cells, faults)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list")
    one = verbs.add_parser("run")
    one.add_argument("--launcher", choices=("midwatch", "torchrun"), default="midwatch")
    one.add_argument("--fault", choices=FAULTS, required=True)
    many = verbs.add_parser("compare")
    many.add_argument("--rounds", type=int, default=3)
    many.add_argument("--faults", default=",".join(FAULTS))
    many.add_argument("--alone", action="store_true", help="without torchrun: culprits and bars, no ratios")
    many.add_argument("--out", type=Path, default=OUT / "faults.jsonl")
    fast = verbs.add_parser("speed")
    fast.add_argument("--rounds", type=int, default=5)
    fast.add_argument("--faults", default=",".join(FAULTS_OF_SPEED))
    fast.add_argument("--out", type=Path, default=OUT / "speed.jsonl")
    again = verbs.add_parser("restarts")
    again.add_argument("--count", type=int, default=200)
    args = parser.parse_args()
    if args.verb == "list":
        print("\n".join(f"{name:20s} {text}" for name, text in FAULTS.items()))
    elif args.verb == "run":
        print(json.dumps(asdict(Trial(args.launcher, args.fault).run()), indent=1))
    elif args.verb == "compare":
        return compare(args.faults.split(","), args.rounds, args.out, is_alone=args.alone)
    elif args.verb == "speed":
        return speed(args.faults.split(","), args.rounds, args.out)
    else:
        return restarts(args.count)
    return 0


if __name__ == "__main__":
    sys.exit(main())
