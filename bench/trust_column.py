"""One column of the trust matrix in a process of its own, under the fault library; prints a JSON line per cell."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import trust_ranks as ranked
import trust_rows as rows
from iotrap import is_loaded
from trust_formats import (
    Dcp,
    DcpTwoThreads,
    Format,
    Safetensors,
    TorchCheckpointing,
    TorchSave,
    TorchSnapshot,
    quieten,
)
from trust_midwatch import Midwatch

COLUMNS: dict[str, type[Format]] = {
    kind.name: kind
    for kind in (Midwatch, TorchSave, Safetensors, Dcp, DcpTwoThreads, TorchSnapshot, TorchCheckpointing)
}

DAMAGE: dict[str, Callable[[rows.Bench], Iterator[str]]] = {
    "one bit flipped": rows.flip_bits,
    "4 KiB zeroed": rows.zero_blocks,
    "truncated to half": rows.truncate,
    "file missing": rows.remove,
}
RANKED: dict[str, Callable[[ranked.RankBench], Iterator[str]]] = {
    "shards of two ranks exchanged": ranked.exchange,
    "stale shard of another step": ranked.stale,
    "shard of another run": ranked.foreign,
    "one rank never wrote": ranked.never_wrote,
}
INJECTED: dict[str, Callable[[rows.Bench], Iterator[str]]] = {
    "disk full at one write": partial(rows.full_disk, is_sticky=False),
    "disk full from a write on": partial(rows.full_disk, is_sticky=True),
    "fsync fails": rows.failing_sync,
    "bad sector when read": rows.bad_sectors,
    "SIGKILL, save beside the old": partial(rows.killed, template="one", place=2),
    "SIGKILL, save over the old": partial(rows.killed, template="one", place=1),
    "power cut, all not synced gone": partial(rows.power_cut, template="one", place=2, forgets_names=True),
    "power cut, names arrived": partial(rows.power_cut, template="one", place=2, forgets_names=False),
}
ROWS = (*DAMAGE, *RANKED, *INJECTED)


def run(name: str, wanted: set[str], folder: Path) -> None:
    try:
        column = COLUMNS[name]()
        if isinstance(column, Midwatch):
            column.tag = f"trust{folder.name[-8:]}"
        bench = rows.Bench(column, folder / "one-rank")
        bench.prepare()
    except Exception as error:
        for row in wanted:
            emit(name, row, why=f"does not run here: {type(error).__name__}: {error}"[:300])
        return
    for row, work in {**DAMAGE, **INJECTED}.items():
        if row in wanted:
            why = "" if row in DAMAGE or is_loaded() else "the fault library is not loaded"
            cell(name, row, lambda work=work: work(bench), bench.notes, why)
    if wanted & RANKED.keys():
        run_ranked(name, column, wanted, folder)


def run_ranked(name: str, column: Format, wanted: set[str], folder: Path) -> None:
    bench = ranked.RankBench(column, folder / "two-ranks")
    why = "" if column.has_ranks else "has no ranks"
    if not why:
        try:
            bench.prepare()
        except Exception as error:
            why = f"does not run here: {error}"[:300]
    for row, work in RANKED.items():
        if row in wanted:
            cell(name, row, lambda work=work: work(bench), bench.notes, why)


def cell(name: str, row: str, work: Callable[[], Iterator[str]], notes: list[str], why: str) -> None:
    notes.clear()
    began = time.monotonic()
    outcomes: Counter[str] = Counter()
    try:
        if not why:
            outcomes.update(work())
    except Exception as error:
        traceback.print_exc()
        why = f"the harness failed: {type(error).__name__}: {error}"[:300]
    emit(name, row, outcomes, why, list(dict.fromkeys(notes))[:6], time.monotonic() - began)


def emit(
    name: str,
    row: str,
    outcomes: Counter[str] | None = None,
    why: str = "",
    notes: list[str] | None = None,
    s: float = 0,
) -> None:
    line = {"column": name, "row": row, "outcomes": outcomes or {}, "why": why, "notes": notes or [], "s": round(s, 1)}
    print(json.dumps(line), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--column", choices=COLUMNS, required=True)
    parser.add_argument("--rows", default=";".join(ROWS))
    parser.add_argument("--dir", type=Path, required=True)
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    quieten()
    run(args.column, set(args.rows.split(";")), args.dir.resolve())
    rows.clean(args.dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
