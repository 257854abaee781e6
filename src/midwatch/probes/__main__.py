"""``python -m midwatch.probes NAME FOLDER``: one probe, its answer as one JSON line."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from midwatch.probes.checks import CHECKS, OF_PLACES


def main() -> None:
    name, run_dir = sys.argv[1:3]
    print(msgspec.json.encode({**CHECKS, **OF_PLACES}[name](Path(run_dir))).decode())


if __name__ == "__main__":
    main()
