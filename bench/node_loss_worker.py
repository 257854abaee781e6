"""The training program of the node-loss benchmark: lockstep through files, the five lines' pulse, no torch.

What a node costs when it is lost is the supervisor's time; how long a library takes to import is measured apart, and
would only blur it here. A rank writes each of its steps' number, and the first one's time.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from midwatch.pulse import Flag, writer_from_env


def main() -> None:
    home, rank, world = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = int(os.environ["MIDWATCH_ATTEMPT"])
    pulse = writer_from_env()
    assert pulse is not None
    done = read(home / "checkpoint", -1)
    pulse.begin(os.getpid(), attempt)
    pulse.resumed(None if done < 0 else done, "" if done < 0 else f"{done:016x}", "c" * 16)
    while not pulse.flags() & Flag.GO:
        time.sleep(0.005)
    for step in range(done + 1, 10**9):
        pulse.beat(step)
        if pulse.flags() & Flag.STOP:
            return
        write(home / f"a{attempt}-r{rank}", step)
        with pulse.phase("collective"):
            while any(read(home / f"a{attempt}-r{peer}", -1) < step for peer in range(world)):
                time.sleep(0.005)
        if not (first := home / f"first-a{attempt}-r{rank}").exists():
            write(first, time.time_ns())
        if rank == 0 and step % 5 == 0:
            write(home / "checkpoint", step)
        time.sleep(0.05)


def read(path: Path, default: int) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return default


def write(path: Path, number: int) -> None:
    part = path.with_name(f".{path.name}-{os.getpid()}")
    part.write_text(str(number))
    part.replace(path)


if __name__ == "__main__":
    main()
