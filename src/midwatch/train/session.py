"""Who this rank is and where it writes: settled once, by all ranks together, before the first checkpoint is touched."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from midwatch.audit import EarlyLook, Facts, Journal, Ledger, ensure_run, known_checkpoints, set_imports_aside
from midwatch.checkpoint import ControlGroup, Identity, raise_remote
from midwatch.checkpoint.format import Lineage, committed_names
from midwatch.config import Config, RankEnv, RunPaths, config_hash, inherited_environment, redact_environment
from midwatch.core import (
    CheckpointError,
    MidwatchError,
    NullRecorder,
    Recorder,
    StorageError,
    attempt_name,
)
from midwatch.storage import Fence, as_storage_error, claim_attempt
from midwatch.train.alerting import close_bell, open_bell
from midwatch.train.provenance import ProvenanceKeeper
from midwatch.train.surroundings import layout_facts, library_facts, note_other_nodes, observed_facts

_log = logging.getLogger(__name__)


class _Books:
    """A recorder over the ledger that a full disk cannot turn against training; a newer attempt's claim still can."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lost = 0

    @property
    def head(self) -> str:
        return self._ledger.head

    def record(self, event: str, *, step: int | None = None, cause: str = "", **data: Any) -> None:
        try:
            self._ledger.record(event, step=step, cause=cause, **data)
        except StorageError as error:
            self._lost += 1
            if self._lost == 1:
                _log.warning("ledger line lost: %s", error.message)

    def close(self) -> None:
        self._ledger.close()


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """The settled facts, and rank 0's books (the other ranks keep none)."""

    identity: Identity
    group: Any
    recorder: Any
    journal: Any = None
    provenance: ProvenanceKeeper | None = None
    bell: Any = None
    """Tells people of the run, where no supervisor does."""

    def close(self) -> None:
        """Release rank 0's ledger, and tell people what there is to tell."""
        if self.provenance is not None:
            self.provenance.close()
        if isinstance(self.recorder, _Books):
            self.recorder.close()
        if self.bell is not None:
            close_bell(self.bell, self.identity.attempt)


class Declared(msgspec.Struct, frozen=True, kw_only=True):
    """What the script says of itself, and what it tracks by now."""

    params: Mapping[str, Any] = {}
    layout: Mapping[str, Any] = {}
    tracked: Mapping[str, Any] = {}
    early: Any = None
    """An ``EarlyLook`` that was begun at ``attach``."""


def open_session(config: Config, env: RankEnv, paths: RunPaths, declared: Declared) -> Session:
    """Agree on run and attempt, then open rank 0's ledger and journal.

    Without a supervisor rank 0 claims the next attempt itself, which shuts out whatever process of an older attempt may
    still be alive.

    Collective: yes, all ranks.

    Raises:
        CheckpointError: CK205 before ``init_process_group``; FencedError CK401 when a newer attempt holds the run.
        StorageError: ST102, ST103 the run folder cannot be used.
    """
    rank, world_size = _place(env)
    group = ControlGroup(rank, world_size)
    facts = group.broadcast(_settle(config, env, paths) if rank == 0 else None)
    raise_remote(facts)
    # One rank a node: the others have the same libraries.
    nodes = group.gather({"node": env.node, "libraries": library_facts() if env.local_rank == 0 else {}})
    identity = Identity(
        run=facts["run"],
        attempt=facts["attempt"],
        rank=rank,
        world_size=world_size,
        config_hash=config_hash(declared.params, config.train),
        # The attempt is part of it: a killed attempt's memory may not be swept yet when the next one starts.
        tag=f"{env.tag}-{attempt_name(facts['attempt'])}" if env.tag else "",
        node_ranks=tuple(r for r, answer in enumerate(nodes) if answer["node"] == env.node),
    )
    if rank != 0:
        return Session(identity=identity, group=group, recorder=NullRecorder())
    bell = open_bell(config, env, paths.run_dir)
    recorder = _open_ledger(paths, identity, env.node)
    keeper = _keep_provenance(config, paths, identity, declared, nodes=len({answer["node"] for answer in nodes}))
    recorder.record("run.attached", world_size=world_size, **_attachment(config, paths), **keeper.summary())
    note_other_nodes(nodes, recorder)
    _make_room(paths.run_dir, identity.attempt, recorder)
    journal = Journal(paths.metrics_dir / f"{attempt_name(identity.attempt)}.jsonl")
    return Session(identity=identity, group=group, recorder=recorder, journal=journal, provenance=keeper, bell=bell)


