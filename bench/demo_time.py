#!/usr/bin/env python3
"""Runs the demo once and holds it to its bar: all faults survived, weights bit-identical, under five minutes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

BAR_S = 300.0


def main() -> int:
    began = time.monotonic()
    done = subprocess.run([str(Path(sys.executable).with_name("midwatch")), "demo"], check=False)
    seconds = time.monotonic() - began
    print(f"demo: exit code {done.returncode}, {seconds:.0f} s (bar {BAR_S:.0f} s)")
    return 0 if done.returncode == 0 and seconds < BAR_S else 1


if __name__ == "__main__":
    sys.exit(main())
