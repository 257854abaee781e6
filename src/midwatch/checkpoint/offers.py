"""What rank 0 decides about a resume: which checkpoints there are, in which order, and which rule speaks against one.

Each candidate passes these rules, in this order. What is *refused* ends the resume, because an older checkpoint would
be no better; what is *passed over* stays where it is, and the next older one is looked at.

* not signed with this run's key (CK109): passed over; when no signed one is left refused, unless a reason was given
* another run's (CK203) or another experiment's (CK207, see ``experiment``): refused, unless a reason was given
* tried too often (CK208): passed over while an older one is left; the last one is taken with a warning in mode
  ``auto`` and refused in mode ``must``

A path names one checkpoint. That is the reason for taking another run's, a suspect or an often tried one; it is none
for another configuration of the same run, nor for a missing signature.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from midwatch.checkpoint.candidate import Candidate, LocalCopy, candidate_of, common, follow
from midwatch.checkpoint.catalog import USABLE, CheckpointInfo, info_of, list_checkpoints
from midwatch.checkpoint.experiment import other_experiment
from midwatch.checkpoint.lineage import Lineage, Outcome, ResumeRecord, proven_attempts, write_resume
from midwatch.checkpoint.signing import SigningKey, load_key, signature_fault
from midwatch.checkpoint.verify import verify_checkpoint
from midwatch.core import CheckpointError, Provenance, Recorder

_log = logging.getLogger(__name__)

Mode = Literal["auto", "must", "never"]


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller is and wants."""

    run: str
    attempt: int
    world_size: int = 1
    config_hash: str = ""
    provenance: Provenance | None = None
    """Rank 0's: names what differs."""
    mode: Mode = "auto"
    path: str = ""
    accept: str = ""
    """The reason why another run's or another configuration's checkpoint is meant."""
    max_attempts: int = 4
    before_step: int | None = None
    """Give up what was saved at this step and later."""
    signing_key: str = ""