def _make_room(run_dir: Path, attempt: int, recorder: Recorder) -> None:
    folder = set_imports_aside(run_dir, attempt)
    if folder is not None:
        _log.warning("metrics that were imported into this run's folder do not count here, and are in %s now", folder)
        recorder.record("metrics.import_set_aside", path=str(folder))


def _keep_provenance(
    config: Config, paths: RunPaths, identity: Identity, declared: Declared, *, nodes: int
) -> ProvenanceKeeper:
    facts = Facts(
        params=declared.params,
        config=config,
        layout=layout_facts(identity.world_size, nodes, declared.tracked.get("model"), declared.layout),
        observed=observed_facts(declared.tracked),
        libraries=library_facts(),
    )
    return ProvenanceKeeper(paths.run_dir, identity, early=declared.early or EarlyLook(), facts=facts)


def _attachment(config: Config, paths: RunPaths) -> dict[str, Any]:
    return {
        "checkpoint_dir": str(paths.checkpoint_dir),
        # For whoever prunes by hand: the rules of this run, not the defaults.
        "keep_last": config.checkpoint.keep_last,
        "keep": msgspec.to_builtins(config.checkpoint.keep),
        "environment": redact_environment(inherited_environment()),
    }


def refuse_if_vanished(session: Session, paths: RunPaths) -> None:
    """Before a fresh start: a run whose ledger tells of checkpoints must not begin again because a mount is missing.

    Collective: yes, all ranks.

    Raises:
        CheckpointError: CK201 naming the newest checkpoint that is gone.
    """
    facts = session.group.broadcast(_vanished(paths) if session.identity.rank == 0 else None)
    raise_remote(facts)


def _vanished(paths: RunPaths) -> dict[str, Any]:
    # What was given up on purpose may be gone: nobody asks for it any more.
    lineage, folder = Lineage.of(paths.run_dir), paths.checkpoint_dir
    known = [name for name in known_checkpoints(paths.run_dir) if not lineage.abandoned_by(name)]
    if not known:
        return {}
    error = CheckpointError(
        "CK201",
        f"the ledger tells of {len(known)} verified checkpoints, the last {known[-1]}, and {folder} holds none of them",
        hint="Mount the storage or correct checkpoint.dir; start over on purpose with resume(mode='never').",
        path=str(folder),
    )
    return {"error": error.as_dict()}


def _place(env: RankEnv) -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return env.rank, env.world_size


def _settle(config: Config, env: RankEnv, paths: RunPaths) -> dict[str, Any]:
    """Rank 0's part; errors travel as messages, so that no rank waits for one that gave up."""
    try:
        run = ensure_run(paths.run_dir, name=config.run.name, run=env.run).run
        attempt = env.attempt
        if attempt == 0:
            attempt = claim_attempt(paths.run_dir, run=run, inventory=_inventory(paths))
        Fence(paths.run_dir, attempt).check()
    except MidwatchError as error:
        return {"error": error.as_dict()}
    except OSError as error:
        return {"error": as_storage_error(error, f"opening {paths.run_dir}").as_dict()}
    return {"run": run, "attempt": attempt}


def _inventory(paths: RunPaths) -> list[str]:
    """What a claim made now must not fence off.

    That is what lies in both tiers, a newest local one not yet uploaded included; and what the ledger knows, for the
    claim may be made while a mount is missing.
    """
    local = paths.checkpoint_local_dir
    names = {*committed_names(paths.checkpoint_dir), *known_checkpoints(paths.run_dir)}
    return sorted(names | set(committed_names(local) if local is not None else ()))


def _open_ledger(paths: RunPaths, identity: Identity, node: str) -> Recorder:
    path: Path = paths.ledger_dir / f"{attempt_name(identity.attempt)}-r{identity.rank:05d}.jsonl"
    fence = Fence(paths.run_dir, identity.attempt).check
    ledger = Ledger(path, run=identity.run, attempt=identity.attempt, node=node, rank=identity.rank, fence=fence)
    return _Books(ledger)
