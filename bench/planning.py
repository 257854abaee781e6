"""What the first rank does for all others in a save: at 64 and 256 simulated ranks with 1,500 sharded tensors each.

    python bench/planning.py [--ranks 64,256] [--tensors 1500] [--json out.json]

Ours: wait for the notes, see that the parts make whole tensors, write the manifest, check the proofs. DCP's: unpickle
the gathered plans, dedup, global plan, metadata (``DefaultSavePlanner`` as ``dcp.save`` calls it). No data are written
on either side, and the network is left out: what would travel is given in bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from midwatch.checkpoint.board import rank_mark
from midwatch.checkpoint.collect import Collector
from midwatch.checkpoint.format import (
    ManifestDraft,
    SaveJob,
    ShardIdentity,
    TensorSpec,
    plan_image,
    shard_metadata,
)
from midwatch.checkpoint.image import layout_digest
from midwatch.checkpoint.manifest import Manifest, Receipt, encode_record, note_of, receipt_file, shard_file
from midwatch.checkpoint.notes import LayoutCache, encode_note
from midwatch.storage import chunk_digest, root_digest

ROWS = 8
"""Of each rank's part of a tensor; small, as only its place counts here."""
COLUMNS = 1024
CHUNK_BYTES = 3 * 2**17
"""So that a receipt holds as many digests as that of a gigabyte in pieces of 8 MiB."""
ROUNDS = 5


class Notes:
    """A board on which everybody has posted."""

    def __init__(self, marks: dict[str, bytes]) -> None:
        self._marks = marks

    def wait(self, marks: Sequence[str], **_: object) -> dict[str, bytes]:
        return {mark: self._marks[mark] for mark in marks}

    def post(self, mark: str, data: bytes = b"") -> None:
        self._marks[mark] = data

    def open(self) -> None: ...

    def fail(self, rank: int, error: object) -> None: ...

    def close(self) -> None: ...


def specs(rank: int, ranks: int, tensors: int) -> list[TensorSpec]:
    """One rank's parts: every tensor is sharded by rows over all ranks, as fully sharded training does."""
    return [
        TensorSpec(
            key=f"model.layers.{number // 10}.block.weight_{number % 10}",
            dtype="F32",
            shape=(ROWS, COLUMNS),
            offsets=(ROWS * rank, 0),
            global_shape=(ROWS * ranks, COLUMNS),
        )
        for number in range(tensors)
    ]


