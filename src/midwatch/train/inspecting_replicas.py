"""Replicas compared: ranks that should hold the same parameters say one word for all of them, and vote.

Checksums are worked out on the device (``inspecting_checksums``), go to the host behind its other work, and are
compared one step later: a few bytes from each rank, over the control group. Only where they differ does every rank tell
the checksum of each tensor, to find the tensor.
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from midwatch.checkpoint import ControlGroup, Holding
from midwatch.guards import Vote, vote
from midwatch.train.inspecting_checksums import checksum
from midwatch.train.tensors import Copied, begin_copy, local_part

_log = logging.getLogger(__name__)
_MOST_NAMED = 3


class Part(NamedTuple):
    """Parameters of this rank that the same ranks hold."""

    key: str
    """The same on all of those ranks, and nowhere else."""
    ranks: tuple[int, ...]
    is_certain: bool
    holdings: tuple[Holding, ...]


class Split(NamedTuple):
    """What a comparison came to; the same on all ranks."""

    checksums: dict[int, str]
    """By rank, of those that should hold the same: of the first part that differs, or of the largest."""
    is_certain: bool
    place: str
    """The tensors that differ; empty where all are alike."""
    now_ns: int


class OnTheWay:
    """Checksums of one moment, part by part, on their way to the host."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = [(part.key, [begin_copy(one) for one in _checksums(part)]) for part in parts]
        self._copied = Copied(_local(one.parameter).device for part in parts for one in part.holdings)

    def numbers(self) -> dict[str, list[int]]:
        """By key of the part, a number for each of its tensors. Waits for what was begun, and for nothing else."""
        self._copied.wait()
        return {key: [number for copy in copies for number in copy.tolist()] for key, copies in self._parts}


class Replicas:
    """One rank's part in the comparisons. ``begin`` and ``compare`` are collective, ``take`` is not."""

    def __init__(self, group: ControlGroup, holdings: Iterable[Holding]) -> None:
        self._group = group
        self._parts = parts_of(holdings)
        self._certain: set[str] = set()
        """Keys of parts that must stay alike. All ranks know all of these sets, whatever they hold."""
        self._kept: set[str] = set()
        """That the script has kept alike over a step, though nothing says that it must."""
        self._unproven: dict[str, str] = {}
        """Neither, so far: their word before the first step."""

    @property
    def has_any(self) -> bool:
        """There is something to compare; the same answer on all ranks."""
        return bool(self._certain or self._kept or self._unproven)

    def begin(self, first: OnTheWay | None) -> None:
        """Before the first step: agree on what there is to compare.

        Args:
            first: The checksums of now; None on a rank that cannot work them out.
        """
        numbers = first.numbers() if first is not None else {}
        sure = {part.key for part in self._parts if part.is_certain}
        told = self._group.gather({key: [_folded(values), key in sure] for key, values in numbers.items()})
        by_part = _by_part({rank: {key: word for key, (word, _) in said.items()} for rank, said in enumerate(told)})
        shared = {key for key, words in by_part.items() if len(words) > 1}
        self._certain = shared & {key for said in told for key, (_, is_certain) in said.items() if is_certain}
        alike = {key for key in shared - self._certain if not vote(by_part[key]).is_split}
        self._unproven = {key: next(iter(by_part[key].values())) for key in alike}
        self._say_dropped(len(shared - self._certain - alike))
        if not self.has_any and not shared:
            self._say("no replicas: no two ranks hold the same parameters, so none can be compared")

    def _say(self, sentence: str) -> None:
        if self._group.rank == 0:
            _log.info("%s", sentence)

    def _say_dropped(self, count: int) -> None:
        if count:
            self._say("ranks do not keep the parameters outside of DistributedDataParallel alike: not compared")

    def take(self) -> OnTheWay:
        """Begin to work the checksums out; nothing waits."""
        wanted = self._certain | self._kept | set(self._unproven)
        return OnTheWay([part for part in self._parts if not wanted or part.key in wanted])

    def compare(self, taken: OnTheWay | None, now_ns: int) -> Split | None:
        """None where nobody had anything to compare.

        Args:
            taken: None on a rank that gave up; the others go on without it.
            now_ns: Rank 0's counts.

        Blocking: until all ranks are there.
        """
        numbers = taken.numbers() if taken is not None else {}
        told = self._group.gather({"now": now_ns, "parts": {key: _folded(values) for key, values in numbers.items()}})
        by_part = _by_part({rank: said["parts"] for rank, said in enumerate(told)})
        votes = {key: vote(words) for key, words in by_part.items() if len(words) > 1}
        self._prove(votes, by_part)
        votes = {key: outcome for key, outcome in votes.items() if key in self._certain | self._kept}
        if not votes:
            return None
        # The largest first; but one that differs before all others, and before those one that can be decided.
        key = min(votes, key=lambda one: (not votes[one].is_split, not votes[one].is_decided, -votes[one].voters, one))
        place = self._place(key, votes[key], sorted(by_part[key]), numbers.get(key)) if votes[key].is_split else ""
        return Split(by_part[key], key in self._certain, place, int(told[0]["now"]))

    def _prove(self, votes: Mapping[str, Vote], by_part: Mapping[str, Mapping[int, str]]) -> None:
        """What begins alike and is not the same any more after its first change is not meant to be: ranks that train
        each for itself may have begun from one seed."""
        for key in [key for key in self._unproven if key in votes]:
            if votes[key].is_split:
                del self._unproven[key]
                self._say_dropped(1)
            elif next(iter(by_part[key].values())) != self._unproven[key]:
                del self._unproven[key]
                self._kept.add(key)

    def _place(self, key: str, outcome: Vote, voters: list[int], mine: list[int] | None) -> str:
        """Which tensors differ: asked of all ranks, answered by those concerned."""
        part = next((one for one in self._parts if one.key == key), None)
        answer: dict[str, Any] = {}
        if part is not None and mine is not None:
            names = [one.name for one in part.holdings] if self._group.rank == voters[0] else []
            answer = {"numbers": mine, "names": names}
        told = self._group.gather(answer)
        odd = outcome.odd_ranks
        right = next((rank for rank in voters if not outcome.is_decided or rank not in odd), voters[0])
        differing = [
            name
            for number, name in enumerate(told[voters[0]]["names"])
            if any(told[rank]["numbers"][number] != told[right]["numbers"][number] for rank in odd)
        ]
        return _named(differing)


