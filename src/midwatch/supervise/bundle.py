"""The incident bundle: what a person needs the next morning, in one folder, with the hash of every file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from midwatch.core import printable
from midwatch.faults.types import Evidence, Frame, RankEvidence, Verdict
from midwatch.storage import canonical_json, ops, read_regular, sha256_hex, write_atomic
from midwatch.supervise.loglines import LogFile
from midwatch.supervise.report import report_text
from midwatch.supervise.sample import read_tail

HASHES: Final = "HASHES.json"
_SAMPLE: Final = 8
"""Ranks beyond the suspects whose output is kept: enough to see what all the others were doing."""
_STACKS: Final = 64
"""Ranks whose stacks get a file of their own; all of them are in ``evidence.json``."""


def write_bundle(
    folder: Path,
    verdict: Verdict,
    evidence: Evidence,
    remarks: Mapping[str, tuple[str, ...]],
    story: tuple[str, ...],
    logs: Iterable[LogFile] = (),
) -> None:
    """Write the folder; a second look at the same incident replaces the first.

    Args:
        folder: Of this incident.
        verdict: What was concluded.
        evidence: From what.
        remarks: What each node could not find out.
        story: How the decision was reached, step by step.
        logs: The ranks' own files; the ends of the suspects' and of some others' are kept.

    Raises:
        OSError, StorageError: The disk said no; training does not depend on it.

    Durability: survives power loss when it returns. Without ``HASHES.json`` it is not complete.
    """
    files = {
        "verdict.json": canonical_json(msgspec.to_builtins(verdict)) + b"\n",
        "evidence.json": canonical_json({**msgspec.to_builtins(evidence), "remarks": dict(remarks)}) + b"\n",
        **_rank_files(verdict, evidence, logs),
    }
    if evidence.kernel_lines:
        files["kernel.txt"] = _lines(f"{node}: {line}" for node, line in evidence.kernel_lines)
    if story:
        files["decision.txt"] = _lines(story)
    files["report.txt"] = report_text(verdict, evidence, tuple(sorted(files))).encode()
    ops.make_dirs(folder)
    _withdraw(folder, keep=files)
    for name, data in files.items():
        write_atomic(folder / name, data)
    hashes = {name: sha256_hex(data) for name, data in files.items()}
    write_atomic(folder / HASHES, canonical_json(hashes) + b"\n")


def _withdraw(folder: Path, keep: Mapping[str, bytes]) -> None:
    """From here to the new list the bundle is not complete; what only the old one had goes."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        listed: Any = json.loads(read_regular(folder / HASHES))
        ops.unlink(folder / HASHES)
        for name in listed if isinstance(listed, dict) else ():
            if name not in keep and name == Path(name).name:
                with contextlib.suppress(FileNotFoundError):
                    ops.unlink(folder / name)


def _rank_files(verdict: Verdict, evidence: Evidence, logs: Iterable[LogFile]) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    by_rank = {rank.rank: rank for rank in evidence.ranks}
    shown = shown_ranks(verdict, evidence)
    for number in [*shown, *sorted(by_rank.keys() - set(shown))][:_STACKS]:
        if number in by_rank and by_rank[number].stacks:
            files[f"stacks-r{number:05d}.txt"] = _stacks_text(by_rank[number]).encode()
    for number in shown:
        if number in by_rank and by_rank[number].stderr_tail:
            files[f"tail-r{number:05d}.err"] = _lines(by_rank[number].stderr_tail)
    for file in logs:
        name = f"tail-r{file.rank:05d}.{file.stream}"
        if file.rank in shown and name not in files and (tail := read_tail(file.path)):
            files[name] = _lines(tail)
    return files


def shown_ranks(verdict: Verdict, evidence: Evidence) -> list[int]:
    """Whose output is kept: suspects, who fell or was overdue, and some of the others from all over the run."""
    suspects = [suspect.rank for suspect in verdict.suspects if suspect.rank is not None]
    first = [verdict.root_rank] if verdict.root_rank is not None else []
    odd = [rank.rank for rank in evidence.ranks if rank.is_overdue or _fell(rank)]
    shown = list(dict.fromkeys([*first, *suspects, *odd[:_SAMPLE]]))
    others = [rank.rank for rank in evidence.ranks if rank.rank not in shown]
    stride = max(1, -(-len(others) // _SAMPLE))
    return shown + others[::stride]


def _fell(rank: RankEvidence) -> bool:
    return rank.exit_code not in (None, 0) and not rank.signalled_by_us


def _lines(lines: Iterable[str]) -> bytes:
    return ("\n".join(lines) + "\n").encode(errors="replace")


def _stacks_text(rank: RankEvidence) -> str:
    blocks = [_stack_text(number, stack) for number, stack in enumerate(rank.stacks, 1)]
    return f"rank {rank.rank}, pid {rank.pid}, state {rank.proc_state}; innermost frame first\n\n" + "\n".join(blocks)


def _stack_text(number: int, stack: tuple[Frame, ...]) -> str:
    frames = (f"  {printable(f.function)} ({printable(f.file)}:{f.line})" for f in stack)
    return "\n".join([f"sample {number}", *frames, ""])
