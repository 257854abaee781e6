"""Which checkpoint to resume from: chosen by rank 0, verified by all ranks together, agreed on by everyone.

Newest first; each candidate is read back in full before it is trusted, every rank taking its share of the files. One
that is damaged is moved to ``quarantine`` with the reason, and the next older one is tried. A fresh start happens only
where there is nothing to lose: when checkpoints exist but none can be trusted, that is an error (CK202).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from midwatch.checkpoint.catalog import LATEST, PARTIAL_SUFFIX, QUARANTINE, CheckpointInfo, candidates, list_checkpoints
from midwatch.checkpoint.catalog import quarantine as move_to_quarantine
from midwatch.checkpoint.group import ControlGroup
from midwatch.checkpoint.manifest import MANIFEST_FILE
from midwatch.checkpoint.verify import Problem, VerifyReport, verify_checkpoint
from midwatch.core import CheckpointError, MidwatchError, Recorder, StorageError, error_from_dict
from midwatch.storage import as_storage_error

_log = logging.getLogger(__name__)

Mode = Literal["auto", "must", "never"]

DAMAGE = frozenset({"CK101", "CK102", "CK103", "CK104", "CK105", "CK106", "CK107"})
"""Codes that speak against the checkpoint; all others speak against the caller, so an older one would not help."""


class ResumePoint(msgspec.Struct, frozen=True, kw_only=True):
    """What a run was resumed from. ``step`` is done; ``step + 1`` is next."""

    step: int
    name: str
    digest: str
    """Of the manifest, SHA-256."""
    config_hash: str
    rejected: tuple[tuple[str, str], ...] = ()
    """(name, reason) of newer candidates that could not be trusted."""
    tier: str = "shared"
    world_size: int = 0
    """That wrote it."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One folder that may be resumed from."""

    name: str
    folder: str
    tier: str
    digest: str
    run: str


