"""Where the other checkpoint libraries are: a folder of their own, on the path of the processes that use them only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parent
FOLDER = BENCH / "out" / "peers"
REQUIREMENTS = BENCH / "peers.txt"


def install() -> str:
    """Install them unless they are there; returns what went wrong, empty: nothing.

    Without dependencies: a plain resolve may replace PyTorch. What cannot be installed becomes a row that says so.
    """
    stamp = FOLDER / ".requirements"
    if stamp.is_file() and stamp.read_text() == REQUIREMENTS.read_text():
        return ""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    command += ["--upgrade", "--target", str(FOLDER), "-r", str(REQUIREMENTS)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return f"pip: {(done.stderr.strip().splitlines() or ['failed'])[-1]}"
    stamp.write_text(REQUIREMENTS.read_text())
    return ""


def environment(base: dict[str, str] | None = None) -> dict[str, str]:
    """One thread for PyTorch, the peers behind everything else on the path."""
    env = dict(os.environ if base is None else base)
    paths = [str(BENCH), *filter(None, [env.get("PYTHONPATH")]), str(FOLDER)]
    env.update(PYTHONPATH=os.pathsep.join(paths), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    return env


if __name__ == "__main__":
    print(install() or f"in {FOLDER}")
