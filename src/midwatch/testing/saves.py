"""Small real checkpoints without torch: several ranks in one process, a few kilobytes each."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import msgspec

from midwatch.checkpoint.board import Failure, FileBoard
from midwatch.checkpoint.board_wire import NetPlace
from midwatch.checkpoint.format import (
    ImagePlan,
    ManifestDraft,
    SaveEvent,
    SaveJob,
    ShardIdentity,
    TensorSpec,
    committed_names,
    fail_save,
    list_checkpoints,
    plan_image,
    shard_metadata,
)
from midwatch.checkpoint.notes import LayoutCache
from midwatch.checkpoint.pipeline import run_save
from midwatch.config import KeepConfig, TrustConfig
from midwatch.core import CheckpointError, CheckpointName, Provenance
from midwatch.storage import claim_attempt
from midwatch.testing.ioshim import IoShim, SimulatedDeath
from midwatch.testing.stores import Store

CHUNK_BYTES = 4096
ROWS = 6
COLUMNS = 300


class SmallRun:
    """A run folder whose ranks save a row-sharded matrix, a replicated scalar and a private vector.

    Args:
        local_dir: With one, each save goes through this node-local tier first.
        has_store: The ranks meet over a receipt store in this process, a new one for each attempt; else by files.
    """

    def __init__(
        self, run_dir: Path, *, world_size: int = 2, local_dir: Path | None = None, has_store: bool = False
    ) -> None:
        self.run_dir = run_dir
        self.root = run_dir / "checkpoints"
        self.world_size = world_size
        self.local_dir = local_dir
        self.commit_timeout_s = 10.0
        """Short: in one process a rank that has not come by then never comes."""
        self.run_id = "r20250101-00000000"
        self.attempt = 0
        self.keep_last = 3
        self.keep = KeepConfig()
        self.trust = TrustConfig()
        self.provenance: Provenance | None = None
        """What manifests say of settings and code."""
        self.layouts = [LayoutCache() for _ in range(world_size)]
        """What each rank's writer has checked before."""
        self._has_store = has_store
        self._stores: dict[int, Store] = {}

    @property
    def place(self) -> NetPlace | None:
        """This attempt's receipt store."""
        if not self._has_store:
            return None
        if self.attempt not in self._stores:
            self._stores[self.attempt] = Store(self.run_dir, run=self.run_id, attempt=self.attempt)
            self._stores[self.attempt].start()
        return self._stores[self.attempt].place

    def close(self) -> None:
        """End the stores."""
        for store in self._stores.values():
            store.close()
        self._stores.clear()

    def claim(self) -> int:
        """Begin the next attempt."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.attempt = claim_attempt(self.run_dir, run=self.run_id, inventory=committed_names(self.root))
        return self.attempt

    def name(self, step: int) -> str:
        """The checkpoint's name if this attempt saves ``step``."""
        return str(CheckpointName(step, self.attempt))

    def states(self) -> dict[str, str]:
        """Name to state, of all that lies in the shared tier."""
        return {info.name: info.state for info in list_checkpoints(self.root)}

    def specs(self, rank: int) -> list[TensorSpec]:
        """The tensors of one rank's shard."""
        rows = ROWS // self.world_size
        specs = [
            TensorSpec(
                key="model.weight",
                dtype="F32",
                shape=(rows, COLUMNS),
                offsets=(rows * rank, 0),
                global_shape=(rows * self.world_size, COLUMNS),
            ),
            TensorSpec(key=f"private.{rank:05d}.rng.cpu", dtype="U8", shape=(57,), offsets=(0,), global_shape=(57,)),
        ]
        if rank == 0:
            specs.append(TensorSpec(key="optimizer.step", dtype="F32", shape=(), offsets=(), global_shape=()))
        return specs

    def plan(self, step: int, rank: int) -> ImagePlan:
        """Layout of one rank's shard: the same size for every step."""
        identity = ShardIdentity(
            run=self.run_id, attempt=self.attempt, step=step, rank=rank, world_size=self.world_size
        )
        specs = self.specs(rank)
        return plan_image(specs, metadata=shard_metadata(identity, specs, b'{"shared":{},"private":{}}'))

    def job(self, step: int, rank: int, *, serial: int = 0) -> SaveJob:
        """Stage one rank's image (in a plain file) and describe the save."""
        plan = self.plan(step, rank)
        staging = self.run_dir / "staging"
        staging.mkdir(exist_ok=True)
        image = staging / f"a{self.attempt}-s{step}-r{rank}"
        image.write_bytes(plan.header + contents(step, rank, plan.size_bytes - plan.data_start))
        return SaveJob(
            name=self.name(step),
            serial=serial,
            step=step,
            attempt=self.attempt,
            run=self.run_id,
            rank=rank,
            world_size=self.world_size,
            shm_path=str(image),
            size_bytes=plan.size_bytes,
            entries=plan.entries,
            root=str(self.root),
            local_root=str(self.local_dir or ""),
            run_dir=str(self.run_dir),
            is_committer=rank == 0,
            manifest=self._draft(step) if rank == 0 else None,
            commit_timeout_s=self.commit_timeout_s,
            keep_last=self.keep_last,
            keep=self.keep,
            trust=self.trust,
            board=self.place.address if self.place else "",
            chunk_bytes=CHUNK_BYTES,
        )

    def _draft(self, step: int) -> ManifestDraft:
        known = self.provenance
        return ManifestDraft(
            created_ns=step,
            loss=1.0 / (step + 1),
            config_hash=known.semantic.hash if known else "",
            code_hash=known.code.hash if known else "",
            provenance=known,
        )

    def save(
        self, step: int, *, shim: IoShim | None = None, shim_rank: int = 0, serial: int = 0
    ) -> dict[int, list[SaveEvent]]:
        """Save on all ranks at once, each in a thread; the shim watches ``shim_rank`` (or all, if it is everywhere).

        A rank that dies by the shim is reported to the others as its ``WriterClient`` would do.
        """
        events: dict[int, list[SaveEvent]] = {rank: [] for rank in range(self.world_size)}
        jobs = [self.job(step, rank, serial=serial) for rank in range(self.world_size)]

        def run(job: SaveJob) -> None:
            if shim is not None and job.rank == shim_rank:
                shim.adopt()
            try:
                run_save(job, events[job.rank].append, self.layouts[job.rank])
            except SimulatedDeath:
                _mourn(job, self.place)

        threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self.commit_timeout_s * 8)
        return events


def contents(step: int, rank: int, size_bytes: int) -> bytes:
    """The data of a shard: random, and finite when read as floats (between -2 and 2)."""
    data = bytearray(random.Random(step * 1000 + rank).randbytes(size_bytes))
    data[3::4] = bytes(byte & 0b1011_1111 for byte in data[3::4])
    return bytes(data)


def _mourn(job: SaveJob, place: NetPlace | None) -> None:
    """Post the failure past the shim, which would let nothing through any more."""
    error = CheckpointError("CK302", "died")
    if place is not None:
        fail_save(Path(job.root), job.name, job.serial, rank=job.rank, error=error, place=place)
        return
    for tier in ("local", "shared"):
        board = FileBoard(Path(job.root), job.name, job.serial, tier)
        board.folder.mkdir(parents=True, exist_ok=True)
        failure = Failure(rank=job.rank, code=error.code, message=error.message)
        _write_plain(board.folder / f"{tier}.failed", msgspec.json.encode(failure))


def _write_plain(path: Path, data: bytes) -> None:
    """Complete or absent, like a real mark, but unseen by the shim."""
    aside = path.with_name(f".{path.name}-{threading.get_ident()}")
    aside.write_bytes(data)
    aside.rename(path)
