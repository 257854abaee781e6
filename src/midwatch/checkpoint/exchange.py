"""Read once, send to all: tensors that every rank holds alike, where the ranks do not share a page cache.

Without this each of N nodes would read every byte of such tensors from the shared storage. Here a rank reads and
verifies those in the shard it wrote (of shard s with another number of ranks: rank ``s % world_size``) and passes them
on over the control group, in pieces of bounded size. A checkpoint on the nodes' own disks is read in no other way: no
node has all shards.

What is passed on is one stream of bytes a rank: the saved parts in the order of its files. Everybody knows from a first
exchange of messages what the stream holds, so the pieces carry bytes and a word that says whether reading went well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch.distributed.tensor import DTensor

from midwatch.checkpoint.fetch import Job, fetch
from midwatch.checkpoint.group import ControlGroup
from midwatch.checkpoint.image import TensorEntry
from midwatch.checkpoint.landing import Block, Direct, bytes_of, landing_in
from midwatch.checkpoint.load import VerifyingReader
from midwatch.core import CheckpointError, MidwatchError, error_from_dict
from midwatch.storage import sha256_hex

PIECE_BYTES = 16 * 2**20
"""One message: long enough for the network's full speed, and the only extra memory a rank needs."""

_WORD_BYTES = 8


def exchanged_keys(targets: Mapping[str, torch.Tensor]) -> list[str]:
    """Keys that every rank wants in full: all but sharded tensors and one rank's own; the same list on all ranks."""
    return sorted(key for key, t in targets.items() if not isinstance(t, DTensor) and not key.startswith("private."))


class Exchange:
    """One checkpoint's replicated tensors on their way to every rank."""

    def __init__(self, group: ControlGroup, reader: VerifyingReader, targets: Mapping[str, torch.Tensor]) -> None:
        self._group = group
        self._reader = reader
        aliases = reader.aliases
        self._targets: dict[str, list[torch.Tensor]] = {}
        for key in exchanged_keys(targets):
            self._targets.setdefault(aliases.get(key, key), []).append(targets[key])
        self._keys = sorted(self._targets)

    def run(self) -> None:
        """Fill the targets.

        Collective: yes, and every rank leaves with the same error.

        Raises:
            CheckpointError: CK102, CK103, CK104 as some rank found while reading, CK107 when no shard has a part,
                CK205 ranks want different tensors.
        """
        mine, error = self._mine()
        told = self._group.gather(self._offer(mine, error))
        for answer in told:
            if "error" in answer:
                raise error_from_dict(answer["error"])
        if any(answer["wants"] != told[0]["wants"] for answer in told):
            raise CheckpointError("CK205", "ranks want different tensors of the checkpoint")
        streams = [[self._entry(part) for part in answer["parts"]] for answer in told]
        self._check_whole(streams)
        for source, entries in enumerate(streams):
            if source == self._group.rank:
                _Sender(self._group, _total(entries)).run(mine, self._targets)
            elif entries:
                _Receiver(self._group, source).run(entries, self._targets)

    def _mine(self) -> tuple[list[tuple[Any, list[TensorEntry]]], MidwatchError | None]:
        """The shards this rank reads, each with the parts to pass on, in the order of the file."""
        found: list[tuple[Any, list[TensorEntry]]] = []
        try:
            for number in range(self._group.rank, self._reader.manifest.world_size, self._group.world_size):
                shard = self._reader.shard(number)
                parts = [entry for entry in shard.receipt.entries if entry.key in self._targets and entry.size_bytes]
                found.append((shard, sorted(parts, key=lambda entry: entry.begin)))
        except MidwatchError as error:
            return [], error
        return found, None

    def _offer(self, mine: list[tuple[Any, list[TensorEntry]]], error: MidwatchError | None) -> dict[str, Any]:
        if error is not None:
            return {"error": error.as_dict()}
        numbers = {key: number for number, key in enumerate(self._keys)}
        wants = sha256_hex("\n".join(self._keys).encode())
        entries = [entry for _, entries in mine for entry in entries]
        parts = [[numbers[e.key], e.dtype, list(e.shape), list(e.offsets)] for e in entries]
        return {"wants": wants, "parts": parts}

    def _entry(self, part: list[Any]) -> TensorEntry:
        number, dtype, shape, offsets = part
        key = self._keys[number]
        whole = self._reader.manifest.tensors[key].global_shape
        entry = TensorEntry(
            key=key,
            dtype=dtype,
            shape=tuple(shape),
            offsets=tuple(offsets),
            global_shape=whole,
            begin=0,
            end=0,
        )
        return msgspec.structs.replace(entry, end=entry.size_bytes)

    def _check_whole(self, streams: list[list[TensorEntry]]) -> None:
        """Parts never overlap, so counting elements tells whether something is missing."""
        arrived = dict.fromkeys(self._keys, 0)
        for entry in (entry for entries in streams for entry in entries):
            arrived[entry.key] += torch.Size(entry.shape).numel()
        for key, count in arrived.items():
            if count != self._targets[key][0].numel():
                path = str(self._reader.folder)
                raise CheckpointError("CK107", f"{path}: no shard holds all of {key}", path=path)


