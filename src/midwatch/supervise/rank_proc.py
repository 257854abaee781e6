"""One rank as its agent holds it: its process, its files, its watch, and how it ended."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from pathlib import Path

from midwatch.supervise.procs import send
from midwatch.supervise.stragglers import OwnTime
from midwatch.supervise.waiting import ExitWatch
from midwatch.supervise.warm import ForkedRank
from midwatch.supervise.watch import RankWatch
from midwatch.supervise.wire import Exited
from midwatch.supervise.workers import Worker


class RankProc:
    """One rank: its process, its files, its watch, and how it ended."""

    def __init__(self, rank: int, local_rank: int, files: tuple[Path, Path, Path], watch: RankWatch) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.out, self.err, self.error = files
        self.watch = watch
        self.is_idle = False
        """Without a beat: was found standing still with all others, and none of them has moved since."""
        self.own_time = OwnTime()
        self.worker = Worker()
        self.process: subprocess.Popen[bytes] | ForkedRank | None = None
        self.exit_watch: ExitWatch | None = None
        self.exited: Exited | None = None
        self.signalled_by_us = False

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else 0

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.exited is None

    @property
    def written(self) -> int:
        """Bytes of output so far."""
        total = 0
        for path in (self.out, self.err):
            with contextlib.suppress(OSError):
                total += path.stat().st_size
        return total

    def signal(self, number: signal.Signals) -> None:
        """Signal the rank itself, not its session: data loaders must survive a SIGTERM so that it can save."""
        # poll: a rank that ended by itself a moment ago was not torn down by us.
        if self.is_alive and self.process is not None and self.process.poll() is None:
            self.signalled_by_us = True
            # A shell would end at once, and the script that it waits for would have no time to save.
            worker = self.worker.find(self.pid)
            if not worker or not send(worker, number, still=lambda pid: self.worker.find(self.pid) == pid):
                self.process.send_signal(number)
