"""From rounds of measurements to rows: a figure, its bar, and whether it holds.

Ratios are taken within a round, between processes that ran a few seconds apart, and then the median over the rounds:
a machine that is slow for a minute is slow for both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

Round = dict[str, Any]
STEP_S = 2.0


@dataclass
class Row:
    """One line of the report. ``bar`` is an upper limit; None: for information."""

    figure: str
    what: str
    value: float
    bar: float | None = None
    unit: str = "x"
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.bar is None:
            return ""
        return "holds" if self.value <= self.bar else "BROKEN"


def warm(key: str, field: str, kind: str = "warm") -> Callable[[Round], float]:
    """The median of a case's warm saves, or of another kind of its rows, in one round."""
    return lambda one: median(row[field] for row in one[key][kind])


def every(key: str, field: str) -> Callable[[Round], float]:
    """The median of a plain list of figures of a case in one round."""
    return lambda one: median(one[key][field])


def _values(rounds: Sequence[Round], pick: Callable[[Round], float]) -> list[float]:
    found: list[float] = []
    for one in rounds:
        try:
            found.append(pick(one))
        except (KeyError, IndexError, ValueError, ZeroDivisionError, TypeError):
            continue  # a case that was left out of this round, or said why it cannot run
    return found


def seconds(rounds: Sequence[Round], figure: str, what: str, pick: Callable[[Round], float]) -> list[Row]:
    found = _values(rounds, pick)
    if not found:
        return []
    return [Row(figure, what, median(found), None, "s", f"{min(found):.3f} to {max(found):.3f}, {len(found)} rounds")]


def ratio(
    rounds: Sequence[Round],
    figure: str,
    what: str,
    bar: float,
    one: Callable[[Round], float],
    other: Callable[[Round], float],
) -> list[Row]:
    found = _values(rounds, lambda r: one(r) / other(r))
    if not found:
        why = next((r[key]["error"] for r in rounds for key in r if isinstance(r[key], dict) and "error" in r[key]), "")
        return [Row(figure, what, math.inf, bar, "x", f"not measured {why}")]
    return [Row(figure, what, median(found), bar, "x", f"{min(found):.2f} to {max(found):.2f}, {len(found)} rounds")]


def errors(rounds: Sequence[Round]) -> list[str]:
    found = [f"{key}: {r[key]['error']}" for r in rounds for key in r if isinstance(r[key], dict) and "error" in r[key]]
    return list(dict.fromkeys(found))


def stall_rows(rounds: Sequence[Round]) -> list[Row]:
    mine = warm("stall", "stall")
    rows: list[Row] = []
    rows += seconds(rounds, "stall", "midwatch, warm save", mine)
    rows += seconds(rounds, "stall", "copy_ of the same tensors, reused buffer", warm("stall", "copy"))
    for key, name in (("dcp-default", "dcp.async_save, default"), ("dcp-reused", "dcp.async_save, reused stager")):
        rows += seconds(rounds, "stall", name, warm(key, "stall"))
        rows += seconds(rounds, "stall", f"{name}, without get_state_dict", warm(key, "call"))
    rows += seconds(rounds, "stall", "torchsnapshot async_take", warm("torchsnapshot", "stall"))
    rows += seconds(rounds, "stall", "torch_checkpointing", warm("torch_checkpointing", "stall"))
    rows += ratio(rounds, "stall", "midwatch / copy_", 1.2, mine, warm("stall", "copy"))
    rows += ratio(rounds, "stall", "midwatch / dcp.async_save default", 1 / 8, mine, warm("dcp-default", "stall"))
    rows += ratio(rounds, "stall", "midwatch / dcp.async_save reused stager", 0.8, mine, warm("dcp-reused", "stall"))
    return rows


def overlap_rows(rounds: Sequence[Round]) -> list[Row]:
    rows = seconds(rounds, "overlap", "in save()", warm("overlap", "save"))
    rows += seconds(rounds, "overlap", "optimizer held back", warm("overlap", "waited"))
    found = _values(rounds, warm("overlap", "lost"))
    share = 100 * median(found) / STEP_S if found else math.inf
    return [*rows, Row("overlap", "lost of a 2 s step", share, 1.0, "%", f"{len(found)} rounds")]


def first_rows(rounds: Sequence[Round]) -> list[Row]:
    rows: list[Row] = []
    for key, name in (("first", "first save of a run"), ("first-resumed", "first save after a resume")):
        rows += seconds(rounds, "first", name, lambda r, key=key: r[key]["first"])
        rows += ratio(
            rounds,
            "first",
            f"{name} / warm",
            1.5,
            lambda r, key=key: r[key]["first"],
            lambda r, key=key: median(r[key]["warm"]),
        )
    return rows


