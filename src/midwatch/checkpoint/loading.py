"""One resume from the first candidate to the last random number: every rank the same steps, agreed on after each.

A rank that meets an error must not leave the others waiting, so each part of the work ends with an agreement
(``resume.agree``); what speaks against the checkpoint leads to the next candidate, everything else to the same error on
every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from midwatch.checkpoint.candidate import Candidate
from midwatch.checkpoint.ddp import replay_order
from midwatch.checkpoint.exchange import Exchange, exchanged_keys
from midwatch.checkpoint.group import ControlGroup
from midwatch.checkpoint.identity import Identity
from midwatch.checkpoint.load import VerifyingReader
from midwatch.checkpoint.problem import Problem
from midwatch.checkpoint.restore import Restorer
from midwatch.checkpoint.resume import Chooser, ResumePoint, agree, raise_remote, told_by
from midwatch.checkpoint.rng import restore_rng
from midwatch.checkpoint.tracked import Tracked
from midwatch.core import CheckpointError, MidwatchError, Recorder
from midwatch.storage import as_storage_error

_log = logging.getLogger(__name__)

SECTIONS = ("model", "optimizer", "scheduler", "scaler", "rng", "data")


class Loader:
    """Fills the tracked objects from the first candidate that loads on every rank."""

    def __init__(self, group: ControlGroup, tracked: Tracked, identity: Identity, recorder: Recorder) -> None:
        self._group = group
        self._tracked = tracked
        self._identity = identity
        self._recorder = recorder
        everybody = tuple(range(identity.world_size))
        self._is_one_node = identity.node_ranks in ((), everybody)

    def load(self, chooser: Chooser) -> ResumePoint | None:
        """Collective. None when no candidate is left. Raises as ``Chooser.next`` and ``Restorer``."""
        try:
            while (candidate := chooser.next()) is not None:
                restorer = self._load(candidate, chooser)
                if restorer is not None:
                    chooser.settle("loaded")
                    return self._finish(candidate, restorer, chooser)
        except MidwatchError:
            chooser.settle("refused")
            raise
        chooser.settle("refused")
        return None

    # --- one candidate --------------------------------------------------------------------------------------------

    def _load(self, candidate: Candidate, chooser: Chooser) -> Restorer | None:
        """None when it does not load; it is out of service then."""
        opened: list[Restorer] = []

        def open_it() -> None:
            reader = VerifyingReader(chooser.folder(candidate))
            if reader.manifest.digest != candidate.digest:
                raise CheckpointError("CK205", f"{candidate.folder} changed while it was looked at")
            opened.append(Restorer(reader, self._tracked, self._identity.rank))

        if self._rejects(candidate, chooser, open_it):
            return None
        restorer = opened[0]
        if candidate.is_split and self._rejects(candidate, chooser, lambda: self._share_state(restorer)):
            return None
        if self._rejects(candidate, chooser, restorer.prepare):
            return None
        if candidate.is_split and self._is_out_of_reach(candidate, chooser, restorer):
            return None
        is_exchanged = candidate.is_split or not self._is_one_node
        elsewhere = exchanged_keys(restorer.targets) if is_exchanged else ()
        if self._rejects(candidate, chooser, lambda: restorer.read(elsewhere=elsewhere)):
            return None
        if is_exchanged:
            exchange = Exchange(self._group, restorer.reader, restorer.targets)
            if self._rejects(candidate, chooser, exchange.run):
                return None
        return None if self._rejects(candidate, chooser, restorer.apply) else restorer

    def _rejects(self, candidate: Candidate, chooser: Chooser, work: Callable[[], None]) -> list[Problem]:
        error: MidwatchError | None = None
        try:
            work()
        except MidwatchError as caught:
            error = caught
        except OSError as caught:
            error = as_storage_error(caught, f"reading {candidate.folder}")
        problems = agree(self._group, error)
        if problems:
            chooser.reject(candidate, problems)
        return problems

    def _share_state(self, restorer: Restorer) -> None:
        """What all ranks hold alike lies in rank 0's shard, which is on one node only."""
        answer = None
        if self._group.rank == 0:
            answer = told_by(lambda: {"shared": restorer.reader.state(0)["shared"]})
        told = self._group.broadcast(answer)
        raise_remote(told)
        restorer.reader.adopt_shared(told["shared"])

    def _is_out_of_reach(self, candidate: Candidate, chooser: Chooser, restorer: Restorer) -> bool:
        """Another placement than the one that was saved: then a rank's own shard is not all it needs of the nodes'."""
        lacking = self._group.gather(restorer.uncovered()[:1])
        first = next((f"rank {rank} needs {keys[0]}" for rank, keys in enumerate(lacking) if keys), "")
        if first:
            chooser.pass_over(candidate, f"{first} from another node's disk")
        return bool(first)

    # --- the last acts --------------------------------------------------------------------------------------------

    def _finish(self, candidate: Candidate, restorer: Restorer, chooser: Chooser) -> ResumePoint:
        manifest = restorer.manifest
        self._tell_what_differs(candidate, restorer)
        for section, names in restorer.bucket_order.items():
            self._replay(section, names)
        # Last of all: everything above may have drawn random numbers.
        skipped = restore_rng(restorer.rng) if restorer.rng is not None else []
        if skipped:
            _log.warning("random generators not restored: %s", ", ".join(skipped))
        restored = self._restored(restorer)
        return ResumePoint(
            step=manifest.step,
            name=candidate.name,
            digest=manifest.digest,
            config_hash=manifest.config_hash,
            rejected=tuple(chooser.rejected),
            tier=candidate.tier,
            world_size=manifest.world_size,
            provenance=manifest.provenance,
            restored=restored,
            missing=(*(s for s in SECTIONS if s not in restored), *(f"rng.{name}" for name in skipped)),
        )

    def _tell_what_differs(self, candidate: Candidate, restorer: Restorer) -> None:
        manifest, world_size = restorer.manifest, self._identity.world_size
        if restorer.lacks_optimizer:
            _log.warning("%s was saved without the optimizer: its momentum starts from zero", candidate.name)
            self._recorder.record("resume.optimizer_missing", step=manifest.step, name=candidate.name)
        if manifest.world_size != world_size:
            self._recorder.record(
                "resume.world_changed",
                step=manifest.step,
                name=candidate.name,
                world_size_before=manifest.world_size,
                world_size=world_size,
            )

    def _restored(self, restorer: Restorer) -> tuple[str, ...]:
        tracked = self._tracked
        has = {
            "model": tracked.model is not None,
            "optimizer": tracked.optimizer is not None and not restorer.lacks_optimizer,
            "scheduler": tracked.scheduler is not None,
            "scaler": tracked.scaler is not None,
            "rng": restorer.rng is not None,
            "data": tracked.data is not None,
        }
        return (*(section for section in SECTIONS if has[section]), *sorted(tracked.extra))

    def _replay(self, section: str, names: list[str]) -> None:
        order = self._tracked.orders.get(section)
        module = dict(self._tracked.modules()).get(section)
        if order is None or module is None:
            return
        order.set(names)
        if not replay_order(module, names):
            _log.warning("the gradient order of %s could not be replayed: the last bits may differ", section)
            self._recorder.record("resume.bucket_order_differs", section=section)
