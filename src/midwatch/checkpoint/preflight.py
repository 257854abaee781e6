"""Will the saves to come find room and a disk that keeps its word? Asked before step 0, not at the first save.

What cannot work at all is an error; what works but leaves little room is a ``Shortage``, told while there is time.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from midwatch.checkpoint.catalog import list_checkpoints
from midwatch.checkpoint.jobs import Tier
from midwatch.core import StorageError, format_bytes
from midwatch.storage import NEED_INODES, RESERVE_BYTES, Space, as_storage_error, free_space, ops

_log = logging.getLogger(__name__)

PROBE_PREFIX = ".midwatch-probe-"

FILES_A_RANK = 4
"""Shard, receipt, statistics and a mark on the board."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A folder that saves go to. One rank a node asks for it: the mount is the node's."""

    tier: Tier
    path: Path
    ranks: int = 1
    """Ranks that write there: all of them (shared), the node's (local)."""

    def save_bytes(self, own_bytes: int, all_bytes: int) -> int:
        """One save as this folder gets it."""
        return all_bytes if self.tier == "shared" else own_bytes * self.ranks

    @property
    def save_inodes(self) -> int:
        return FILES_A_RANK * self.ranks + NEED_INODES


class Shortage(msgspec.Struct, frozen=True, kw_only=True):
    """It works, but not for long, or not as comfortably as configured."""

    tier: Tier
    path: str
    what: Literal["bytes", "inodes"]
    free: int
    needed: int
    message: str
    """Free, needed and what to lower, in one sentence."""

    @property
    def key(self) -> tuple[str, str]:
        return self.path, self.what


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What a trial file showed of a folder."""

    is_direct: bool
    """Writes can bypass the page cache."""
    seconds: float
    """For one block: write, and sync of file and folder."""


def preflight(
    places: Sequence[Place], *, own_bytes: int, all_bytes: int, keep: int, in_flight: int = 1
) -> list[Shortage]:
    """Try every folder and count the room, before step 0.

    Args:
        own_bytes: This rank's part of one save.
        all_bytes: One save of all ranks.
        keep: Places that retention fills (``retain.places_of``); those that are full already take no more room.
        in_flight: Saves that may lie there unfinished beside the kept ones.

    Returns:
        What is less than comfortable.

    Raises:
        StorageError: ST101 no room (or quota) for even one save, ST102 a folder cannot be made or written, ST103 the
            disk fails to sync.

    Blocking: one small write and two syncs a folder.
    """
    shortages: list[Shortage] = []
    for place in places:
        one = place.save_bytes(own_bytes, all_bytes)
        _make(place)
        _refuse_no_room(place, one)
        probe = probe_folder(place.path, reserve_bytes=own_bytes)
        _log.info("%s: a synced block takes %.4f s, direct writes: %s", place.path, probe.seconds, probe.is_direct)
        shortages += _disk(place, one, keep, in_flight)
    return shortages


def probe_folder(path: Path, *, reserve_bytes: int = 0) -> Probe:
    """Write one block beside the checkpoints, make it durable, and take it away again.

    Args:
        reserve_bytes: Take this much room for a moment: a quota is seen by no other question.

    Raises:
        StorageError: ST101 full or over quota, ST102 not writable, ST103 the sync failed.
    """
    trial = path / f"{PROBE_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    begin = time.monotonic()
    try:
        is_direct = _write_block(trial, reserve_bytes)
        ops.fsync_dir(path)
    except OSError as error:
        raise as_storage_error(error, f"a trial file in {path} failed") from error
    finally:
        _discard(trial)
    return Probe(is_direct=is_direct, seconds=time.monotonic() - begin)


def _write_block(trial: Path, reserve_bytes: int) -> bool:
    # A direct write wants an aligned buffer, which only a mapping is for sure.
    size = max(reserve_bytes, ops.DIRECT_ALIGNMENT)
    with (
        mmap.mmap(-1, ops.DIRECT_ALIGNMENT) as block,
        ops.OutputFile(trial, mode=0o600, is_direct=True, size_bytes=size) as out,
    ):
        view = memoryview(block)
        try:
            out.write(view)
        finally:
            view.release()
        out.sync()
        return out.is_direct


def _discard(trial: Path) -> None:
    try:
        ops.unlink(trial)
    except OSError:
        pass  # the first error is the one to report; an empty trial file is passed over by every reader


def _make(place: Place) -> None:
    try:
        ops.make_dirs(place.path)
    except OSError as error:
        raise as_storage_error(error, f"cannot make the folder of the {place.tier} tier") from error


def _refuse_no_room(place: Place, one: int) -> None:
    space = _space(place)
    if space.free_bytes < one + RESERVE_BYTES:
        message = (
            f"{place.path} has {format_bytes(space.free_bytes)} free, not enough for one save of {format_bytes(one)}"
        )
        raise StorageError(
            "ST101", message, path=str(place.path), free_bytes=space.free_bytes, need_bytes=one + RESERVE_BYTES
        )
    if space.free_inodes is not None and space.free_inodes < place.save_inodes:
        message = f"{place.path} has {space.free_inodes} inodes left, not enough for one save"
        raise StorageError("ST101", message, path=str(place.path))


def _space(place: Place) -> Space:
    try:
        return free_space(place.path)
    except OSError as error:
        raise as_storage_error(error, f"cannot tell the room in {place.path}") from error


def _disk(place: Place, one: int, keep: int, in_flight: int) -> Iterator[Shortage]:
    # A full place is emptied only after its successor is verified, so the saves in flight come on top of all of them.
    full = sum(info.state == "verified" for info in list_checkpoints(place.path))
    saves = max(keep - full, 0) + in_flight
    space = _space(place)
    key = "checkpoint.keep_last" if place.tier == "shared" else "checkpoint.keep_last (it holds for both tiers)"
    todo = f"lower {key} or checkpoint.keep.best, or free space"
    wanted = f"{saves} more saves ({keep} kept, {full} of them there already, {in_flight} in flight)"
    needed = saves * one + RESERVE_BYTES
    if space.free_bytes < needed:
        free = format_bytes(space.free_bytes)
        message = f"{place.path} has {free} free, {format_bytes(needed)} needed for {wanted}: {todo}"
        yield _shortage(place, "bytes", space.free_bytes, needed, message)
    inodes = saves * place.save_inodes
    if space.free_inodes is not None and space.free_inodes < inodes:
        message = f"{place.path} has {space.free_inodes} inodes left, {inodes} needed for {wanted}: {todo}"
        yield _shortage(place, "inodes", space.free_inodes, inodes, message)


def _shortage(place: Place, what: Literal["bytes", "inodes"], free: int, needed: int, message: str) -> Shortage:
    return Shortage(tier=place.tier, path=str(place.path), what=what, free=free, needed=needed, message=message)


class SpaceWatch:
    """The cheap question before each save: one ``statvfs`` a folder, no trial file. Speaks once per tightening.

    It alerts early: a save still fits, but after the next one there is no room left for another.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = tuple(places)
        self._told: dict[tuple[str, str], int] = {}

    def look(self, *, own_bytes: int, all_bytes: int, in_flight: int = 1) -> list[Shortage]:
        """What became short since the last look: news only, and again only when even fewer saves fit.

        A folder that cannot be asked is passed over: the save itself will say what is wrong with it.
        """
        news: list[Shortage] = []
        for place in self._places:
            one = max(place.save_bytes(own_bytes, all_bytes), 1)
            try:
                space = free_space(place.path)
            except OSError:
                continue
            news += self._judge(place, "bytes", space.free_bytes - RESERVE_BYTES, one, in_flight)
            if space.free_inodes is not None:
                news += self._judge(place, "inodes", space.free_inodes, place.save_inodes, in_flight)
        return news

    def _judge(
        self, place: Place, what: Literal["bytes", "inodes"], free: int, one: int, in_flight: int
    ) -> Iterator[Shortage]:
        fits, key = max(free, 0) // one, (str(place.path), what)
        if fits > in_flight:
            self._told.pop(key, None)
            return
        if fits >= self._told.get(key, fits + 1):
            return
        self._told[key] = fits
        needed = (in_flight + 1) * one
        show = format_bytes if what == "bytes" else str
        yield _shortage(
            place,
            what,
            max(free, 0),
            needed,
            f"{place.path} has room for {fits} more saves ({show(max(free, 0))} {'free' if what == 'bytes' else what}, "
            f"{show(one)} each): free space or lower checkpoint.keep_last before saves fail",
        )
