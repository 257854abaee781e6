"""The process that answers Prometheus on a node of a live run (``metrics.listen``): beside the agent, not in it.

What the agent knows comes through shared memory, what the run folder says through a thread that may hang. The launcher
starts it, tells it whether this node hosts the coordinator, and ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from midwatch.audit.exporters import Family, Listen, joined
from midwatch.core import EXIT_INTERNAL, EXIT_OK, MetricsError, StorageError
from midwatch.storage import ops, write_json_atomic
from midwatch.supervise.bystander import begin
from midwatch.supervise.chat import Console, open_stdin, read_lines
from midwatch.supervise.folder_families import FolderFamilies
from midwatch.supervise.node_families import node_families
from midwatch.supervise.node_view import NodeView, read_views
from midwatch.supervise.serving_page import MetricsPage
from midwatch.supervise.specs import PageSpec

_RETRY_S: Final = 30.0
"""Between two tries to listen where somebody else does."""
_log: Final = logging.getLogger("midwatch.page")


class NodePage:
    """The page of one node.

    Args:
        spec: The task.
        console: The launcher.
    """

    def __init__(self, spec: PageSpec, console: Console) -> None:
        self._spec = spec
        self._console = console
        self._is_host = False
        self._views: Sequence[NodeView] = ()
        index_dir = Path(spec.index_dir) if spec.index_dir else None
        folder = FolderFamilies(Path(spec.run_dir), spec.run, Path(spec.checkpoint_dir), index_dir)
        self._page = MetricsPage(folder, self._wish, self._node_families)
        self.broken = self._page.broken

    def host(self, *, is_host: bool) -> None:
        """Whether this node's page also tells what concerns the run as a whole."""
        self._is_host = is_host

    async def open(self) -> None:
        """Listen as soon as that is possible, and say where."""
        listen, is_told = Listen(self._spec.listen), False
        while True:
            try:
                address = await self._page.open(listen)
                break
            except MetricsError as error:
                _log.warning("%s", error.message)
                if not is_told:
                    self._say(f"[{error.code}] no page of metrics on this node: {error.message}; trying on", "warning")
                is_told = True
            await asyncio.sleep(_RETRY_S)
        self._say(f"metrics for Prometheus at http://{address}/metrics", "info")
        port = int(address.rpartition(":")[2])
        reached = joined(self._host_name, port) if listen.is_everywhere else address
        # In a thread: the folder may hang, and the page need not.
        await asyncio.to_thread(self._publish, reached)

    @property
    def _host_name(self) -> str:
        """By what others may reach this host: a run on one node knows itself by loopback only."""
        address = self._spec.address
        return os.uname().nodename if address.startswith("127.") or address == "::1" else address

    async def close(self) -> None:
        await self._page.close()
        with contextlib.suppress(OSError):
            ops.unlink(self._target)

    @property
    def _target(self) -> Path:
        return Path(self._spec.run_dir) / "supervisor" / "scrape" / f"{self._spec.node}.json"

    def _publish(self, address: str) -> None:
        """As Prometheus' discovery by files wants it."""
        try:
            ops.make_dirs(self._target.parent)
            write_json_atomic(self._target, [{"targets": [address], "labels": {}}])
        except (OSError, StorageError) as error:
            _log.warning("%s is not written: %s", self._target, error)

    def _say(self, sentence: str, level: str) -> None:
        self._console.send("say", sentence=sentence, level=level)

    def _wish(self) -> tuple[frozenset[int], bool]:
        # Of the ranks that are here: with hundreds of nodes each number should be told once.
        return frozenset(rank.rank for view in self._views for rank in view.ranks), self._is_host

    def _node_families(self) -> list[Family]:
        spec = self._spec
        views = read_views(Path(spec.view), spec.run, is_shared=spec.is_shared)
        if any(view.ranks for view in views):
            # Between two attempts the numbers of the last one still stand.
            self._views = views
        return node_families(views, spec.run, spec.node)


async def _serve() -> int:
    lines = await open_stdin()
    page = NodePage(msgspec.json.decode(await lines.readline(), type=PageSpec), Console(sys.stdout))
    # A bug in one of them ends the process, and the launcher starts another one.
    async with asyncio.TaskGroup() as group:
        opening = group.create_task(page.open())
        breaking = group.create_task(page.broken.wait())
        hearing = group.create_task(_hear(lines, page))
        await asyncio.wait([breaking, hearing], return_when=asyncio.FIRST_COMPLETED)
        for task in (opening, breaking, hearing):
            task.cancel()
    await page.close()
    return EXIT_INTERNAL if page.broken.is_set() else EXIT_OK


async def _hear(lines: asyncio.StreamReader, page: NodePage) -> None:
    async for word, data in read_lines(lines):
        if word == "host":
            page.host(is_host=bool(data.get("is_host")))
        elif word == "finish":
            return


def main() -> int:
    begin()
    code = asyncio.run(_serve())
    # A thread that hangs in a dead mount must not keep the process.
    os._exit(code)


if __name__ == "__main__":
    main()
