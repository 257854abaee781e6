"""Asking for room on behalf of all ranks of a node, which one of them does."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from midwatch.checkpoint.identity import Identity
from midwatch.checkpoint.preflight import Place, Shortage, SpaceWatch, preflight
from midwatch.checkpoint.retain import places_of
from midwatch.config import CheckpointConfig
from midwatch.core import Recorder

_log = logging.getLogger(__name__)


class RoomWatch:
    """Shortages become a warning and a ``storage.low`` event; what cannot work at all is raised."""

    def __init__(
        self, root: Path, local_root: Path | None, config: CheckpointConfig, identity: Identity, recorder: Recorder
    ) -> None:
        self._config = config
        self._identity = identity
        self._recorder = recorder
        self._places = _places(root, local_root, identity)
        self._watch = SpaceWatch(self._places)
        self._was_asked = False

    def ask(self, own_bytes: int, slots: int) -> None:
        """Once, before the first step.

        Raises:
            StorageError: ST101, ST102, ST103 when saves cannot work there.

        Blocking: one small durable write a folder.
        """
        if self._was_asked:
            return
        self._was_asked = True
        keep = places_of(self._config.keep_last, self._config.keep)
        self._tell(
            preflight(
                self._places, own_bytes=own_bytes, all_bytes=self._all_bytes(own_bytes), keep=keep, in_flight=slots
            )
        )

    def look(self, own_bytes: int, slots: int) -> None:
        """At each save, when its copy is done: one question a folder."""
        self._tell(self._watch.look(own_bytes=own_bytes, all_bytes=self._all_bytes(own_bytes), in_flight=slots))

    def _all_bytes(self, own_bytes: int) -> int:
        # Parts are balanced, so every rank's is about this one's; without shards rank 0's is all there is.
        return own_bytes * self._identity.world_size if self._config.shard else own_bytes

    def _tell(self, shortages: Sequence[Shortage]) -> None:
        for short in shortages:
            _log.warning("%s", short.message)
            self._recorder.record(
                "storage.low",
                tier=short.tier,
                path=short.path,
                what=short.what,
                free=short.free,
                needed=short.needed,
                message=short.message,
            )


def _places(root: Path, local_root: Path | None, identity: Identity) -> list[Place]:
    node = identity.node_ranks or tuple(range(identity.world_size))
    if identity.rank != min(node):
        return []
    places = [Place(tier="shared", path=root, ranks=identity.world_size)]
    if local_root is not None:
        places.append(Place(tier="local", path=local_root, ranks=len(node)))
    return places
