"""A receipt store in a thread of this process, that can be stopped and started again on the same port."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path

from midwatch.checkpoint.address import LOOPBACK, listen
from midwatch.checkpoint.board_server import BoardServer
from midwatch.checkpoint.board_wire import NetPlace, make_token, read_token


class Store:
    """Context manager; ``place`` is what writers need."""

    def __init__(self, run_dir: Path, *, run: str, attempt: int) -> None:
        self._token = read_token(make_token(run_dir))
        self._listener = listen(LOOPBACK)
        host, port = self._listener.getsockname()
        self.place = NetPlace(address=f"{host}:{port}", run_dir=run_dir, run=run, attempt=attempt)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Store:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """For good."""
        self.stop()
        self._listener.close()

    def start(self) -> None:
        """Serve in a thread."""
        # Its own descriptor: the loop closes it at the end, and the next store needs the socket.
        listener = socket.socket(fileno=self._listener.dup().detach())
        server = BoardServer(listener, self._token, self.place.run, self.place.attempt)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(self._loop, server), daemon=True)
        self._thread.start()

    def _run(self, loop: asyncio.AbstractEventLoop, server: BoardServer) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            try:
                runner.run(server.serve())
            except (asyncio.CancelledError, KeyboardInterrupt):
                pass

    def stop(self) -> None:
        """End it as a death would: all connections break, all marks are lost."""
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(self._loop)])
            self._thread.join(10)
        self._loop = self._thread = None

    def restart(self) -> None:
        """A successor on the same port."""
        self.stop()
        self.start()
