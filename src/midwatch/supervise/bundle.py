"""The incident bundle: what a person needs the next morning, in one folder, with the hash of every file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from midwatch.faults.types import Evidence, Frame, RankEvidence, Verdict
from midwatch.storage import canonical_json, ops, sha256_hex, write_atomic


def write_bundle(
    folder: Path, verdict: Verdict, evidence: Evidence, remarks: Mapping[str, tuple[str, ...]], story: tuple[str, ...]
) -> None:
    """Write the folder; a second look at the same incident replaces the first.

    Raises:
        OSError, StorageError: The disk said no; training does not depend on it.

    Durability: survives power loss when it returns.
    """
    ops.make_dirs(folder)
    files = {
        "verdict.json": canonical_json(msgspec.to_builtins(verdict)) + b"\n",
        "evidence.json": canonical_json({**msgspec.to_builtins(evidence), "remarks": dict(remarks)}) + b"\n",
        "report.txt": report_text(verdict, evidence, story).encode(),
    }
    for rank in evidence.ranks:
        if rank.stacks:
            files[f"stacks-r{rank.rank:05d}.txt"] = _stacks_text(rank).encode()
        if rank.stderr_tail:
            files[f"tail-r{rank.rank:05d}.err"] = ("\n".join(rank.stderr_tail) + "\n").encode()
    for name, data in files.items():
        write_atomic(folder / name, data)
    hashes = {name: sha256_hex(data) for name, data in files.items()}
    write_atomic(folder / "HASHES.json", canonical_json(hashes) + b"\n")


def report_text(verdict: Verdict, evidence: Evidence, story: tuple[str, ...] = ()) -> str:
    """One paragraph for people, the evidence it rests on, and how it came to the decision."""
    culprit = "nobody in particular" if verdict.root_rank is None else f"rank {verdict.root_rank}"
    where = f" on node {verdict.root_node}" if verdict.root_node else ""
    step = "" if verdict.step is None else f" at step {verdict.step}"
    hurt = "rank" if len(verdict.victims) == 1 else "ranks"
    victims = f" Victims, not culprits: {hurt} {_numbers(verdict.victims)}." if verdict.victims else ""
    paragraph = (
        f"{verdict.summary.rstrip('.')}. The cause is laid to {culprit}{where}{step} ({verdict.confidence}; class "
        f"{verdict.fault_class}, grade {verdict.grade}).{victims} Action: {verdict.action} (rule {verdict.rule})."
    )
    parts = [f"Incident {verdict.incident} ({evidence.trigger})", "", paragraph, ""]
    if verdict.evidence:
        parts += ["What this rests on:", *(f"  - {line}" for line in verdict.evidence), ""]
    if story:
        parts += ["How it went:", *(f"  {line}" for line in story), ""]
    return "\n".join(parts)


def _numbers(ranks: tuple[int, ...]) -> str:
    return ", ".join(str(rank) for rank in ranks)


def _stacks_text(rank: RankEvidence) -> str:
    blocks = [_stack_text(number, stack) for number, stack in enumerate(rank.stacks, 1)]
    return f"rank {rank.rank}, pid {rank.pid}, state {rank.proc_state}; innermost frame first\n\n" + "\n".join(blocks)


def _stack_text(number: int, stack: tuple[Frame, ...]) -> str:
    return "\n".join([f"sample {number}", *(f"  {f.function} ({f.file}:{f.line})" for f in stack), ""])