class Offers:
    """Rank 0's list of candidates, best first."""

    def __init__(self, roots: Mapping[str, Path], run_dir: Path, wish: Wish, recorder: Recorder) -> None:
        self._roots = roots
        self._run_dir = run_dir
        self._wish = wish
        self._recorder = recorder
        self.key: SigningKey | None = load_key(wish.signing_key) if wish.signing_key else None
        self._listed = {tier: list_checkpoints(root, run_dir=run_dir) for tier, root in roots.items()}
        self._queue: list[tuple[CheckpointInfo, Candidate]] = []
        self._passed: dict[str, str] = {}
        """Names passed over, with the code of the rule."""
        self._unsigned_ones: list[tuple[CheckpointInfo, Candidate]] = []
        self._is_unsigned_accepted = False
        self._record: ResumeRecord | None = None

    def fill(self, copies: Sequence[Mapping[str, LocalCopy]]) -> None:
        """Look for candidates.

        Args:
            copies: By rank, what its node has in the local tier.
        """
        if self._wish.path:
            self._queue = [self._named(Path(self._wish.path), copies)]
            return
        for tier in ("local", "shared"):
            for info in self._usable(tier):
                candidate = self._placed(info, tier, copies)
                if candidate is not None:
                    self._queue.append((info, candidate))
        self._give_up_newer()
        # Stable: of equal copies the local one comes first.
        self._queue.sort(key=lambda item: (item[0].order, item[1].is_verified), reverse=True)

    def _give_up_newer(self) -> None:
        """Going back: what is not old enough is left out; where nothing is, the oldest is the best there is."""
        old = [item for item in self._queue if not self._is_given_up(item[0])]
        if self._queue and not old:
            oldest = min(item[0].order for item in self._queue)
            old = [item for item in self._queue if item[0].order == oldest]
            _log.warning("no checkpoint is from before step %s; the oldest is taken", self._wish.before_step)
        self._queue = old

    def next(self) -> Candidate | None:
        """The best candidate that no rule speaks against; what this attempt begins from is on record when it returns.

        Raises:
            CheckpointError: CK109, CK203, CK207, CK208.
        """
        while self._queue or self._recall_unsigned():
            info, candidate = self._queue.pop(0)
            # First: what this run's key did not sign has no say, not even that it belongs to another run.
            fault = self._unsigned(candidate)
            if fault and not self._is_unsigned_accepted:
                self._pass_over(info, "CK109", reason=fault)
                self._unsigned_ones.append((info, candidate))
                continue
            differs = self._differences(info, candidate) + ([fault] if fault else [])
            if tried := self._worn_out(info):
                self._pass_over(info, "CK208", attempts=tried)
                continue
            self._begin(info, candidate, differs)
            return self._with_signed_mark(candidate)
        if "CK109" in self._passed.values():
            names = ", ".join(name for name, code in self._passed.items() if code == "CK109")
            raise CheckpointError("CK109", f"no checkpoint is signed with this run's key: {names}")
        return None

    def settle(self, outcome: Outcome) -> None:
        """How it went with the last candidate."""
        if self._record is not None:
            self._write(msgspec.structs.replace(self._record, outcome=outcome))

    def start_over(self) -> list[str]:
        """Give up everything there is, on purpose; returns the names of what a resume could have taken."""
        names = sorted({info.name for tier in self._roots for info in self._usable(tier)})
        record = ResumeRecord(attempt=self._wish.attempt, outcome="loaded", is_rewind=True, passed_over=tuple(names))
        if any(self._listed.values()):
            self._write(record)
        return names

    def untrusted(self) -> list[tuple[str, str]]:
        """(name, reason) of what a fresh start would bury."""
        lineage = Lineage.of(self._run_dir)
        return [
            (info.name, info.reason)
            for listed in self._listed.values()
            for info in listed
            if (info.state == "quarantined" or info.is_suspect) and not lineage.abandoned_by(info.name.split(".")[0])
        ]

    # --- rules ------------------------------------------------------------------------------------------------------

    def _differences(self, info: CheckpointInfo, candidate: Candidate) -> list[str]:
        """What must be accepted, in words. Raises CheckpointError CK203, CK207 when it was not."""
        wish = self._wish
        differs: list[str] = []
        if candidate.run != wish.run:
            message = f"{candidate.folder} belongs to run {candidate.run}, this is run {wish.run}"
            if not (wish.accept or wish.path):
                raise CheckpointError("CK203", message, checkpoint=candidate.name, run=candidate.run)
            differs.append(f"run {candidate.run}, not {wish.run}")
        elif other := other_experiment(candidate, wish.config_hash, wish.provenance):
            if not wish.accept:
                raise CheckpointError(
                    "CK207", other.message, hint=other.hint, checkpoint=candidate.name, **other.context
                )
            differs.append(other.differs)
        if info.is_suspect:
            differs.append(info.reason)
        return differs

    def _recall_unsigned(self) -> bool:
        """Look at them after all: nothing signed is left, and a reason was given.

        Not before. The reason may have been given for something else and stay in the settings; then whoever can write
        the folder could slip in a newer one of his own.
        """
        if not self._wish.accept or self._is_unsigned_accepted:
            return False
        self._is_unsigned_accepted = True
        self._queue, self._unsigned_ones = self._unsigned_ones, []
        for info, _ in self._queue:
            self._passed.pop(info.name, None)
        return bool(self._queue)

    def _unsigned(self, candidate: Candidate) -> str:
        """Why it is not signed with this run's key; empty when it is. Raises CheckpointError CK109 when named."""
        if self.key is None:
            return ""
        report = verify_checkpoint(Path(candidate.folder), deep=False, ranks=())
        fault = signature_fault(report.manifest, self.key) if report.manifest else "its manifest cannot be read"
        # What is loaded later is held to the candidate's digest: the signature must be that one's, not a passer-by's.
        if not fault and report.manifest and report.manifest.digest != candidate.digest:
            fault = "its manifest was exchanged while it was looked at"
        if fault and self._wish.path and not self._wish.accept:
            raise CheckpointError("CK109", f"{candidate.folder}: {fault}", checkpoint=candidate.name)
        return fault

    def _with_signed_mark(self, candidate: Candidate) -> Candidate:
        """With a key, a mark that it did not sign is no mark: such a checkpoint is read in full first."""
        if self.key is None or not candidate.is_verified:
            return candidate
        report = verify_checkpoint(Path(candidate.folder), deep=False, ranks=(), key=self.key)
        return msgspec.structs.replace(candidate, is_verified=report.mark == "valid")

    def _worn_out(self, info: CheckpointInfo) -> list[int]:
        """The attempts that speak against it; empty when it may be tried."""
        if self._wish.path:
            return []
        known = [(i.attempt, i.state) for listed in self._listed.values() for i in listed]
        tried = Lineage.of(self._run_dir).failed_attempts(info.name, proven_attempts(known), before=self._wish.attempt)
        if len(tried) < self._wish.max_attempts:
            return []
        if any(older.name != info.name for older, _ in self._queue):
            return tried
        story = f"{len(tried)} attempts began from {info.name} and came to nothing newer; there is no older one"
        if self._wish.mode == "must":
            raise CheckpointError("CK208", story, attempts=tried)
        _log.warning("%s, so it is taken once more", story)
        return []

    def _pass_over(self, info: CheckpointInfo, code: str, **facts: Any) -> None:
        if info.name not in self._passed:
            _log.warning("%s is passed over for an older one: %s %s", info.name, code, facts)
            self._recorder.record("resume.passed_over", step=info.step, name=info.name, code=code, **facts)
        self._passed[info.name] = code

    def _accepted(self, name: str, differs: list[str]) -> None:
        reason = self._wish.accept or f"named by path: {self._wish.path}"
        _log.warning("%s is taken although it differs (%s), because: %s", name, "; ".join(differs), reason)
        self._recorder.record("resume.accepted", name=name, differs=differs, reason=reason)

    # --- records ----------------------------------------------------------------------------------------------------

    def _begin(self, info: CheckpointInfo, candidate: Candidate, differs: list[str]) -> None:
        if differs:
            self._accepted(candidate.name, differs)
        wish = self._wish
        newer = {name for name, code in self._passed.items() if code == "CK208"}
        newer |= {i.name for tier in self._roots for i in self._usable(tier) if self._is_given_up(i)}
        if wish.path:
            newer |= {i.name for tier in self._roots for i in self._usable(tier) if i.preference > info.preference}
            is_elsewhere = candidate.run != wish.run or info.is_abandoned
            newer |= {i.name for tier in self._roots for i in self._usable(tier) if is_elsewhere}
        self._record = ResumeRecord(
            attempt=wish.attempt,
            name=candidate.name,
            run=candidate.run if candidate.run != wish.run else "",
            is_rewind=bool(newer - {candidate.name}) or wish.before_step is not None,
            passed_over=tuple(sorted(newer - {candidate.name})),
            reason=wish.accept or (f"path {wish.path}" if wish.path else self._why_back),
        )
        self._write(self._record)

    def _write(self, record: ResumeRecord) -> None:
        try:
            write_resume(self._run_dir, record)
        except OSError as error:
            # A folder that cannot be written may still hold a checkpoint that can be read.
            _log.warning("attempt %d leaves no record of what it resumed from: %s", record.attempt, error)

    @property
    def _why_back(self) -> str:
        before = self._wish.before_step
        return "" if before is None else f"back to before step {before}"

    # --- finding ----------------------------------------------------------------------------------------------------

    def _usable(self, tier: str) -> list[CheckpointInfo]:
        return [info for info in self._listed.get(tier, []) if info.state in USABLE and info.is_trusted]

    def _is_given_up(self, info: CheckpointInfo) -> bool:
        before = self._wish.before_step
        return before is not None and info.step >= before and not self._wish.path

    def _placed(self, info: CheckpointInfo, tier: str, copies: Sequence[Mapping[str, LocalCopy]]) -> Candidate | None:
        candidate = candidate_of(info, tier)
        return common(candidate, info, copies, self._wish.world_size) if tier == "local" else candidate

    def _named(self, path: Path, copies: Sequence[Mapping[str, LocalCopy]]) -> tuple[CheckpointInfo, Candidate]:
        folder = follow(path)
        report = verify_checkpoint(folder, deep=False, ranks=())
        if report.manifest is None:
            raise CheckpointError(report.problems[0].code, report.problems[0].message, path=str(folder))
        tier = next((tier for tier, root in self._roots.items() if folder.parent == root.resolve()), "path")
        known = next((i for i in self._listed.get(tier, []) if Path(i.path).resolve() == folder), None)
        info = known or info_of(folder, report.manifest)
        candidate = self._placed(info, tier, copies)
        if candidate is None:
            raise CheckpointError("CK205", f"{folder} is not on every rank's node", path=str(folder))
        return info, msgspec.structs.replace(candidate, folder=str(folder))