def deliver(folder: Path, step: int, ranks: int, tensors: int) -> dict[str, bytes]:
    """What all ranks leave behind: receipts in the folder, notes on the board."""
    marks: dict[str, bytes] = {}
    for rank in range(ranks):
        own = specs(rank, ranks, tensors)
        owner = {"run": "bench", "attempt": 1, "step": step, "rank": rank, "world_size": ranks}
        plan = plan_image(own, metadata=shard_metadata(ShardIdentity(**owner), own, b"{}"))
        digests = [chunk_digest(b"x")] * -(-plan.size_bytes // CHUNK_BYTES)
        receipt = Receipt(
            **owner,
            file=shard_file(rank),
            size_bytes=plan.size_bytes,
            chunk_bytes=CHUNK_BYTES,
            chunks=tuple(digests),
            digest=root_digest(digests),
            entries=plan.entries,
            layout=layout_digest(plan.entries),
        )
        data = encode_record(receipt)
        (folder / receipt_file(rank)).write_bytes(data)
        marks[rank_mark("receipt", rank)] = encode_note(note_of(receipt, data))
    return marks


def job(folder: Path, step: int, ranks: int) -> SaveJob:
    return SaveJob(
        name=f"step-{step:08d}-a0001",
        step=step,
        attempt=1,
        run="bench",
        rank=0,
        world_size=ranks,
        shm_path="",
        size_bytes=0,
        entries=(),
        root=str(folder),
        run_dir=str(folder),
        is_committer=True,
        manifest=ManifestDraft(created_ns=step),
    )


def ours(ranks: int, tensors: int) -> dict[str, Any]:
    """The committer's first save of a structure, and the ones after it."""
    layouts = LayoutCache()
    with tempfile.TemporaryDirectory(prefix="midwatch-planning-") as place:
        folder = Path(place)

        def save(step: int) -> tuple[float, Manifest, int]:
            marks = deliver(folder, step, ranks, tensors)
            collector = Collector(job(folder, step, ranks), Notes(marks), layouts)
            begin = time.perf_counter()
            manifest = collector.manifest(folder, b"")
            data = encode_record(manifest)
            return time.perf_counter() - begin, manifest, len(data)

        first_s, _, size = save(1)
        later = [save(step)[0] for step in range(2, 2 + ROUNDS)]
        notes = deliver(folder, 99, ranks, tensors)
        receipts = sum(path.stat().st_size for path in folder.glob("*.receipt.json"))
    return {
        "first_s": first_s,
        "later_s": statistics.median(later),
        "notes_bytes": sum(map(len, notes.values())),
        "receipts_bytes": receipts,
        "manifest_bytes": size,
    }


def dcp(ranks: int, tensors: int) -> dict[str, Any]:
    """The coordinator's part of ``dcp.save``, of the same tensors; the same in every save, as plans are not cached."""
    import torch
    from torch.distributed.checkpoint import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties(dtype=torch.float32)

    def item(spec: TensorSpec) -> WriteItem:
        offsets, sizes = torch.Size(spec.offsets), torch.Size(spec.shape)
        chunk = ChunkStorageMetadata(offsets=offsets, sizes=sizes)
        data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(spec.global_shape))
        index = MetadataIndex(spec.key, offsets)
        return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)

    # As they arrive from the gather: bytes of each rank.
    paths = {spec.key: (spec.key,) for spec in specs(0, ranks, tensors)}
    gathered = [
        pickle.dumps(SavePlan([item(spec) for spec in specs(rank, ranks, tensors)], planner_data=paths))
        for rank in range(ranks)
    ]
    planner = DefaultSavePlanner()
    planner.set_up_planner(state_dict={}, is_coordinator=True)
    begin = time.perf_counter()
    plans = [pickle.loads(data) for data in gathered]  # noqa: S301 - our own bytes; it is what DCP does
    unpickled_s = time.perf_counter() - begin
    _, metadata = planner.create_global_plan(plans)
    planned_s = time.perf_counter() - begin - unpickled_s
    size = len(pickle.dumps(metadata))
    return {
        "every_s": time.perf_counter() - begin,
        "unpickle_s": unpickled_s,
        "plan_s": planned_s,
        "gather_bytes": sum(map(len, gathered)),
        "metadata_bytes": size,
    }


def bounded(side: str, ranks: int, tensors: int, limit_s: float) -> dict[str, Any]:
    """Measure in a process of its own, so that neither side inherits the other's memory, and give up at the limit."""
    command = [sys.executable, __file__, "--side", side, "--ranks", str(ranks), "--tensors", str(tensors)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"gave_up_s": limit_s}
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else str(done.returncode)}
    return json.loads(done.stdout)


SIDES: dict[str, Callable[[int, int], dict[str, Any]]] = {"ours": ours, "dcp": dcp}


def table(results: dict[int, dict[str, dict[str, Any]]]) -> str:
    lines = [f"{'ranks':>5}  {'':<22}{'first save':>12}{'later saves':>13}{'gathered':>11}{'metadata':>11}"]
    for ranks, sides in results.items():
        mine, theirs = sides["ours"], sides["dcp"]
        lines.append(_row(ranks, "midwatch", mine, mine.get("first_s"), mine.get("later_s"), "notes_bytes", "manifest"))
        every = theirs.get("every_s")
        lines.append(_row(ranks, "DefaultSavePlanner", theirs, every, every, "gather_bytes", "metadata"))
    return "\n".join(lines)


def _row(
    ranks: int, name: str, side: dict[str, Any], first: float | None, later: float | None, gathered: str, kept: str
) -> str:
    if first is None or later is None:
        why = side.get("failed") or f"given up after {side['gave_up_s']:.0f} s"
        return f"{ranks:>5}  {name:<22}{why:>25}"
    sizes = f"{side[gathered] / 1e6:>8.2f} MB{side[f'{kept}_bytes'] / 1e6:>8.2f} MB"
    return f"{ranks:>5}  {name:<22}{first:>10.3f} s{later:>11.4f} s{sizes}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="64,256")
    parser.add_argument("--tensors", type=int, default=1500)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for each side and number of ranks")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    counts = [int(text) for text in options.ranks.split(",")]
    if options.side:
        print(json.dumps(SIDES[options.side](counts[0], options.tensors)))
        return 0
    results = {
        ranks: {side: bounded(side, ranks, options.tensors, options.limit) for side in SIDES} for ranks in counts
    }
    print(f"{options.tensors} tensors, each sharded over all ranks; {os.cpu_count()} CPUs")
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps({"tensors": options.tensors, "ranks": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
