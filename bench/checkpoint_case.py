"""One case of the checkpoint figures, in a process of its own; prints ``RESULT`` and a JSON object."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import checkpoint_midwatch as ours
import checkpoint_peers as theirs
import torch

CASES: dict[str, Any] = {
    "stall": ours.stall,
    "overlap": ours.overlap,
    "first": ours.first,
    "memory-1": partial(ours.memory, slots=1),
    "memory-2": partial(ours.memory, slots=2),
    "load": ours.load,
    "dcp-default": theirs.dcp_default,
    "dcp-reused": theirs.dcp_reused,
    "dcp-sync": theirs.dcp_sync,
    "torchsnapshot": theirs.torchsnapshot,
    "torch_checkpointing": theirs.torch_checkpointing,
    "safetensors": theirs.safetensors,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--params-m", type=float, default=92.0)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--dir", type=Path, required=True)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    if not args.case.startswith(("stall", "overlap", "first", "memory", "load")):
        logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    result = CASES[args.case](args.params_m, args.dir, args.saves)
    print("RESULT " + json.dumps(result), flush=True)
    if not args.case.startswith("memory"):
        os._exit(0)  # some of the others leave threads and processes that wait


if __name__ == "__main__":
    sys.exit(main())
