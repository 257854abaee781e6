"""The rank's side of its writer process: submit a job, poll for events, never wait longer than asked."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from midwatch.checkpoint.address import listen
from midwatch.checkpoint.board_choice import fail_save, place_of
from midwatch.checkpoint.jobs import GOODBYE, FrameBuffer, SaveEvent, SaveJob, encode_frame, failed_save
from midwatch.config import inherited_environment
from midwatch.core import CheckpointError

WRITER_MODULE = "midwatch.checkpoint.persist"

SUBMIT_TIMEOUT_S = 30.0
"""Covers the writer's start-up (imports) while its pipe is full of a large job; if it takes longer it is stopped."""

EXIT_TIMEOUT_S = 5.0
"""Covers the writer's exit after its stdin was closed; it drops everything at once, so this is generous."""


class WriterClient:
    """Owns one writer process. Use it from one thread, and start it from a thread that lives as long as the rank does:
    the kernel kills the writer when the thread that started it ends.

    Args:
        module: Run with ``python -m``; tests pass one that injures itself.
        arguments: Its arguments.
    """

    def __init__(self, module: str = WRITER_MODULE, arguments: Sequence[str] = ()) -> None:
        self._command = [sys.executable, "-m", module, *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self._frames = FrameBuffer()
        self._flying: dict[tuple[str, int], SaveJob] = {}
        self._freed: set[tuple[str, int]] = set()
        self._events: list[SaveEvent] = []
        self._is_proven = False
        self._listener: socket.socket | None = None
        self._store: list[str] = []

    @property
    def pid(self) -> int | None:
        """Of the running writer."""
        return self._process.pid if self._process and self.is_alive else None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def in_flight(self) -> tuple[str, ...]:
        """Names of the saves that have not reached their last event."""
        return tuple(job.name for job in self._flying.values())

    @property
    def keys_in_flight(self) -> frozenset[tuple[str, int]]:
        """Name and serial of the same."""
        return frozenset(self._flying)

    def start(self) -> None:
        """Start the process unless it runs. Does not wait for it."""
        if self.is_alive:
            return
        self._release()
        self._frames = FrameBuffer()
        self._is_proven = False
        # Same process group on purpose: who kills the rank's group means the writer too.
        self._process = subprocess.Popen(
            [*self._command, "--parent", str(os.getpid()), *self._store],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            pass_fds=() if self._listener is None else (self._listener.fileno(),),
            # The libraries under NumPy start a thread a core when they load; those cores are training's.
            env={
                **inherited_environment(),
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
            },
        )
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)

    def listen(self, host: str, *, token_file: Path, run: str, attempt: int) -> str:
        """Open the receipt store of this attempt; returns its ``host:port``.

        The socket is ours, so a writer that takes over from a dead one serves the same port. One that runs already is
        replaced, which must not happen with saves in flight.

        Raises:
            OSError: One cannot listen there.
        """
        assert not self._flying
        listener = listen(host)
        self._end(EXIT_TIMEOUT_S)
        self._listener = listener
        self._store = ["--store-fd", str(listener.fileno()), "--store-token", str(token_file)]
        self._store += ["--store-run", run, "--store-attempt", str(attempt)]
        self.start()
        name, port = listener.getsockname()
        return f"{name}:{port}"

    def stop_listening(self) -> None:
        """Close the receipt store: the ranks will not meet there. The writer is replaced by one without."""
        if self._listener is not None:
            self._end(EXIT_TIMEOUT_S)
            self._close_store()
            self.start()

    def _close_store(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._listener, self._store = None, []

    def submit(self, job: SaveJob) -> None:
        """Hand a job over; starts the writer when it is not running.

        A writer that dies or hangs here is not raised: ``poll`` reports the job as failed, CK302.
        Blocking: until the job is in the pipe, at most ``SUBMIT_TIMEOUT_S``.
        """
        if job.is_committer and job.manifest is None:
            raise CheckpointError("CK301", f"{job.name}: the committer's job lacks its manifest draft")
        if job.key in self._flying:
            raise CheckpointError("CK301", f"{job.name}: save {job.serial} is already in flight")
        frame = encode_frame(job)  # before it counts as flying: what cannot be sent must not be waited for
        if self._process is not None and not self.is_alive:
            # It died since the last poll. A new one in its place must not make us forget what the old one had to do.
            self._read()
            self._bury()
        self.start()
        self._flying[job.key] = job
        self._freed.discard(job.key)
        is_sent = False
        try:
            is_sent = self._send(frame)
        finally:
            if not is_sent:  # also when interrupted: half a frame would spoil the next one
                self._kill()
                self._bury()

    def _send(self, data: bytes) -> bool:
        assert self._process is not None
        assert self._process.stdin is not None
        fd = self._process.stdin.fileno()
        deadline = time.monotonic() + SUBMIT_TIMEOUT_S
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                select.select([], [fd], [], left_s)
            except BrokenPipeError:
                return False
        return True

    def poll(self, timeout_s: float = 0.0) -> list[SaveEvent]:
        """Everything that happened since the last call, oldest first.

        Blocking: until there is something, at most ``timeout_s``; not at all when nothing is in flight.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            is_open = self._read()
            if not is_open:
                self._bury()
            events, self._events = self._events, []
            left_s = deadline - time.monotonic()
            if events or left_s <= 0 or not self._flying:
                return events
            self._await_output(left_s)

    def _await_output(self, timeout_s: float) -> None:
        if self._process is not None and self._process.stdout is not None:
            select.select([self._process.stdout.fileno()], [], [], timeout_s)

    def _read(self) -> bool:
        """Take what the pipe holds; False when the writer is gone."""
        if self._process is None or self._process.stdout is None:
            return not self._flying
        while True:
            try:
                data = os.read(self._process.stdout.fileno(), 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            try:
                for frame in self._frames.feed(data):
                    self._take(msgspec.msgpack.decode(frame, type=SaveEvent))
            except (ValueError, msgspec.MsgspecError):
                self._kill()  # whatever it is that talks there, it is not our writer
                return False

    def _take(self, event: SaveEvent) -> None:
        self._is_proven = True
        key = (event.name, event.serial)
        if event.is_slot_free:
            self._freed.add(key)
        if event.is_final:
            self._flying.pop(key, None)
        self._events.append(event)

    def _bury(self) -> None:
        """The writer is gone: its jobs failed, the other ranks are told, a new one starts if the old one worked."""
        code = self._reap()
        lost, self._flying = list(self._flying.values()), {}
        self._release()
        if lost and (self._is_proven or self._listener is not None):
            self.start()  # in time for the next save; one that never worked is tried again at the next submit only
        for job in lost:
            error = CheckpointError(
                "CK302", f"rank {job.rank}: the writer process ended with code {code} during {job.name}"
            )
            # After the start: the store in which the others wait for us may be the one that has just died.
            fail_save(Path(job.root), job.name, job.serial, rank=job.rank, error=error, place=place_of(job))
            self._events.append(failed_save(job, error, is_slot_free=job.key not in self._freed))

    def _reap(self) -> int | None:
        if self._process is None:
            return None
        try:
            return self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # it closed its stdout and lives: useless all the same
            self._kill()
            return self._process.returncode

    def _release(self) -> None:
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()
        self._process = None

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel; training must not for it
                self._process.wait(EXIT_TIMEOUT_S)

    def close(self, timeout_s: float) -> list[SaveEvent]:
        """Let the saves in flight finish, then end the process.

        Returns:
            The last events; jobs that did not finish within ``timeout_s`` are reported as failed.

        Blocking: ``timeout_s`` plus at most ``EXIT_TIMEOUT_S``; four times that for a writer that SIGKILL does not end.
        """
        deadline = time.monotonic() + timeout_s
        events: list[SaveEvent] = []
        while self._flying and time.monotonic() < deadline:
            events += self.poll(max(0.0, deadline - time.monotonic()))
        self._end(EXIT_TIMEOUT_S)
        self._read()
        self._is_proven = False
        self._bury()
        events += self._events
        self._events = []
        self._close_store()
        return events

    def _end(self, timeout_s: float) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._send(GOODBYE)
            self._process.stdin.close()
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._kill()