def _total(entries: list[TensorEntry]) -> int:
    return sum(entry.size_bytes for entry in entries)


def _spread(targets: list[torch.Tensor]) -> None:
    """From the first target to those of other names for the same saved tensor, unless it is one memory."""
    for other in targets[1:]:
        if other.data_ptr() != targets[0].data_ptr():
            with torch.no_grad():
                other.copy_(targets[0])


class _Stream:
    """The pieces of one rank's stream: a word, then bytes. The word is 0, or the length of an error that follows."""

    def __init__(self, group: ControlGroup, source: int) -> None:
        self._group = group
        self._source = source
        self._piece = torch.empty(_WORD_BYTES + PIECE_BYTES, dtype=torch.uint8)
        self.bytes = bytes_of(self._piece)[_WORD_BYTES:]

    def pass_on(self, size: int, word: int = 0) -> int:
        """Send or receive the first ``size`` bytes; returns the word."""
        if self._group.rank == self._source:
            self._piece[:_WORD_BYTES] = torch.tensor([word]).view(torch.uint8)
        self._group.send_bytes(self._piece[: _WORD_BYTES + size], self._source)
        return int(self._piece[:_WORD_BYTES].clone().view(torch.int64))


class _Sender:
    """This rank's stream, sent while the shards are read."""

    def __init__(self, group: ControlGroup, total: int) -> None:
        self._stream = _Stream(group, group.rank)
        self._left = total
        self._used = 0

    def run(self, mine: list[tuple[Any, list[TensorEntry]]], targets: Mapping[str, list[torch.Tensor]]) -> None:
        try:
            with torch.no_grad():
                fetch(self._jobs(mine, targets))
        except MidwatchError as error:
            self._fail(error)
            raise
        finally:
            for shard, _ in mine:
                shard.close()

    def _jobs(
        self, mine: list[tuple[Any, list[TensorEntry]]], targets: Mapping[str, list[torch.Tensor]]
    ) -> Iterator[Job]:
        for shard, entries in mine:
            start = shard.receipt.data_start
            yield shard, [_Passed(self, entry, targets[entry.key], data_start=start) for entry in entries]

    def put(self, view: memoryview) -> None:
        """Verified bytes, in the order of the stream."""
        while len(view):
            part = view[: len(self._stream.bytes) - self._used]
            self._stream.bytes[self._used : self._used + len(part)] = part
            self._used += len(part)
            view = view[len(part) :]
            if self._used in (len(self._stream.bytes), self._left):
                self._stream.pass_on(self._used)
                self._left -= self._used
                self._used = 0

    def _fail(self, error: MidwatchError) -> None:
        """The others are waiting for a piece: they get the error instead."""
        if not self._left:
            return
        text = msgspec.json.encode(error.as_dict())
        size = min(PIECE_BYTES, self._left)
        if len(text) > size:
            text = b""
        self._stream.bytes[: len(text)] = text
        self._stream.pass_on(size, word=len(text) or -1)


class _Passed:
    """A landing whose bytes are passed on as they arrive."""

    def __init__(self, sender: _Sender, entry: TensorEntry, targets: list[torch.Tensor], *, data_start: int) -> None:
        self._sender = sender
        self._targets = targets
        self._inner: Direct | Block = landing_in(targets[0], entry, data_start=data_start)
        self._view = memoryview(b"")
        self.begin, self.end = self._inner.begin, self._inner.end

    def open(self) -> memoryview:
        self._view = self._inner.open()
        return self._view

    def close(self) -> None:
        self._sender.put(self._view)
        self._inner.close()
        _spread(self._targets)
        self._view = memoryview(b"")


class _Receiver:
    """Another rank's stream."""

    def __init__(self, group: ControlGroup, source: int) -> None:
        self._stream = _Stream(group, source)
        self._source = source
        self._piece = memoryview(b"")

    def run(self, entries: list[TensorEntry], targets: Mapping[str, list[torch.Tensor]]) -> None:
        left = _total(entries)
        for entry in entries:
            landing = landing_in(targets[entry.key][0], entry)
            view = landing.open()
            while len(view):
                if not len(self._piece):
                    self._receive(min(PIECE_BYTES, left))
                    left -= len(self._piece)
                count = min(len(view), len(self._piece))
                view[:count] = self._piece[:count]
                view, self._piece = view[count:], self._piece[count:]
            with torch.no_grad():
                landing.close()
            _spread(targets[entry.key])

    def _receive(self, size: int) -> None:
        word = self._stream.pass_on(size)
        if word > 0:
            raise error_from_dict(msgspec.json.decode(bytes(self._stream.bytes[:word])))
        if word < 0:
            raise CheckpointError("CK104", f"rank {self._source} could not read its part", rank=self._source)
        self._piece = self._stream.bytes[:size]
