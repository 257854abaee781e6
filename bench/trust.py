#!/usr/bin/env python3
"""The corruption and crash matrix: the same faults for midwatch and for what else one might save with.

    make bench-trust
    python bench/trust.py [--columns midwatch,DCP] [--rows "SIGKILL,fsync"] [--json FILE] [--markdown] [--notes]

Each trial does one thing to one checkpoint (about 10 MB, parameters and AdamW) and then loads as a user would: the
newest that the format itself calls complete; midwatch by ``resume``. A cell counts what came of its trials:

    harmless       the damage hit nothing that matters: the newest state, bit for bit
    recovered      a saved state, bit for bit, without a hand; after damage: an older one, and it was said why
    detected       an error, nothing wrong handed out; the user has to find an older one that is good
    died           the loading process died of it (SIGBUS of a mapped file) or hung
    older          an older state without a word about the newer one
    forgotten      the save had said that all is well, the power cut took it
    false success  the save said that all is well, and what it left cannot be loaded
    lost           nothing is left that can be loaded
    SILENT         no error, and at least one tensor is wrong: another step's, a mix, or bits nobody saved

How the faults are made: damage is done to the files. Full disk, failing fsync, bad sectors and SIGKILL come from a
preloaded library below Python, C++ and Rust (``iotrap.c``): for each operation k of a save (write, create, fsync,
rename, ...) one trial, in a fresh process that is really killed; a killed write is torn. A power cut is replayed from
the library's log of one save (``trust_replay.py``), once for each operation, in two ways: everything that was not
synced is gone, or names arrived and bytes did not. The log must explain what the save left, or the cell says so.

Fair to the others: a half-written folder that the format itself does not call complete is passed over, an error counts
as detected whatever it says. The exit code is 0 only if midwatch's cells are all harmless or recovered.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import iotrap
import peers

BENCH = Path(__file__).parent
OUT = BENCH / "out"
SEVERITY = (
    "SILENT",
    "lost",
    "false success",
    "forgotten",
    "died",
    "older",
    "detected",
    "refuses",
    "recovered",
    "harmless",
)
GOOD = {"harmless", "recovered"}
COLUMNS = ("midwatch", "torch.save", "safetensors", "DCP", "DCP 2 threads", "torchsnapshot", "torch_checkpointing")
ROWS = (
    "one bit flipped",
    "4 KiB zeroed",
    "truncated to half",
    "file missing",
    "shards of two ranks exchanged",
    "stale shard of another step",
    "shard of another run",
    "one rank never wrote",
    "disk full at one write",
    "disk full from a write on",
    "fsync fails",
    "bad sector when read",
    "SIGKILL, save beside the old",
    "SIGKILL, save over the old",
    "power cut, all not synced gone",
    "power cut, names arrived",
)
NEEDS_MEMORY_BYTES = 2**29
"""Trials work in memory where this much is free: syncing hundreds of saves to a disk would prove nothing more."""
JOB_TIMEOUT_S = 900.0

Cell = dict[str, object]


def work_folder() -> Path:
    shm = Path("/dev/shm")
    is_roomy = shm.is_dir() and shutil.disk_usage(shm).free > NEEDS_MEMORY_BYTES
    return Path(tempfile.mkdtemp(prefix="bench-trust-", dir=shm if is_roomy else None))


def jobs(columns: list[str], rows: list[str]) -> list[tuple[str, list[str]]]:
    """Columns, the long one cut up, so that two cores are busy to the end."""
    found: list[tuple[str, list[str]]] = []
    if "midwatch" in columns:
        groups = [[r for r in rows if r.startswith("SIGKILL, save beside")], [r for r in rows if "over the old" in r]]
        groups.append([r for r in rows if r not in groups[0] + groups[1]])
        found += [("midwatch", group) for group in groups if group]
    return found + [(column, rows) for column in columns if column != "midwatch"]


def run_job(column: str, rows: list[str], library: Path | None, folder: Path) -> list[Cell]:
    place = Path(tempfile.mkdtemp(dir=folder))
    env = iotrap.environment(library, folder / f"state-{place.name}") if library else None
    env = peers.environment(env)
    env["TRUST_LOG"] = str(OUT / "trust.log")
    command = [sys.executable, "-W", "ignore", str(BENCH / "trust_column.py"), "--column", column]
    command += ["--rows", ";".join(rows), "--dir", str(place)]
    cells: list[Cell] = []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    for line in process.stdout:
        cells.append(json.loads(line))
        print(f"{column:20s} {cells[-1]['row']:32s} {text_of(cells[-1])}  ({cells[-1]['s']} s)", flush=True)
    _, errors = process.communicate(timeout=JOB_TIMEOUT_S)
    missing = [row for row in rows if row not in {cell["row"] for cell in cells}]
    why = f"the column ended with code {process.returncode}: {errors.strip()[-200:]}"
    return cells + [{"column": column, "row": row, "outcomes": {}, "why": why, "notes": [], "s": 0} for row in missing]


def text_of(cell: Cell) -> str:
    outcomes = cell["outcomes"]
    assert isinstance(outcomes, dict)
    if not outcomes:
        return "n/a" if cell["why"] == "has no ranks" else f"? {cell['why']}"
    total = sum(outcomes.values())
    known = sorted(outcomes.items(), key=lambda item: SEVERITY.index(item[0]))
    if len(known) == 1:
        return known[0][0] if known[0][0] == "refuses" else f"{known[0][0]} {total}/{total}"
    return ", ".join(f"{word} {n}" for word, n in known)


def broken(cells: list[Cell]) -> list[str]:
    """What speaks against midwatch."""
    found: list[str] = []
    for cell in cells:
        outcomes = cell["outcomes"]
        assert isinstance(outcomes, dict)
        if cell["column"] == "midwatch" and (not outcomes or not outcomes.keys() <= GOOD):
            found.append(f"{cell['row']}: {text_of(cell)}  {'; '.join(map(str, cell['notes'] or []))[:300]}")
    return found


def table(cells: list[Cell], columns: list[str], rows: list[str], *, markdown: bool) -> str:
    by_place = {(cell["row"], cell["column"]): text_of(cell) for cell in cells}
    lines = [["", *columns]] + [[row, *(by_place.get((row, column), "-") for column in columns)] for row in rows]
    if markdown:
        lines.insert(1, ["---"] * len(lines[0]))
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    blocks: list[str] = []
    for line in lines[1:]:
        blocks.append(line[0])
        blocks += [f"    {column:20s} {value[:110]}" for column, value in zip(columns, line[1:], strict=True)]
    return "\n".join(blocks)


def matching(wanted: str, known: tuple[str, ...]) -> list[str]:
    """Exact names, or parts of names."""
    words = [word.strip() for word in wanted.split(",") if word.strip()]
    exact = [name for name in known if name in words]
    return exact or [name for name in known if any(word in name for word in words)] or list(known)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", default="")
    parser.add_argument("--rows", default="")
    parser.add_argument("--json", type=Path, default=OUT / "trust.json")
    parser.add_argument("--markdown", action="store_true", help="print the table for a document")
    parser.add_argument("--notes", action="store_true", help="what the failures said")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    columns, rows = matching(args.columns, COLUMNS), matching(args.rows, ROWS)
    began = time.monotonic()
    trouble = peers.install()
    if trouble:
        print(f"other libraries: {trouble}", flush=True)
    library: Path | None = None
    try:
        library = iotrap.build(OUT)
    except RuntimeError as error:
        print(f"no fault library: {error}", flush=True)
    folder = work_folder()
    try:
        with ThreadPoolExecutor(args.workers) as pool:
            done = pool.map(lambda job: run_job(*job, library, folder), jobs(columns, rows))
            cells = [cell for job in done for cell in job]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for arena in Path("/dev/shm").glob("midwatch-trust*"):
            arena.unlink(missing_ok=True)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(cells, indent=1))
    print("\n" + table(cells, columns, rows, markdown=args.markdown))
    if args.notes:
        for cell in cells:
            print(f"\n{cell['column']}, {cell['row']}:", *(cell["notes"] or []), sep="\n    ")
    against = broken(cells)
    print(f"\n{time.monotonic() - began:.0f} s; all cells in {args.json}")
    good = "holds   midwatch: all detected, always recoverable" if "midwatch" in columns else "midwatch was not tried"
    print("\n".join(f"BROKEN  midwatch, {line}" for line in against) or good)
    return 1 if against else 0


if __name__ == "__main__":
    sys.exit(main())
