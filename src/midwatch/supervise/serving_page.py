"""One page of metrics for Prometheus: what is known of this node, and what the run folder says."""

from __future__ import annotations

import asyncio
import functools
import signal
from collections.abc import Callable, Sequence
from importlib import metadata

from midwatch.audit.exporters import Family, Listen, PageServer, Sample, joined, render
from midwatch.core import MetricsError
from midwatch.supervise.folder_families import FolderFamilies
from midwatch.supervise.looker import Looker

Node = Callable[[], Sequence[Family]]
Wish = Callable[[], tuple[frozenset[int] | None, bool]]


class MetricsPage:
    """Serves until ``close``; made inside the event loop.

    Args:
        folder: Reads the run folder.
        wish: Of which ranks numbers are wanted (None: of all), and whether those of the run as a whole are.
        node: What is known without reading a disk.
    """

    def __init__(self, folder: FolderFamilies, wish: Wish, node: Node = lambda: ()) -> None:
        self._folder = folder
        self._wish = wish
        self._node = node
        self._server = PageServer(self._text)
        self._looker = Looker(self._look, folder.close, self._break)
        self.broken = asyncio.Event()
        """Set when the page can only show what is old, because of a bug."""

    async def open(self, listen: Listen) -> str:
        """Listen, and say where: ``HOST:PORT``.

        Raises:
            MetricsError: MT107 nobody can listen there.
        """
        return joined(listen.host, await self._server.open(listen))

    async def close(self) -> None:
        self._looker.close()
        await self._server.close()

    async def _text(self) -> str:
        node = self._node()  # first: it says whose numbers are wanted
        found, age_s = await self._looker.newest()
        age = Family(
            "midwatch_folder_read_age_seconds",
            "Since the run folder was read; it grows while its storage does not answer.",
            "gauge",
            [] if age_s is None else [Sample(age_s)],
        )
        return render([_build(), *node, *found, age])

    def _look(self) -> Sequence[Family]:
        ranks, is_whole = self._wish()
        return self._folder.look(ranks, is_whole=is_whole)

    def _break(self) -> None:
        self.broken.set()


@functools.cache
def _build() -> Family:
    try:
        version = metadata.version("midwatch")
    except metadata.PackageNotFoundError:
        version = ""  # run from its sources
    return Family("midwatch_build_info", "The version at work.", "gauge", [Sample(1, {"version": version})])


async def serve_folder(folder: FolderFamilies, listen: Listen, told: Callable[[str], None]) -> None:
    """Serve the page of a run folder until SIGINT or SIGTERM; no supervisor is needed.

    Args:
        folder: Reads it.
        listen: Where.
        told: Called with ``HOST:PORT`` once somebody can ask.

    Raises:
        MetricsError: MT107 nobody can listen there.
    """
    page, over = MetricsPage(folder, lambda: (None, True)), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    try:
        told(await page.open(listen))
        waits = [asyncio.create_task(event.wait()) for event in (over, page.broken)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
    finally:
        await page.close()
    if page.broken.is_set():
        raise MetricsError("MT107", "the page broke off: its traceback is above", hint="Please report it.")
