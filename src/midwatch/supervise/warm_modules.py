"""What the ranks of an attempt have imported: as the library noted it, or as the kernel shows it of any script."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Final

from midwatch.storage import read_regular
from midwatch.supervise.procs import read_stat

_TORCH_TOO: Final = (
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch.optim",
    "torch._dynamo",
)
"""What training scripts import late, ``torch._dynamo`` in the first optimizer step: half of a cold start."""


def noted_modules(run_dir: Path, node: str) -> list[str]:
    """What the library noted on this node at its first step; empty when it did not."""
    noted = run_dir / "supervisor" / f"imports-{node}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return [name for name in json.loads(read_regular(noted))["modules"] if isinstance(name, str)]
    return []


def _mapped(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return []
    found: dict[str, None] = {}
    for line in text.splitlines():
        for marker in ("/site-packages/", "/dist-packages/"):
            place, at, rest = line.partition(marker)
            name = rest.split("/")[0]
            if place and at and "/" in rest and name.isidentifier() and not name.startswith("_"):
                found[name] = None
    return list(found)


def mapped_packages(pid: int) -> list[str]:
    """Top-level packages whose shared libraries a process has mapped; torch's own late imports too."""
    found = _mapped(pid)
    return [*found, *(_TORCH_TOO if "torch" in found else ())]


def age_s(pid: int) -> float:
    """How long a process has lived; 0 when it is gone."""
    stat = read_stat(pid)
    if stat is None:
        return 0.0
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return uptime_s - stat.start_ticks / os.sysconf("SC_CLK_TCK")
