"""Recorded curves as other loggers would have written them: for ``guards.py variants``.

A rule that holds for one way of writing a curve and not for another is a rule about loggers.
"""

from __future__ import annotations

import csv
import math
import struct
from collections.abc import Callable
from pathlib import Path

Record = dict[str, str]
Change = Callable[[list[Record]], list[Record]]


def read(path: Path) -> list[Record]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, records: list[Record]) -> None:
    names = list(dict.fromkeys(name for record in records for name in record))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(records)


def _loss(change: Callable[[float], float], name: str = "loss") -> Change:
    def changed(records: list[Record]) -> list[Record]:
        made: list[Record] = []
        for record in records:
            rest = {key: text for key, text in record.items() if key != "loss"}
            try:
                rest[name] = repr(change(float(record["loss"])))
            except (ValueError, OverflowError):
                rest[name] = record["loss"]
            made.append(rest)
        return made

    return changed


def _thin(every: int) -> Change:
    return lambda records: records[::every]


def _mean(of: int) -> Change:
    def changed(records: list[Record]) -> list[Record]:
        made: list[Record] = []
        for at in range(0, len(records) - of + 1, of):
            block = records[at : at + of]
            losses = [float(record["loss"]) for record in block if record["loss"]]
            made.append(block[-1] | ({"loss": repr(sum(losses) / len(losses))} if losses else {}))
        return made

    return changed


def bf16(value: float) -> float:
    """Rounded to the nearest number with eight bits of mantissa."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    (rounded,) = struct.unpack("<f", struct.pack("<I", (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000))
    return rounded


def _validated(records: list[Record]) -> list[Record]:
    made: list[Record] = []
    for at, record in enumerate(records):
        if at % 100 == 50:
            made.append({"step": record["step"], "eval_loss": record["loss"], "loss": ""})
        made.append(record)
    return made


def _restarted(records: list[Record]) -> list[Record]:
    made, size = list[Record](), len(records)
    for begin, end in ((0, size // 3), (size // 3 - size // 50, size * 2 // 3), (size * 2 // 3 - size // 30, size)):
        made += records[max(0, begin) : end]
    return made


def _with_aux(records: list[Record]) -> list[Record]:
    return [
        record | {"load_balancing_loss": repr(1.0 + at % 7 / 100), "z_loss": repr(0.01 / (1 + at % 5))}
        for at, record in enumerate(records)
    ]


def _twice(records: list[Record]) -> list[Record]:
    return [record | {"run": name} for name in ("first", "second") for record in records]


VARIANTS: dict[str, Change] = {
    "as it is": lambda records: records,
    "each 2nd": _thin(2),
    "each 5th": _thin(5),
    "each 10th": _thin(10),
    "mean of 4": _mean(4),
    "mean of 10": _mean(10),
    "begun late": lambda records: records[len(records) * 3 // 10 :],
    "3 decimals": _loss(lambda value: round(value, 3)),
    "2 decimals": _loss(lambda value: round(value, 2)),
    "1 decimal": _loss(lambda value: round(value, 1)),
    "bf16": _loss(bf16),
    "in bits": _loss(lambda value: value / math.log(2)),
    "perplexity": _loss(math.exp, "ppl"),
    "with a constant": _loss(lambda value: value + 0.1),
    "validation rows": _validated,
    "other losses": _with_aux,
    "restarts": _restarted,
    "two runs": _twice,
}
