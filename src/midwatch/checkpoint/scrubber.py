"""The writer's spare time: between saves it reads old checkpoints again, and takes a rotten one out of the way."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from midwatch.checkpoint.commit import CONTENT_CODES
from midwatch.checkpoint.jobs import SaveEvent, SaveJob, Tier
from midwatch.checkpoint.moves import quarantine
from midwatch.checkpoint.problem import Problem
from midwatch.checkpoint.scrub import due, scrub
from midwatch.checkpoint.signing import load_key
from midwatch.core import SYSTEM_CLOCK, Clock, FencedError, MidwatchError, parse_checkpoint_name
from midwatch.storage import Fence

LOOK_S = 600.0
"""Between two looks at what is due: a look reads two small files a checkpoint, and nothing is due to the minute."""
MAX_PAUSE_S = 600.0
"""A scrub waits for a save in progress at most this long with each chunk; saves have their own bounds."""

_log = logging.getLogger(__name__)


class Scrubber:
    """Looks after this rank's shards in the tiers that its jobs name, with the limits that they name.

    Args:
        emit: Where to tell of each checkpoint read.
    """

    def __init__(self, emit: Callable[[SaveEvent], None], *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._emit = emit
        self._clock = clock
        self._job: SaveJob | None = None
        self._lock = threading.Lock()
        self._saves = 0
        self._is_idle = threading.Event()
        self._is_idle.set()

    def start(self) -> None:
        threading.Thread(target=self._run, name="scrub", daemon=True).start()

    @contextlib.contextmanager
    def stand_aside(self, job: SaveJob) -> Generator[None]:
        """Around a save: reading old bytes must not slow down writing new ones. Its job tells where to look later."""
        with self._lock:
            self._job = job
            self._saves += 1
            self._is_idle.clear()
        try:
            yield
        finally:
            with self._lock:
                self._saves -= 1
                if not self._saves:
                    self._is_idle.set()

    def _run(self) -> None:
        never = threading.Event()
        while True:
            never.wait(LOOK_S)
            try:
                self.look()
            except FencedError:
                return  # whoever holds the run now looks after its checkpoints
            except (OSError, MidwatchError) as error:
                _log.warning("checkpoints could not be read again: %s", error)

    def look(self) -> None:
        """Read what is due: one checkpoint a tier at most.

        Raises:
            FencedError: CK401 when a newer attempt holds the run.
            OSError: A record of it cannot be written.
            ConfigError: CF104 the signing key cannot be read any more.
        """
        job = self._job
        if job is None or job.trust.scrub_hours <= 0:
            return
        for tier, root in self._tiers(job):
            world_size = 0 if tier == "local" else job.world_size
            name = due(root, job.rank, self._clock.wall_ns(), job.trust.scrub_hours, world_size=world_size)
            if name is not None:
                self._read(job, tier, root, name, world_size)

    def _tiers(self, job: SaveJob) -> list[tuple[Tier, Path]]:
        shared: list[tuple[Tier, Path]] = [("shared", Path(job.root))]
        return [("local", Path(job.local_root)), *shared] if job.local_root else shared

    def _read(self, job: SaveJob, tier: Tier, root: Path, name: str, world_size: int) -> None:
        Fence(Path(job.run_dir), job.attempt).check()
        begin_s = time.monotonic()
        problems = self._scrub(job, root, name, world_size)
        if problems:  # a second look: a file server that hiccuped is no rot
            problems = self._scrub(job, root, name, world_size)
        if any(problem.code in CONTENT_CODES for problem in problems):
            self._take_away(job, tier, root, name, problems)
        parsed = parse_checkpoint_name(name)
        event = SaveEvent(
            name=name,
            step=parsed.step if parsed else 0,
            state="scrubbed",
            tier=tier,
            seconds=time.monotonic() - begin_s,
            problem=_text(problems),
        )
        self._emit(event)

    def _scrub(self, job: SaveJob, root: Path, name: str, world_size: int) -> list[Problem]:
        trust = job.trust
        return scrub(
            root,
            name,
            job.rank,
            trust.read_limit_mb_s * 1e6,
            world_size=world_size,
            key=load_key(trust.signing_key) if trust.signing_key else None,
            on_bytes=self._pause,
            clock=self._clock,
        )

    def _pause(self, _size: int) -> None:
        self._is_idle.wait(MAX_PAUSE_S)

    def _take_away(self, job: SaveJob, tier: Tier, root: Path, name: str, problems: Sequence[Problem]) -> None:
        run_dir = Path(job.run_dir)
        Fence(run_dir, job.attempt).check()
        # Another rank that found damage of its own may have been faster.
        with contextlib.suppress(FileNotFoundError):
            reason = f"damaged after it was verified: {_text(problems)}"
            quarantine(root, name, reason, problems, run_dir=run_dir if tier == "shared" else None)


def _text(problems: Sequence[Problem]) -> str:
    if not problems:
        return ""
    first = problems[0]
    more = f" (and {len(problems) - 1} more)" if problems[1:] else ""
    return f"[{first.code}] {first.file}: {first.message}{more}"
