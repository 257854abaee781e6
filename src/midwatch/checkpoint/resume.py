"""Which checkpoint to resume from: chosen by rank 0, checked by all ranks together, agreed on by everyone.

Newest first. A candidate that was verified when it was saved is looked over (records, sizes, owners), and loading it,
which checks every byte before it is used, is the proof. One that is merely committed (the run died between commit and
verification) is read back in full first, every rank taking its share, and counts as verified from then on. One that is
damaged is moved to ``quarantine`` with the reason, and the next older one is tried. A fresh start happens only where
there is nothing to lose: when checkpoints exist but none can be trusted, that is an error (CK202).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from midwatch.checkpoint.candidate import Candidate, LocalCopy, buried
from midwatch.checkpoint.catalog import PARTIAL_SUFFIX, USABLE, list_checkpoints
from midwatch.checkpoint.group import ControlGroup
from midwatch.checkpoint.lineage import Outcome
from midwatch.checkpoint.manifest import read_manifest, shard_file
from midwatch.checkpoint.mark import write_mark
from midwatch.checkpoint.moves import quarantine as move_to_quarantine
from midwatch.checkpoint.offers import Offers, Wish
from midwatch.checkpoint.problem import Problem
from midwatch.checkpoint.signing import signature_fault
from midwatch.checkpoint.verify import VerifyReport, verify_checkpoint
from midwatch.core import CheckpointError, MidwatchError, Provenance, Recorder, StorageError, error_from_dict
from midwatch.storage import as_storage_error

_log = logging.getLogger(__name__)

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
    restored: tuple[str, ...] = ()
    """Parts of the state that were put back: model, optimizer, rng and so on."""
    missing: tuple[str, ...] = ()
    """Parts that were not, and are not absent on purpose."""
    provenance: Provenance | None = None
    """Which settings and code wrote it."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where this rank looks. ``node_ranks`` share ``roots["local"]``."""

    roots: dict[str, Path]
    run_dir: Path
    rank: int
    node_ranks: tuple[int, ...]

    @property
    def is_node_leader(self) -> bool:
        return self.rank == min(self.node_ranks)

    def folder(self, candidate: Candidate) -> Path:
        """The candidate's folder as this rank sees it: each node has a local tier of its own."""
        root = self.roots.get("local") if candidate.tier == "local" else None
        return root / candidate.name if root is not None else Path(candidate.folder)


