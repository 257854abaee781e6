"""The real ranks and supervisors that these tests start are those of ``tests/faults``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