def parts_of(holdings: Iterable[Holding]) -> list[Part]:
    """By the ranks that hold them; what one rank holds alone is left out."""
    by_ranks: dict[tuple[tuple[int, ...], bool], list[Holding]] = {}
    for one in holdings:
        if len(one.ranks) > 1 and _has_bytes(one.parameter):
            by_ranks.setdefault((one.ranks, one.is_certain), []).append(one)
    return [
        Part(_key(ranks, is_certain, some), ranks, is_certain, _by_device(some))
        for (ranks, is_certain), some in by_ranks.items()
    ]


def _by_device(holdings: Sequence[Holding]) -> tuple[Holding, ...]:
    """Those of one device beside each other: so their checksums come."""
    devices = list(dict.fromkeys(_local(one.parameter).device for one in holdings))
    return tuple(sorted(holdings, key=lambda one: devices.index(_local(one.parameter).device)))


def _key(ranks: tuple[int, ...], is_certain: bool, holdings: Sequence[Holding]) -> str:
    # Ranks that hold other tensors (stages of a pipeline) are nobody's replicas.
    shapes = [[one.name, list(_local(one.parameter).shape), str(one.parameter.dtype)] for one in holdings]
    return hashlib.sha256(json.dumps([ranks, is_certain, shapes]).encode()).hexdigest()[:16]


def _checksums(part: Part) -> list[torch.Tensor]:
    """One tensor of numbers for each device, in the order of the part."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for one in part.holdings:
        found = checksum(_local(one.parameter))
        by_device.setdefault(found.device, []).append(found)
    return [torch.stack(numbers) for numbers in by_device.values()]


def _folded(numbers: Sequence[int]) -> str:
    return hashlib.sha256(struct.pack(f"<{len(numbers)}q", *numbers)).hexdigest()[:16]


def _by_part(told: Mapping[int, Mapping[str, str]]) -> dict[str, dict[int, str]]:
    found: dict[str, dict[int, str]] = {}
    for rank, words in told.items():
        for key, word in words.items():
            found.setdefault(key, {})[rank] = word
    return found


def _named(names: list[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMED])
    return shown + (f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else "")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return local_part(tensor)


def _has_bytes(tensor: torch.Tensor) -> bool:
    local = _local(tensor)
    return type(local) in (torch.Tensor, torch.nn.Parameter) and local.layout == torch.strided and not local.is_meta