class Chooser:
    """Offers candidates, best first. All methods are collective over the control group."""

    def __init__(self, group: ControlGroup, place: Place, wish: Wish, recorder: Recorder) -> None:
        self._group = group
        self._place = place
        self._wish = wish
        self._recorder = recorder
        self._offers: Offers | None = None
        """Rank 0's."""
        self._is_filled = False
        self.rejected: list[tuple[str, str]] = []

    def next(self) -> Candidate | None:
        """The best candidate that no rule and no record speaks against; None when there is none left.

        Raises:
            CheckpointError: CK109, CK203, CK207, CK208 by the rules (see ``offers``), CK205 ranks see different
                storage; with an explicit path also what is wrong with it (CK101 to CK107, CK201).

        Blocking: for reading its records, and all of it where it was never verified, spread over the ranks.
        """
        self._fill()
        while True:
            offer = self._group.broadcast(self._on_rank_zero(self._offer))
            raise_remote(offer)
            if "candidate" not in offer:
                return None
            candidate = msgspec.convert(offer["candidate"], Candidate)
            problems = self._verify(candidate)
            if not problems:
                if not candidate.is_verified:
                    self._mark_verified(candidate)
                return candidate
            self.reject(candidate, problems)

    def reject(self, candidate: Candidate, problems: list[Problem]) -> None:
        """Take a candidate out of service, or raise when the caller asked for exactly this one."""
        first = problems[0]
        reason = f"{first.code} {first.file}: {first.message}"
        if self._wish.path:
            where = candidate.folder if first.file in first.message else Path(candidate.folder) / first.file
            raise CheckpointError(first.code, f"{where}: {first.message}", file=first.file)
        # A local tier is as good as its worst node: each node moves its own part away.
        if self._group.rank == 0 or (candidate.tier == "local" and self._place.is_node_leader):
            self._quarantine(self._place.roots[candidate.tier], candidate.name, reason, problems)
        self.rejected.append((candidate.name, reason))

    def pass_over(self, candidate: Candidate, reason: str) -> None:
        """Leave a candidate that cannot be used here, though nothing is wrong with it."""
        if self._group.rank == 0:
            _log.warning("%s in the %s tier is passed over: %s", candidate.name, candidate.tier, reason)
            self._recorder.record("resume.passed_over", name=candidate.name, tier=candidate.tier, reason=reason)

    def folder(self, candidate: Candidate) -> Path:
        """Where this rank finds it."""
        return self._place.folder(candidate)

    def settle(self, outcome: Outcome) -> None:
        """Keep on record how it went with the last candidate."""
        if self._offers is not None:
            self._offers.settle(outcome)

    def start_over(self) -> list[str]:
        """Give up all there is; returns the names of what could have been resumed from."""
        told = self._group.broadcast(self._on_rank_zero(lambda: {"names": self._opened().start_over()}))
        raise_remote(told)
        return told["names"]

    def refuse_fresh_start(self) -> None:
        """Called when ``next`` found nothing: raises unless starting from step 0 loses nothing.

        Raises:
            CheckpointError: CK201 in mode ``must``, CK202 when checkpoints exist but none can be trusted.
        """
        raise_remote(self._group.broadcast(self._on_rank_zero(self._check_nothing_lost)))

    # --- rank 0 ---------------------------------------------------------------------------------------------------

    def _on_rank_zero(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Run ``work`` on rank 0; an error becomes a message, so that all ranks raise it instead of waiting."""
        return told_by(work) if self._group.rank == 0 else None

    def _opened(self) -> Offers:
        if self._offers is None:
            self._offers = Offers(self._place.roots, self._place.run_dir, self._wish, self._recorder)
        return self._offers

    def _offer(self) -> dict[str, Any]:
        candidate = self._opened().next()
        return {} if candidate is None else {"candidate": msgspec.to_builtins(candidate)}

    def _check_nothing_lost(self) -> dict[str, Any]:
        untrusted = self.rejected + self._opened().untrusted()
        roots = list(self._place.roots.values())
        if untrusted:
            raise buried(roots[0], untrusted)
        if self._wish.mode == "must":
            raise CheckpointError("CK201", f"no checkpoint in {', '.join(map(str, roots))}")
        return {}

    # --- all ranks --------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Every rank tells what its node has; rank 0 makes the list."""
        if self._is_filled:
            return
        self._is_filled = True
        told = self._group.gather(told_by(self._look))
        for answer in told:
            raise_remote(answer)
        if self._group.rank == 0:
            self.rejected += [(name, reason) for name, reason in told[0]["torn"]]
        copies = [{n: msgspec.convert(c, LocalCopy) for n, c in answer["copies"].items()} for answer in told]
        raise_remote(self._group.broadcast(self._on_rank_zero(lambda: self._filled(copies))))

    def _filled(self, copies: list[dict[str, LocalCopy]]) -> dict[str, Any]:
        self._opened().fill(copies)
        return {}

    def _look(self) -> dict[str, Any]:
        torn: list[tuple[str, str]] = []
        for tier, root in self._place.roots.items():
            if os.path.lexists(root) and not root.is_dir():
                raise StorageError("ST102", f"{root} is not a folder, or a link that leads nowhere", path=str(root))
            is_mine = self._group.rank == 0 if tier == "shared" else self._place.is_node_leader
            if is_mine and not self._wish.path:
                torn += self._set_damaged_aside(root)
        local = self._place.roots.get("local")
        copies = _local_copies(local, self._place) if local is not None else {}
        return {"torn": torn, "copies": msgspec.to_builtins(copies)}

    def _set_damaged_aside(self, root: Path) -> list[tuple[str, str]]:
        torn: list[tuple[str, str]] = []
        for info in list_checkpoints(root, run_dir=self._place.run_dir):
            # Its name says committed, but its manifest cannot be read: no rename of ours leaves such a folder.
            if info.state == "torn" and not info.name.endswith(PARTIAL_SUFFIX):
                problems = list(verify_checkpoint(root / info.name, deep=False).problems)
                if problems and problems[0].code in DAMAGE:
                    reason = f"{problems[0].code} {problems[0].file}: {problems[0].message}"
                    self._quarantine(root, info.name, reason, problems)
                torn.append((info.name, info.reason))
        return torn

    def _quarantine(self, root: Path, name: str, reason: str, problems: list[Problem]) -> None:
        try:
            moved_to = str(move_to_quarantine(root, name, reason, problems, run_dir=self._place.run_dir))
        except OSError as error:
            # A folder that cannot be written may still hold an older checkpoint that can be read.
            _log.warning("%s stays where it is: %s", name, error)
            moved_to = ""
        self._recorder.record("checkpoint.rejected", name=name, reason=reason, moved_to=moved_to)

    def _mark_verified(self, candidate: Candidate) -> None:
        """All ranks have just read their share: what the dead writer owed is paid. A split one has no whole to mark."""
        if self._group.rank != 0 or candidate.is_split or candidate.tier not in self._place.roots:
            return
        try:
            manifest, key = read_manifest(Path(candidate.folder)), self._opened().key
            if key is not None and signature_fault(manifest, key):
                return  # taken for a reason, this once; our signature on its mark would bless it for good
            write_mark(Path(candidate.folder), manifest, range(manifest.world_size), key)
        except (OSError, CheckpointError) as error:
            # A folder that cannot be written may still hold a checkpoint that can be read.
            _log.warning("%s was verified, but could not be marked so: %s", candidate.name, error)
        else:
            self._recorder.record("checkpoint.verified_late", name=candidate.name, digest=candidate.digest)

    def _verify(self, candidate: Candidate) -> list[Problem]:
        report = _look_over(candidate, self._place, self._group.world_size)
        seen = report.manifest.digest if report.manifest else ""
        answers = self._group.gather({"digest": seen, "problems": msgspec.to_builtins(report.problems)})
        apart = [rank for rank, answer in enumerate(answers) if answer["digest"] != candidate.digest]
        if apart and self._group.world_size > 1 and answers[0]["digest"] == candidate.digest:
            message = f"ranks {apart[:8]} do not see the {candidate.folder} that rank 0 sees"
            raise CheckpointError("CK205", message, ranks=apart, path=candidate.folder)
        return [msgspec.convert(item, Problem) for answer in answers for item in answer["problems"]]


def agree(group: ControlGroup, error: MidwatchError | None) -> list[Problem]:
    """Tell each other how a part of loading went.

    Returns:
        Empty when every rank succeeded; the damage found when an older checkpoint may do.

    Raises:
        MidwatchError: On every rank, when some rank met an error that no other checkpoint would cure.
    """
    answers = group.gather({} if error is None else {"error": error.as_dict()})
    failed = [answer["error"] for answer in answers if "error" in answer]
    for told in failed:
        if told["error"] not in DAMAGE:
            raise error_from_dict(told)
    return list({(told["error"], told["message"]): _problem(told) for told in failed}.values())


def _problem(told: dict[str, Any]) -> Problem:
    """The name of the file once, without its folder: by the time this is read, the checkpoint has been moved."""
    context = told["context"]
    path = str(context.get("path", ""))
    return Problem(
        code=told["error"],
        file=Path(path).name,
        message=told["message"].removeprefix(f"{path}: "),
        begin=context.get("offset", 0),
        end=context.get("end", 0),
        tensors=context.get("tensors", []),
    )


def raise_remote(answer: dict[str, Any]) -> None:
    """Raise the error another rank reported, if it did."""
    if "error" in answer:
        raise error_from_dict(answer["error"])


def told_by(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The answer of one rank's work for the others; its error, if it met one, for ``raise_remote``."""
    try:
        return work()
    except MidwatchError as error:
        return {"error": error.as_dict()}
    except OSError as error:
        return {"error": as_storage_error(error, "looking for checkpoints").as_dict()}


def _local_copies(root: Path, place: Place) -> dict[str, LocalCopy]:
    """What the local tier has that could be used, as this rank sees it."""
    found: dict[str, LocalCopy] = {}
    for info in list_checkpoints(root, run_dir=place.run_dir):
        if info.state in USABLE:
            folder = Path(info.path)
            shards = {path.name for path in folder.glob("rank-*.safetensors")}
            found[info.name] = LocalCopy(
                name=info.name,
                digest=info.digest,
                is_verified=info.state == "verified",
                has_own=shard_file(place.rank) in shards,
                is_whole=all(shard_file(rank) in shards for rank in range(info.world_size)),
            )
    return found


def _look_over(candidate: Candidate, place: Place, world_size: int) -> VerifyReport:
    """Records, sizes and owners: rank 0 of the whole, or each node of its part; then the bytes, if nobody ever did."""
    folder = place.folder(candidate)
    if candidate.is_split:
        shallow = verify_checkpoint(folder, deep=False, ranks=place.node_ranks if place.is_node_leader else ())
    else:
        shallow = verify_checkpoint(folder, deep=False, ranks=None if place.rank == 0 else ())
    if shallow.manifest is None or shallow.problems or candidate.is_verified:
        return shallow
    mine = [place.rank] if candidate.is_split else range(place.rank, shallow.manifest.world_size, world_size)
    return verify_checkpoint(folder, deep=True, ranks=mine) if len(mine) else shallow
