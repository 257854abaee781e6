"""A certain exit of one rank, from its end to training again: midwatch beside torchrun, by turns, with the bars.

Counted from the end of the first process, for both: what an exception takes to unwind before (0.3 to 0.5 s, printed
too) is the script's own. Training again means that every new rank has finished a step, which itself takes 0.05 s.

The fault comes once the run has settled (midwatch has its parked process), which is when crashes come that cost
anything. Both forms of the script are measured: unchanged (it resumes from a step number in a file, with both
launchers) and with the five lines (midwatch alone: the newest verified checkpoint is loaded and the resume proved).
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import statistics
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

from fault_cells import FAULT_STEP, Cell
from fault_trial import Trial

FAULTS_OF_SPEED = ("kill9", "segv", "raise", "exit3", "orphan")
RATIO_BAR = 0.25
STOP_BAR_S = 0.5
_MANY_STEPS = 100_000
_SETTLE_S = 90.0
"""For the parked process to be ready; after that the fault comes anyway, and the restart is a cold one."""
_END_S = 40.0
_SAID = ("the next restart is warm", "restarts are cold")


class SpeedTrial(Trial):
    """Hurts a run that has settled, waits for training, and asks the launcher to end."""

    def __init__(self, launcher: str, fault: str, form: str) -> None:
        super().__init__(launcher, fault, budget_s=_SETTLE_S + 60.0)
        self.cell.form = form
        self.signal = self.dir / "now"

    def command(self) -> list[str]:
        command = super().command()
        command[command.index("--steps") + 1] = str(_MANY_STEPS)
        return [*command, "--on", str(self.signal), *(["--five-lines"] if self.cell.form == "five" else [])]

    def watch(self, process: subprocess.Popen) -> None:
        super().watch(process)
        if self.cell.rc is None:
            process.send_signal(signal.SIGTERM)
            try:
                self.cell.rc = process.wait(_END_S)
            except subprocess.TimeoutExpired:
                return

    def hurt_launcher(self, process: subprocess.Popen, events: list[dict]) -> None:
        """Called in every look; here it is the rank that is told to hurt itself."""
        if not self.signal.exists():
            stepped = {e["rank"] for e in events if e["ev"] == "step" and e["step"] >= FAULT_STEP}
            if len(stepped) >= self.nproc and self.has_settled(events):
                self.signal.touch()

    def has_settled(self, events: list[dict]) -> bool:
        if self.cell.launcher == "torchrun" or time.time() - events[0]["t"] > _SETTLE_S:
            return True
        text = (self.dir / "launcher.log").read_text(errors="replace")
        return any(words in text for words in _SAID)

    def is_over(self) -> bool:
        return self.cell.train_s is not None and self.cell.stopped_s is not None


def speed(faults: list[str], rounds: int, out: Path) -> int:
    """Prints a row a fault; the exit code says whether both bars hold."""
    cells: list[Cell] = []
    for _ in range(rounds):
        for fault in faults:
            for launcher, form in (("torchrun", "plain"), ("midwatch", "plain"), ("midwatch", "five")):
                cell = SpeedTrial(launcher, fault, form).run()
                cells.append(cell)
                out.parent.mkdir(parents=True, exist_ok=True)
                with out.open("a") as file:
                    file.write(json.dumps(asdict(cell)) + "\n")
                print(
                    f"{launcher:9s}{form:6s}{fault:8s} stopped {cell.stopped_s} s, training again {cell.again_s} s "
                    f"(from the fault {cell.train_s} s), warm {cell.is_warm}, "
                    f"blames {cell.blamed} {cell.confidence}, left {cell.leftovers}",
                    flush=True,
                )
                if not cell.leftovers and cell.train_s is not None:
                    shutil.rmtree(cell.dir, ignore_errors=True)
    return report(cells, faults)


def report(cells: list[Cell], faults: list[str]) -> int:
    print("\n| fault | torchrun s | midwatch, unchanged s | of torchrun | midwatch, five lines s | of torchrun |")
    print("|---|---|---|---|---|---|")
    for fault in [*faults, "all"]:
        mine = [c for c in cells if fault in (c.fault, "all")]
        base = middle(mine, "torchrun", "plain")
        row = [fault, f"{base:.2f}"]
        for form in ("plain", "five"):
            value = middle(mine, "midwatch", form)
            row += [f"{value:.2f}", f"{value / base:.2f}"]
        print("| " + " | ".join(row) + " |")
    ours = [c for c in cells if c.launcher == "midwatch"]
    base = middle(cells, "torchrun", "plain")
    late = percentile([math.inf if c.stopped_s is None else c.stopped_s for c in ours], 0.95)
    bars = {
        f"training again, unchanged, <= {RATIO_BAR} x torchrun": middle(cells, "midwatch", "plain") <= RATIO_BAR * base,
        f"training again, five lines, <= {RATIO_BAR} x torchrun": middle(cells, "midwatch", "five") <= RATIO_BAR * base,
        f"exit to peers stopped p95 {late:.2f} s <= {STOP_BAR_S} s": late <= STOP_BAR_S,
        "all trained again": all(c.train_s is not None for c in ours),
        "all were warm": all(c.is_warm for c in ours),
        "culprit named": all(c.is_culprit_right for c in ours),
        "nothing left": not any(c.leftovers for c in ours),
    }
    for bar, holds in bars.items():
        print(f"{'holds ' if holds else 'BROKEN'}  {bar}")
    return 0 if all(bars.values()) else 1


def middle(cells: list[Cell], launcher: str, form: str) -> float:
    """The median; a run that never trained again counts as endless."""
    own = [c for c in cells if (c.launcher, c.form) == (launcher, form)]
    return statistics.median(math.inf if c.again_s is None else c.again_s for c in own) if own else math.nan


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]
