"""Is the record what was written? Names the first line that is not, and what was done to it as far as it shows.

Within one file the chain finds edited, removed, inserted and moved lines. Across files the heads that seals and
manifests repeat find an end that was cut off, and a file that is gone. Somebody who can rewrite every file of the run
folder can forge all of it: keep a copy of the last head elsewhere to notice that too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from midwatch.audit.line import GENESIS, LedgerLine, decode_line, stored_hash
from midwatch.audit.reading import ledger_files
from midwatch.core import UNREADABLE, LedgerError
from midwatch.storage import read_regular

ProblemKind = Literal["edited", "removed", "moved", "replaced", "torn", "cut", "missing"]

MAX_PROBLEMS = 20
"""Per file: after a few the rest is the same story."""


class LedgerProblem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong; ``line`` counts from 1, 0 stands for the file as a whole."""

    code: str = "LG101"
    file: str
    line: int
    kind: ProblemKind
    message: str


class LedgerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one file looks like."""

    file: str
    lines: int
    head: str
    problems: tuple[LedgerProblem, ...] = ()

    @property
    def is_ok(self) -> bool:
        return not self.problems


class RunLedgerReport(msgspec.Struct, frozen=True, kw_only=True):
    """All ledgers of a run, and whether the heads repeated elsewhere occur in them."""

    files: tuple[LedgerReport, ...]
    problems: tuple[LedgerProblem, ...]
    """Those of the files, then those across files."""
    seals: int
    """Heads that were looked up and found."""
    set_aside: tuple[str, ...]
    """Torn ends that were cut off and kept."""

    @property
    def is_ok(self) -> bool:
        return not self.problems


class _Scan(NamedTuple):
    report: LedgerReport
    hashes: list[str]
    seals: list[dict[str, Any]]


def verify_ledger(path: Path) -> LedgerReport:
    """Check one file's chain.

    Raises:
        LedgerError: LG103 when there is no such file.
    """
    return _scan(path).report


def verify_run(run_dir: Path, checkpoints: Path | None = None) -> RunLedgerReport:
    """Check all ledgers of a run and the heads that seals and manifests repeat.

    Args:
        checkpoints: Where the manifests are; None: ``<run_dir>/checkpoints``.

    Raises:
        LedgerError: LG103 when the run has no ledger.
    """
    scans = {path.stem: _scan(path) for path in ledger_files(run_dir)}
    problems = [problem for scan in scans.values() for problem in scan.report.problems]
    sealed = [(stem, seal) for stem, scan in scans.items() for seal in scan.seals]
    across = [found for stem, seal in sealed if (found := _seal_problem(run_dir, scans, stem, seal))]
    known = {digest for scan in scans.values() for digest in scan.hashes}
    heads = list(_manifest_heads(checkpoints or run_dir / "checkpoints"))
    across += [_lost_head(manifest, head) for manifest, head in heads if head not in known]
    return RunLedgerReport(
        files=tuple(scan.report for scan in scans.values()),
        problems=tuple(problems + across),
        seals=len(sealed) + len(heads) - len(across),
        set_aside=tuple(sorted(path.name for path in (run_dir / "ledger").glob("*.jsonl.torn-*"))),
    )


def _scan(path: Path) -> _Scan:
    if not path.is_file():
        raise LedgerError("LG103", f"no ledger at {path}", path=str(path))
    chain = _Chain(path)
    with path.open("rb") as file:
        for raw in file:
            chain.take(raw)
    report = LedgerReport(file=str(path), lines=chain.number, head=chain.head, problems=tuple(chain.problems))
    return _Scan(report, chain.hashes, chain.seals)


class _Chain:
    """Walks a file; after a problem it goes on from what the line claims, so that one edit is one problem."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = 0
        self.seq = 0
        self.head = GENESIS
        self.hashes: list[str] = []
        self.seals: list[dict[str, Any]] = []
        self.problems: list[LedgerProblem] = []

    def take(self, raw: bytes) -> None:
        self.number += 1
        line = decode_line(raw[:-1]) if raw.endswith(b"\n") else None
        if not raw.endswith(b"\n"):
            self._note("torn", "the last line is cut off: its writer died, or somebody shortened the file")
        elif line is None:
            self._note("edited", "the line's bytes do not match its hash")
        else:
            self._check_link(line)
            if line.event == "ledger.sealed":
                self.seals.append(line.data)
        self.head = (line.hash if line else stored_hash(raw.rstrip(b"\n"))) or self.head
        self.seq = line.seq + 1 if line else self.seq + 1
        self.hashes.append(self.head)

    def _check_link(self, line: LedgerLine) -> None:
        if line.seq > self.seq:
            self._note("removed", f"{line.seq - self.seq} line(s) before it are gone: number {line.seq} follows")
        elif line.seq < self.seq:
            self._note("moved", f"out of place: it is number {line.seq}, expected {self.seq}")
        elif line.prev != self.head:
            self._note("replaced", "it does not continue the line before, which was exchanged")

    def _note(self, kind: ProblemKind, what: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            message = f"{self.path.name} line {self.number}: {what}"
            problem = LedgerProblem(file=str(self.path), line=self.number, kind=kind, message=message)
            self.problems.append(problem)


def _seal_problem(run_dir: Path, scans: dict[str, _Scan], sealer: str, seal: dict[str, Any]) -> LedgerProblem | None:
    writer, head, lines = str(seal.get("writer", "")), str(seal.get("head", "")), seal.get("lines")
    file = str(run_dir / "ledger" / f"{writer}.jsonl")
    scan = scans.get(writer)
    if scan is None:
        message = f"{writer}.jsonl is gone: {sealer}.jsonl sealed it with {lines} lines"
        return LedgerProblem(file=file, line=0, kind="missing", message=message)
    if not isinstance(lines, int) or lines > len(scan.hashes):
        message = f"{writer}.jsonl was cut off: sealed with {lines} lines, has {len(scan.hashes)}"
        return LedgerProblem(file=file, line=len(scan.hashes), kind="cut", message=message)
    if lines < 1 or scan.hashes[lines - 1] != head:
        message = f"{writer}.jsonl line {lines}: not the line that {sealer}.jsonl sealed"
        return LedgerProblem(file=file, line=lines, kind="replaced", message=message)
    return None


def _manifest_heads(checkpoints: Path) -> Iterator[tuple[Path, str]]:
    # Only this one word of a manifest is ours; whether the manifest itself is sound is the checkpoint room's business.
    for folder in ("step-*", "quarantine/step-*"):
        for path in sorted(checkpoints.glob(f"{folder}/MANIFEST.json")):
            try:
                head = msgspec.json.decode(read_regular(path), type=dict[str, Any]).get("ledger_head")
            except (OSError, *UNREADABLE):
                continue
            if isinstance(head, str) and head not in ("", GENESIS):
                yield path, head


def _lost_head(manifest: Path, head: str) -> LedgerProblem:
    message = f"no ledger has the line {head[:16]} that checkpoint {manifest.parent.name} was written after"
    return LedgerProblem(file=str(manifest), line=0, kind="cut", message=message)
