"""The writer process of one rank: ``python -m midwatch.checkpoint.persist``, spoken to by ``WriterClient``.

Two threads, so that a slow upload does not keep the next save from the local tier, and one that reads old checkpoints
again between saves; the main thread reads jobs and watches for the end of its rank: when the rank goes, it goes at
once, whatever it was doing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from midwatch.checkpoint.jobs import FrameBuffer, SaveEvent, SaveJob, encode_frame, write_all
from midwatch.checkpoint.manifest import Receipt
from midwatch.checkpoint.notes import LayoutCache
from midwatch.checkpoint.parent import follow_parent
from midwatch.checkpoint.pipeline import Progress, save_first_tier, upload
from midwatch.checkpoint.scrubber import Scrubber

NICE = 10
"""Hashing and copying use what training leaves of the CPU."""

LOWEST_OF_BEST_EFFORT = 7
"""The idle class would starve: a save must end even beside a training script that never stops reading."""

_Upload = tuple[SaveJob, Receipt, Progress]


class Writer:
    """The two lanes, the spare time beside them, and the way out for events."""

    def __init__(self, output_fd: int) -> None:
        self._output_fd = output_fd
        self._output_lock = threading.Lock()
        self._jobs: queue.Queue[SaveJob] = queue.Queue()
        self._uploads: queue.Queue[_Upload] = queue.Queue()
        self._uploading: list[str] = []
        self._layouts = LayoutCache()
        self._scrubber = Scrubber(self._emit)

    def start(self) -> None:
        for work in (self._save_lane, self._upload_lane):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()
        self._scrubber.start()

    def take(self, job: SaveJob) -> None:
        self._jobs.put(job)

    def _emit(self, event: SaveEvent) -> None:
        with self._output_lock:
            write_all(self._output_fd, encode_frame(event))

    def _save_lane(self) -> None:
        while True:
            job = self._jobs.get()
            progress = Progress(job, self._emit)
            with self._scrubber.stand_aside(job):
                receipt = save_first_tier(job, progress, tuple(self._uploading), self._layouts)
            if receipt is not None and job.local_root:
                self._uploading.append(job.name)
                self._uploads.put((job, receipt, progress))

    def _upload_lane(self) -> None:
        while True:
            job, receipt, progress = self._uploads.get()
            with self._scrubber.stand_aside(job):
                upload(job, receipt, progress, self._layouts)
            self._uploading.remove(job.name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until told goodbye, or stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, default=0)
    parser.add_argument("--store-fd", type=int, default=-1)
    parser.add_argument("--store-token", type=Path)
    parser.add_argument("--store-run", default="")
    parser.add_argument("--store-attempt", type=int, default=0)
    options = parser.parse_args(arguments)
    follow_parent(options.parent)
    _step_back()
    # A stop request reaches the whole process group; the last save must survive it. The end comes by stdin or SIGKILL.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    writer = Writer(_private_stdout())
    writer.start()
    if options.store_fd >= 0:
        _open_store(options.store_fd, options.store_token, options.store_run, options.store_attempt)
    _serve(writer)
    return 0


def _step_back() -> None:
    """Training's own processes come first, for the CPU and for the disk."""
    os.nice(NICE)
    # In a container the call may be forbidden, and not every disk scheduler heeds it: it is a wish.
    with contextlib.suppress(psutil.Error, OSError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, LOWEST_OF_BEST_EFFORT)


def _open_store(fd: int, token_file: Path, run: str, attempt: int) -> None:
    """Serve the receipts of all ranks beside our own saves: only rank 0's writer does."""
    from midwatch.checkpoint.board_server import serve_inherited  # an event loop is much to load for all the others

    threading.Thread(
        target=serve_inherited, args=(fd, token_file, run, attempt), name="receipt-store", daemon=True
    ).start()


def _serve(writer: Writer) -> None:
    frames = FrameBuffer()
    while data := os.read(sys.stdin.fileno(), 1 << 20):
        for frame in frames.feed(data):
            if not frame:
                return
            writer.take(msgspec.msgpack.decode(frame, type=SaveJob))


def _private_stdout() -> int:
    """Events go to a descriptor of their own; stray prints of any library go to stderr instead of among them."""
    fd = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return fd


def run(arguments: Sequence[str] | None = None) -> None:
    """``main``, then leave at once: a save in progress must not go on without its rank."""
    code = main(arguments)
    os._exit(code)


if __name__ == "__main__":
    run()