def durable_rows(rounds: Sequence[Round]) -> list[Row]:
    mine = warm("stall", "committed")
    rows = seconds(rounds, "durable", "midwatch, save() to committed", mine)
    rows += seconds(rounds, "durable", "midwatch, save() to verified", warm("stall", "verified"))
    rows += seconds(rounds, "durable", "direct write + fsync of the same bytes", warm("stall", "direct"))
    dcp = every("dcp-sync", "durable")
    rows += seconds(rounds, "durable", "dcp.save", dcp)
    rows += ratio(rounds, "durable", "midwatch / direct write", 1.3, mine, warm("stall", "direct"))
    rows += ratio(rounds, "durable", "midwatch / dcp.save", 0.6, mine, dcp)
    return rows


def memory_rows(rounds: Sequence[Round]) -> list[Row]:
    rows: list[Row] = []
    for slots in (1, 2):
        found = [r[f"memory-{slots}"] for r in rounds if "extra_bytes" in r.get(f"memory-{slots}", {})]
        value = max((one["extra_bytes"] / (slots * one["bytes"]) for one in found), default=math.inf)
        said = found[-1]["reported"].get("size_bytes") if found else None
        note = f"the product reports {said / 1e9:.2f} GB" if said else "the product reports nothing"
        rows.append(Row("memory", f"extra memory / (state x {slots} slot{'s' * (slots > 1)})", value, 1.05, "x", note))
    return rows


def load_rows(rounds: Sequence[Round]) -> list[Row]:
    mine = warm("load", "verified")
    rows = seconds(rounds, "load", "midwatch, verified", mine)
    rows += seconds(rounds, "load", "midwatch, unverified", warm("load", "unverified"))
    mine_cold, other_cold = warm("load", "verified", "cold"), warm("load", "unverified", "cold")
    rows += seconds(rounds, "load", "midwatch, verified, from the disk", mine_cold)
    rows += seconds(rounds, "load", "midwatch, unverified, from the disk", other_cold)
    rows += seconds(rounds, "load", "midwatch, resume from end to end", lambda r: r["load"]["resume"])
    tensors, dcp = every("safetensors", "load"), every("dcp-sync", "load")
    rows += seconds(rounds, "load", "safetensors, warm", tensors)
    rows += seconds(rounds, "load", "dcp.load", dcp)
    rows += ratio(rounds, "load", "verified / unverified", 1.05, mine, warm("load", "unverified"))
    rows += ratio(rounds, "load", "verified / unverified, from the disk", 1.05, mine_cold, other_cold)
    rows += ratio(rounds, "load", "verified / safetensors", 1.5, mine, tensors)
    rows += ratio(rounds, "load", "verified / dcp.load", 0.5, mine, dcp)
    return rows


def loop_rows(rounds: Sequence[Round], variants: Sequence[str]) -> list[Row]:
    """Ten steps with a save against the ten without before and after them, in the same process."""
    rows: list[Row] = []
    rows += seconds(rounds, "loop", "one step of the loop that never saves", lambda r: r["loop never"]["step"])
    for until, name in (("loop", "until the last step"), ("durable", "until the last save is durable")):
        slow: dict[str, float] = {}
        for variant in variants:
            found = [100 * one for r in rounds for one in r.get(f"loop {variant}", {}).get(until, ())]
            if found:
                slow[variant] = median(found)
                low, high = _quarters(found)
                spread = f"half of them {low:.1f} to {high:.1f}, {len(found)} saves"
                rows.append(Row("loop", f"{variant}: slowdown {name}", slow[variant], None, "%", spread))
        others = [value for variant, value in slow.items() if variant not in ("never", *_OURS)]
        best = max(min(others), 1e-9) if others else math.nan
        for variant in (v for v in slow if v in _OURS):
            what = f"{variant} / best other, {name}"
            rows.append(Row("loop", what, slow[variant] / best, 0.5, "x", f"best other: {best:.1f} %"))
    return rows


_OURS = ("midwatch", "midwatch overlapped")


def _quarters(found: Sequence[float]) -> tuple[float, float]:
    if len(found) < 2:
        return found[0], found[0]
    low, _, high = quantiles(found, n=4)
    return low, high


def text(rows: Sequence[Row], *, markdown: bool) -> str:
    lines: list[str] = ["| figure | | measured | bar | |", "|---|---|---|---|---|"] if markdown else []
    for row in rows:
        value = f"{row.value:.3f} {row.unit}"
        bar = "" if row.bar is None else f"<= {row.bar:.3g} {row.unit}"
        if markdown:
            lines.append(f"| {row.figure} | {row.what} | {value} ({row.note}) | {bar} | {row.verdict} |")
        else:
            lines.append(f"{row.figure:8s} {row.what:58s} {value:>12s}  {bar:>11s}  {row.verdict:6s}  {row.note}")
    return "\n".join(lines)
