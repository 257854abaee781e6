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
from torch.distributed.tensor import DTensor

from midwatch.checkpoint import ControlGroup, Holding
from midwatch.guards import Vote, vote
from midwatch.train.inspecting_checksums import checksum

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
        self._parts = [(part.key, [_begin_copy(one) for one in _checksums(part)]) for part in parts]
        devices = {_local(one.parameter).device for part in parts for one in part.holdings}
        self._copied = [_marked(device) for device in devices]

    def numbers(self) -> dict[str, list[int]]:
        """By key of the part, a number for each of its tensors. Waits for what was begun, and for nothing else."""
        for event in self._copied:
            if event is not None:
                event.synchronize()
        return {key: [number for copy in copies for number in copy.tolist()] for key, copies in self._parts}


class Replicas:
    """One rank's part in the comparisons. ``begin`` and ``compare`` are collective, ``take`` is not."""

    def __init__(self, group: ControlGroup, holdings: Iterable[Holding]) -> None:
        self._group = group
        self._parts = parts_of(holdings)
        self._has_any = False

    @property
    def has_any(self) -> bool:
        """Some ranks hold the same; the same answer on all ranks."""
        return self._has_any

    def begin(self, first: OnTheWay | None) -> None:
        """Before the first step: find what there is to compare. Of parameters that may be meant to differ, those that
        are alike now are expected to stay so; the others are left aside.

        Args:
            first: The checksums of now; None on a rank that cannot work them out.
        """
        numbers = first.numbers() if first is not None else {}
        certain = {part.key for part in self._parts if part.is_certain}
        told = self._group.gather({key: [_folded(values), key in certain] for key, values in numbers.items()})
        by_part = _by_part({rank: {key: word for key, (word, _) in said.items()} for rank, said in enumerate(told)})
        meant = {key for key, words in by_part.items() if len(words) > 1}
        sure = {key for said in told for key, (_, is_certain) in said.items() if is_certain}
        apart = {key for key in meant - sure if vote(by_part[key]).is_split}
        self._parts = [part for part in self._parts if part.key in meant - apart]
        self._has_any = bool(meant - apart)
        if self._group.rank == 0 and self._group.world_size > 1:
            self._say(is_apart=bool(apart))

    def _say(self, *, is_apart: bool) -> None:
        if is_apart:
            _log.info("ranks begin with different parameters outside of DistributedDataParallel: they are not compared")
        elif not self._has_any:
            _log.info("no replicas: no two ranks hold the same parameters, so none can be compared")

    def take(self) -> OnTheWay:
        """Begin to work the checksums out; nothing waits."""
        return OnTheWay(self._parts)

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
        if not votes:
            return None
        # The largest first; but one that differs before all others, and before those one that can be decided.
        key = min(votes, key=lambda one: (not votes[one].is_split, not votes[one].is_decided, -votes[one].voters, one))
        place, is_certain = "", True
        if votes[key].is_split:
            place, is_certain = self._place(key, votes[key], sorted(by_part[key]), numbers.get(key))
        return Split(by_part[key], is_certain, place, int(told[0]["now"]))

    def _place(self, key: str, outcome: Vote, voters: list[int], mine: list[int] | None) -> tuple[str, bool]:
        """Which tensors differ, and whether they must not: asked of all ranks, answered by those concerned."""
        part = next((one for one in self._parts if one.key == key), None)
        answer: dict[str, Any] = {}
        if part is not None and mine is not None:
            answer = {"numbers": mine, "is_certain": part.is_certain}
            if self._group.rank == voters[0]:
                answer["names"] = [one.name for one in part.holdings]
        told = self._group.gather(answer)
        odd = outcome.odd_ranks
        right = next((rank for rank in voters if not outcome.is_decided or rank not in odd), voters[0])
        names: list[str] = told[voters[0]]["names"]
        differing = [
            name
            for number, name in enumerate(names)
            if any(told[rank]["numbers"][number] != told[right]["numbers"][number] for rank in odd)
        ]
        return _named(differing), bool(told[voters[0]]["is_certain"])


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
    return shown + (f" and {len(names) - _MOST_NAMED} more tensors" if len(names) > _MOST_NAMED else "")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _has_bytes(tensor: torch.Tensor) -> bool:
    local = _local(tensor)
    return type(local) in (torch.Tensor, torch.nn.Parameter) and local.layout == torch.strided and not local.is_meta


def _begin_copy(value: torch.Tensor) -> torch.Tensor:
    if not value.is_cuda:
        return value
    return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)


def _marked(device: torch.device) -> Any:
    if device.type != "cuda":
        return None
    event: Any = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