class Chooser:
    """Offers verified candidates, best first. ``next`` and ``settle`` are collective over the control group."""

    def __init__(
        self, group: ControlGroup, roots: dict[str, Path], *, run_dir: Path, run: str, recorder: Recorder
    ) -> None:
        self._group = group
        self._roots = roots
        self._run_dir = run_dir
        self._run = run
        self._recorder = recorder
        self._queue: list[Candidate] | None = None
        self._explicit = ""
        self.rejected: list[tuple[str, str]] = []

    def only(self, path: str | Path) -> None:
        """Consider nothing but this folder: a checkpoint, its ``latest`` link, or a folder that has one."""
        self._explicit = str(path)

    def next(self) -> Candidate | None:
        """The best candidate that is intact in every byte; None when there is none left.

        Raises:
            CheckpointError: CK203 another run's, CK205 ranks see different storage; with an explicit path also what is
                wrong with it (CK101 to CK107, CK201).

        Blocking: for reading the checkpoint once, spread over the ranks.
        """
        while True:
            offer = self._group.broadcast(self._on_rank_zero(self._offer))
            raise_remote(offer)
            if "candidate" not in offer:
                return None
            candidate = msgspec.convert(offer["candidate"], Candidate)
            problems = self._verify(candidate)
            if not problems:
                return candidate
            self.reject(candidate, problems)

    def reject(self, candidate: Candidate, problems: list[Problem]) -> None:
        """Take a candidate out of service, or raise when the caller asked for exactly this one."""
        first = problems[0]
        reason = f"{first.code} {first.file}: {first.message}"
        if self._explicit:
            raise CheckpointError(first.code, f"{candidate.folder}: {first.message}", file=first.file)
        if self._group.rank == 0:
            self._quarantine(self._roots[candidate.tier], candidate.name, reason, problems)
        self.rejected.append((candidate.name, reason))

    def refuse_fresh_start(self, mode: Mode) -> None:
        """Called when ``next`` found nothing: raises unless starting from step 0 loses nothing.

        Raises:
            CheckpointError: CK201 in mode ``must``, CK202 when checkpoints exist but none can be trusted.
        """
        raise_remote(self._group.broadcast(self._on_rank_zero(lambda: self._check_nothing_lost(mode))))

    # --- rank 0 ---------------------------------------------------------------------------------------------------

    def _on_rank_zero(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Run ``work`` on rank 0; an error becomes a message, so that all ranks raise it instead of waiting."""
        if self._group.rank != 0:
            return None
        try:
            return work()
        except MidwatchError as error:
            return {"error": error.as_dict()}
        except OSError as error:
            return {"error": as_storage_error(error, "looking for checkpoints").as_dict()}

    def _offer(self) -> dict[str, Any]:
        if self._queue is None:
            self._queue = [self._named()] if self._explicit else self._found()
        if not self._queue:
            return {}
        candidate = self._queue.pop(0)
        if candidate.run != self._run and not self._explicit:
            message = f"{candidate.folder} belongs to run {candidate.run}, this is run {self._run}"
            raise CheckpointError("CK203", message, checkpoint=candidate.name, run=candidate.run)
        return {"candidate": msgspec.to_builtins(candidate)}

    def _found(self) -> list[Candidate]:
        for tier, root in self._roots.items():
            if os.path.lexists(root) and not root.is_dir():
                raise StorageError("ST102", f"{root} is not a folder, or a link that leads nowhere", path=str(root))
            self._set_damaged_aside(tier, root)
        found = [(info, tier) for tier, root in self._roots.items() for info in candidates(root, run_dir=self._run_dir)]
        # Stable: of equal copies the first tier's comes first.
        found.sort(key=lambda item: item[0].preference, reverse=True)
        return [_candidate(info, tier) for info, tier in found]

    def _set_damaged_aside(self, tier: str, root: Path) -> None:
        for info in list_checkpoints(root, run_dir=self._run_dir):
            # Its name says committed, but its manifest cannot be read: no rename of ours leaves such a folder.
            if info.state == "torn" and not info.name.endswith(PARTIAL_SUFFIX):
                problems = list(verify_checkpoint(root / info.name, deep=False).problems)
                if problems and problems[0].code in DAMAGE:
                    reason = f"{problems[0].code} {problems[0].file}: {problems[0].message}"
                    self._quarantine(root, info.name, reason, problems)
                self.rejected.append((info.name, info.reason))

    def _named(self) -> Candidate:
        folder = _follow(Path(self._explicit))
        report = verify_checkpoint(folder, deep=False)
        if report.manifest is None:
            raise CheckpointError(report.problems[0].code, report.problems[0].message, path=str(folder))
        tier = next((tier for tier, root in self._roots.items() if folder.parent == root.resolve()), "path")
        manifest = report.manifest
        return Candidate(name=folder.name, folder=str(folder), tier=tier, digest=manifest.digest, run=manifest.run)

    def _quarantine(self, root: Path, name: str, reason: str, problems: list[Problem]) -> None:
        try:
            moved_to = str(move_to_quarantine(root, name, reason, problems, run_dir=self._run_dir))
        except OSError as error:
            # A folder that cannot be written may still hold an older checkpoint that can be read.
            _log.warning("%s stays where it is: %s", name, error)
            moved_to = ""
        self._recorder.record("checkpoint.rejected", name=name, reason=reason, moved_to=moved_to)

    def _check_nothing_lost(self, mode: Mode) -> dict[str, Any]:
        untrusted = list(self.rejected)
        for root in self._roots.values():
            for info in list_checkpoints(root, run_dir=self._run_dir):
                if info.state == "quarantined" or info.is_suspect:
                    untrusted.append((info.name, info.reason))
        if untrusted:
            named = "; ".join(f"{name}: {reason}" for name, reason in dict(untrusted).items())
            folder = next(iter(self._roots.values()))
            raise CheckpointError(
                "CK202",
                f"no checkpoint in {folder} can be trusted, and starting from step 0 would bury them: {named}",
                hint=f"Look into {folder / QUARANTINE}; start over on purpose with resume(mode='never').",
                rejected=[list(item) for item in untrusted],
            )
        if mode == "must":
            raise CheckpointError("CK201", f"no checkpoint in {', '.join(str(r) for r in self._roots.values())}")
        return {}

    # --- all ranks --------------------------------------------------------------------------------------------

    def _verify(self, candidate: Candidate) -> list[Problem]:
        report = _verify_share(Path(candidate.folder), self._group.rank, self._group.world_size)
        seen = report.manifest.digest if report.manifest else ""
        answers = self._group.gather({"digest": seen, "problems": msgspec.to_builtins(report.problems)})
        apart = [rank for rank, answer in enumerate(answers) if answer["digest"] != candidate.digest]
        if apart and self._group.world_size > 1 and answers[0]["digest"] == candidate.digest:
            message = f"ranks {apart[:8]} do not see the {candidate.folder} that rank 0 sees"
            raise CheckpointError("CK205", message, ranks=apart, path=candidate.folder)
        return [msgspec.convert(item, Problem) for answer in answers for item in answer["problems"]]


def agree(group: ControlGroup, error: MidwatchError | None) -> list[Problem]:
    """Tell each other how loading went.

    Returns:
        Empty when every rank succeeded; the damage found when an older checkpoint may do.

    Raises:
        MidwatchError: On every rank, when some rank met an error that no other checkpoint would cure.
    """
    answers = group.gather({} if error is None else {"error": error.as_dict()})
    failed = [answer for answer in answers if "error" in answer]
    for answer in failed:
        if answer["error"]["error"] not in DAMAGE:
            raise_remote(answer)
    return [
        Problem(
            code=a["error"]["error"], file=str(a["error"]["context"].get("path", "")), message=a["error"]["message"]
        )
        for a in failed
    ]


def raise_remote(answer: dict[str, Any]) -> None:
    """Raise the error another rank reported, if it did."""
    if "error" in answer:
        raise error_from_dict(answer["error"])


def _verify_share(folder: Path, rank: int, world_size: int) -> VerifyReport:
    """This rank's share of the bytes; rank 0 also checks what concerns the whole."""
    shallow = verify_checkpoint(folder, deep=False, ranks=None if rank == 0 else ())
    if shallow.manifest is None or shallow.problems:
        return shallow
    mine = range(rank, shallow.manifest.world_size, world_size)
    return verify_checkpoint(folder, deep=True, ranks=mine) if len(mine) else shallow


def _candidate(info: CheckpointInfo, tier: str) -> Candidate:
    return Candidate(name=info.name, folder=info.path, tier=tier, digest=info.digest, run=info.run)


def _follow(path: Path) -> Path:
    if path.name.endswith(PARTIAL_SUFFIX) and path.is_dir():
        raise CheckpointError("CK101", f"{path} was never committed", path=str(path))
    for folder in (path, path / LATEST, path / "checkpoints" / LATEST):
        if (folder / MANIFEST_FILE).is_file():
            return folder.resolve()
    raise CheckpointError("CK201", f"{path} is not a checkpoint and has none", path=str(path))
