"""Runs an unchanged training script with a fault plan armed: ``python -m midwatch.testing.inject PLAN SCRIPT ARGS...``.

The strike point is PyTorch's public hook before every optimizer step, so a fault comes in mid-step: the gradients are
there, the weights are still the old ones. The step number is the one the rank itself published in its pulse slot.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from midwatch.pulse import PulseReader
from midwatch.testing.faultplan import Fault, fire, has_fired, load_plan

WRITER_MODULE = "midwatch.checkpoint.persist"
CRASH_AFTER_STEPS = 4
"""A killed writer alone does not stop training; the crash that follows shows that the torn save is never used."""


class Injector:
    """The faults of one rank, struck from its optimizer hook."""

    def __init__(self, plan_path: Path, rank: int, local_rank: int, pulse_path: str) -> None:
        self._plan_path = plan_path
        plan = load_plan(plan_path)
        self._checkpoints = Path(plan.checkpoints)
        self._faults = [fault for fault in plan.faults if fault.rank == rank]
        self._slots = PulseReader(pulse_path)
        self._local_rank = local_rank
        self._crash_at: int | None = None

    def before_optimizer_step(self, *_: Any) -> None:
        step = self._slots.read(self._local_rank).step
        if step is None:
            return
        if self._crash_at is not None and step >= self._crash_at:
            os.kill(os.getpid(), signal.SIGKILL)
        for fault in self._faults:
            if fault.step == step and not has_fired(self._plan_path, fault):
                self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        if fault.kind == "kill_writer":
            threading.Thread(target=self._kill_writer_during_save, args=(fault,), daemon=True).start()
            return
        note = self._flip_bit_in_newest() if fault.kind == "flip_bit" else ""
        if not fire(self._plan_path, fault, note):
            return
        if fault.kind == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == "kill_agent":
            os.kill(os.getppid(), signal.SIGKILL)
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    def _flip_bit_in_newest(self, timeout_s: float = 30.0) -> str:
        from midwatch.checkpoint.format import newest_verified, shard_file
        from midwatch.testing.corrupt import flip_bit

        deadline = time.monotonic() + timeout_s
        # The save behind us may still be on its way to "verified"; damage must hit the one a resume would choose.
        while any(self._checkpoints.glob("*.partial")) and time.monotonic() < deadline:
            time.sleep(0.01)
        newest = newest_verified(self._checkpoints)
        if newest is None:
            raise RuntimeError(f"no verified checkpoint in {self._checkpoints} to damage: plan the fault later")
        damage = flip_bit(Path(newest.path) / shard_file(0))
        return f"one bit flipped in byte {damage.begin} of {damage.file} of {newest.name}"

    def _kill_writer_during_save(self, fault: Fault, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            in_flight = next((p for p in self._checkpoints.glob("step-*.partial")), None)
            if in_flight is not None and (writer := _writer_of(os.getpid())) is not None:
                writer.kill()
                _await_death(writer)
                if in_flight.exists() and fire(self._plan_path, fault, f"writer {writer.pid} during {in_flight.name}"):
                    step = self._slots.read(self._local_rank).step or fault.step
                    self._crash_at = step + CRASH_AFTER_STEPS
                    return
            time.sleep(0.0005)


def _await_death(process: psutil.Process) -> None:
    """Until it can do no more, without reaping it: that is its parent's right, and how the parent learns of it."""
    try:
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.0005)
    except psutil.NoSuchProcess:
        return


def _writer_of(pid: int) -> psutil.Process | None:
    for child in psutil.Process(pid).children():
        try:
            if WRITER_MODULE in child.cmdline():
                return child
        except psutil.Error:
            continue
    return None


def main() -> None:
    plan_path, script, *args = sys.argv[1:]
    _arm(Path(plan_path))
    sys.argv = [script, *args]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def _arm(plan_path: Path) -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    env = os.environ
    slot = int(env.get("MIDWATCH_SLOT") or env["LOCAL_RANK"])
    injector = Injector(plan_path, int(env["RANK"]), slot, env["MIDWATCH_PULSE"])
    register_optimizer_step_pre_hook(injector.before_optimizer_step)


if __name__ == "__main__":
    main()
