"""What differs between two checkpoints, from their records; on request from their bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from midwatch.checkpoint.manifest import Manifest, TensorRecord
from midwatch.checkpoint.ranges import CheckedTensors
from midwatch.checkpoint.stats import Stats, TensorStats, read_stats
from midwatch.core import changed_section
from midwatch.storage import new_digest

_FACTS = ("run", "attempt", "step", "world_size", "loss", "config_hash", "code_hash", "parent", "save_optimizer")

Change = Literal["added", "removed", "dtype", "shape", "values", "unknown"]


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """A fact of the manifest, a metric or a section that the two tell otherwise."""

    name: str
    a: Any
    b: Any


class TensorChange(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor that differs. ``unknown``: nothing at hand tells whether its values do."""

    key: str
    change: Change
    a: str = ""
    b: str = ""
    """Type and shape, or the statistics where only the values differ."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """All that differs, and how many tensors were compared and found equal."""

    a: str
    b: str
    facts: tuple[Fact, ...]
    tensors: tuple[TensorChange, ...]
    equal: int
    basis: Literal["bytes", "statistics"]
    notes: tuple[str, ...] = ()

    @property
    def is_same(self) -> bool:
        """The same facts and tensors, as far as ``basis`` goes."""
        return not self.facts and not any(change.change != "unknown" for change in self.tensors)


def compare(a: Path, b: Path, *, read: bool = False) -> Difference:
    """Compare two checkpoints.

    Args:
        read: Compare every byte; without it the statistics kept beside the shards tell, where there are any.

    Raises:
        CheckpointError: CK102 to CK108 for damage in either.
    """
    with CheckedTensors(a) as one, CheckedTensors(b) as two:
        notes: list[str] = []
        if read:
            values = _by_bytes(one, two)
        else:
            values = _by_statistics(_kept_statistics(a, one.manifest, notes), _kept_statistics(b, two.manifest, notes))
        changes = [_change(key, one.manifest, two.manifest, values) for key in _keys(one.manifest, two.manifest)]
        told = tuple(change for change in changes if change is not None)
        return Difference(
            a=one.manifest.name,
            b=two.manifest.name,
            facts=tuple(_facts(one.manifest, two.manifest)),
            tensors=told,
            equal=len(changes) - len(told),
            basis="bytes" if read else "statistics",
            notes=tuple(notes),
        )


_Values = Callable[[str], tuple[str, str] | Literal["unknown"] | None]
"""Whether one tensor's values differ: two words when they do, None when they do not."""


def _by_bytes(a: CheckedTensors, b: CheckedTensors) -> _Values:
    def values(key: str) -> tuple[str, str] | None:
        one, two = _digest(a, key), _digest(b, key)
        return None if one == two else (f"xxh3 {one}", f"xxh3 {two}")

    return values


def _by_statistics(a: Stats, b: Stats) -> _Values:
    def values(key: str) -> tuple[str, str] | Literal["unknown"] | None:
        one, two = a.get(key), b.get(key)
        if one is None or two is None:
            return "unknown"
        return None if one == two else (_words(one), _words(two))

    return values


def _kept_statistics(folder: Path, manifest: Manifest, notes: list[str]) -> Stats:
    stats, told = read_stats(folder, manifest)
    notes += [f"{manifest.name}: {note}" for note in told]
    return stats


def _digest(tensors: CheckedTensors, key: str) -> str:
    digest = new_digest()
    digest.update(tensors.read(key))
    return digest.hexdigest()


def _words(stats: TensorStats) -> str:
    bad = f", {stats.nonfinite} not finite" if stats.nonfinite else ""
    return f"norm {stats.norm:.6g}, largest {stats.amax:.6g}{bad}"


def _keys(one: Manifest, two: Manifest) -> list[str]:
    return sorted({*one.tensors, *two.tensors})


def _change(key: str, one: Manifest, two: Manifest, values: _Values) -> TensorChange | None:
    a, b = one.tensors.get(key), two.tensors.get(key)
    if a is None or b is None:
        return TensorChange(key=key, change="added" if a is None else "removed", a=_kind(a), b=_kind(b))
    if a != b:
        return TensorChange(key=key, change="dtype" if a.dtype != b.dtype else "shape", a=_kind(a), b=_kind(b))
    found = values(key)
    if found is None:
        return None
    if found == "unknown":
        return TensorChange(key=key, change="unknown")
    return TensorChange(key=key, change="values", a=found[0], b=found[1])


def _kind(record: TensorRecord | None) -> str:
    return "" if record is None else f"{record.dtype} {'x'.join(map(str, record.global_shape)) or 'scalar'}"


def _facts(one: Manifest, two: Manifest) -> list[Fact]:
    pairs = [(name, getattr(one, name), getattr(two, name)) for name in _FACTS]
    for word, a, b in (("metric", one.metrics, two.metrics), ("section", one.sections, two.sections)):
        pairs += [(f"{word} {name}", a.get(name), b.get(name)) for name in sorted({*a, *b})]
    found = [Fact(name=name, a=a, b=b) for name, a, b in pairs if a != b]
    if one.provenance is not None and two.provenance is not None:
        changes = changed_section(one.provenance.semantic, two.provenance.semantic)
        found += [Fact(name=f"parameter {change.name}", a=change.old, b=change.new) for change in changes]
    return found
