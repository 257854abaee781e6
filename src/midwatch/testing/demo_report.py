"""The demo's report: one HTML file without scripts or outside parts, with the loss curve and the fault marks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

import msgspec

from midwatch.core import format_seconds

Point = tuple[float, float]
Place = Callable[[float, float], Point]
"""Data to picture coordinates."""


class FaultRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table; None where a figure does not exist."""

    number: int
    title: str
    step: int
    detect_s: float | None
    culprit: str
    is_culprit_right: bool
    resumed_step: int | None
    steps_redone: int | None
    again_s: float | None
    remarks: tuple[str, ...] = ()


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the report shows."""

    control_sha256: str
    faulted_sha256: str
    config_hash: str
    world_size: int
    parameters: int
    total_steps: int
    control_s: float
    faulted_s: float
    rows: tuple[FaultRow, ...]
    control_curve: tuple[Point, ...]
    """(step, loss) of the undisturbed run."""
    attempt_curves: tuple[tuple[int, tuple[Point, ...]], ...]
    """(attempt, its (step, loss) points) of the run with faults."""
    progress: tuple[tuple[int, tuple[Point, ...]], ...] = ()
    """(attempt, its (seconds since start, step) points)."""
    problems: tuple[str, ...] = ()

    @property
    def is_identical(self) -> bool:
        return bool(self.control_sha256) and self.control_sha256 == self.faulted_sha256

    @property
    def is_good(self) -> bool:
        return self.is_identical and not self.problems


COLUMNS = ("", "fault", "step", "detected", "culprit", "resumed", "redone", "back after")


def cells(row: FaultRow) -> tuple[str, ...]:
    """The row as text, in the order of ``COLUMNS``."""
    return (
        str(row.number),
        row.title,
        str(row.step),
        _seconds(row.detect_s),
        row.culprit + ("" if row.is_culprit_right else " (WRONG)"),
        "-" if row.resumed_step is None else f"step {row.resumed_step}",
        "-" if row.steps_redone is None else str(row.steps_redone),
        _seconds(row.again_s),
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)


def render(result: DemoResult) -> str:
    """The whole page."""
    verdict = "The weights are bit-identical" if result.is_identical else "The weights differ"
    return _PAGE.format(
        title="midwatch demo",
        tone="good" if result.is_good else "bad",
        verdict=verdict,
        facts=_facts(result),
        problems="".join(f'<p class="problem">{escape(p)}</p>' for p in result.problems),
        loss_chart=_chart(
            "loss",
            "step",
            [("control", result.control_curve)] + [(f"attempt {a}", pts) for a, pts in result.attempt_curves],
            [(row.step, row) for row in result.rows],
        ),
        progress_chart=_chart("step", "seconds since start", [(f"attempt {a}", pts) for a, pts in result.progress], []),
        head="".join(f"<th>{escape(c)}</th>" for c in COLUMNS),
        body="".join(_row(row) for row in result.rows),
    )


def _facts(result: DemoResult) -> str:
    pairs = [
        ("weights of the control run", f"sha256 {result.control_sha256 or 'missing'}"),
        ("weights of the run with faults", f"sha256 {result.faulted_sha256 or 'missing'}"),
        ("model", f"{result.parameters:,} parameters, {result.world_size} ranks, {result.total_steps} steps"),
        ("config hash", result.config_hash),
        ("time", f"{format_seconds(result.control_s)} undisturbed, {format_seconds(result.faulted_s)} with faults"),
    ]
    return "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in pairs)


def _row(row: FaultRow) -> str:
    remarks = "".join(f"<li>{escape(r)}</li>" for r in row.remarks)
    note = f'<tr class="note"><td></td><td colspan="7"><ul>{remarks}</ul></td></tr>' if remarks else ""
    return "<tr>" + "".join(f"<td>{escape(c)}</td>" for c in cells(row)) + "</tr>" + note


_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 960, 320, 56, 36, 26


def _chart(
    y_name: str,
    x_name: str,
    series: Sequence[tuple[str, Sequence[Point]]],
    marks: Sequence[tuple[float, FaultRow]],
) -> str:
    points = [p for _, pts in series for p in pts]
    if not points:
        return '<p class="muted">no data</p>'
    x_max = max(p[0] for p in points) or 1.0
    y_low, y_high = min(p[1] for p in points), max(p[1] for p in points)
    y_span = (y_high - y_low) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (_WIDTH - _LEFT - 16) * x / x_max,
            _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - (y - y_low) / y_span),
        )

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(y_name)} over {escape(x_name)}">']
    parts += _axes(place, x_max, y_low, y_high, x_name, y_name)
    # Counted from the end, so that an attempt has the same colour in both pictures.
    for index, (name, pts) in enumerate(series, -len(series)):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*p) for p in pts))
        css = "control" if name == "control" else f"attempt tone{index % 6}"
        parts.append(f'<polyline class="{css}" points="{path}"><title>{escape(name)}</title></polyline>')
    for step, row in marks:
        x, _ = place(step, y_low)
        parts.append(
            f'<g class="mark"><line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
            f'<circle cx="{x:.1f}" cy="{_TOP - 12}" r="10"/><text x="{x:.1f}" y="{_TOP - 8}">{row.number}</text>'
            f"<title>{escape(row.title)}</title></g>"
        )
    return "".join(parts) + "</svg>"


def _axes(place: Place, x_max: float, y_low: float, y_high: float, x_name: str, y_name: str) -> list[str]:
    parts: list[str] = []
    for value in _ticks(0, x_max):
        x, _ = place(value, y_low)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}">{value:g}</text>')
    for value in _ticks(y_low, y_high):
        _, y = place(0, value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 16}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick left" x="{_LEFT - 6}" y="{y + 4:.1f}">{value:g}</text>')
    parts.append(f'<text class="tick" x="{(_WIDTH + _LEFT) / 2:.0f}" y="{_HEIGHT - 4}">{escape(x_name)}</text>')
    parts.append(f'<text class="tick left" x="{_LEFT - 6}" y="{_TOP - 14}">{escape(y_name)}</text>')
    return parts


def _ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round values between ``low`` and ``high``, at most ``most`` of them and one more."""
    raw = (high - low) / most or 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    pace = next(power * m for m in (1, 2, 5, 10) if power * m >= raw)
    first = math.ceil(low / pace)
    return [round(k * pace, 10) for k in range(first, math.floor(high / pace) + 1)]


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
:root {{ color-scheme: light dark; --ink: #1c2230; --paper: #fbfbf9; --soft: #6b7280; --rule: #d9dce3; --good: #177245;
  --bad: #b3261e; --control: #b9c3d6; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e6e8ee; --paper: #12151c; --soft: #9aa3b2; --rule: #2c3240;
  --good: #4fc38a; --bad: #ff7b72; --control: #47536b; }} }}
body {{ font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1040px;
  margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.7rem; margin-bottom: .3rem; }} h2 {{ margin-top: 2.2rem; font-size: 1.15rem; }}
.good {{ color: var(--good); }} .bad, .problem {{ color: var(--bad); }} .muted, p.how {{ color: var(--soft); }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; }} dt {{ color: var(--soft); }}
dd {{ margin: 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }}
@media (max-width: 40rem) {{ dl {{ grid-template-columns: 1fr; }} dd {{ margin-bottom: .5rem; }} }}
.scroll {{ overflow-x: auto; }} table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; padding: .45rem .6rem; border-bottom: 1px solid var(--rule); vertical-align: top; }}
th {{ color: var(--soft); font-weight: 600; font-size: .85rem; }} tr.note td {{ border-bottom: 1px solid var(--rule);
  padding-top: 0; color: var(--soft); font-size: .9rem; }} tr:has(+ tr.note) td {{ border-bottom: 0; }}
ul {{ margin: 0; padding-left: 1.1rem; }} svg {{ display: block; width: 100%; min-width: 46rem; height: auto; }}
.grid {{ stroke: var(--rule); }} .tick {{ fill: var(--soft); font-size: 12px; text-anchor: middle; }}
.tick.left {{ text-anchor: end; }} polyline {{ fill: none; stroke-width: 1.8; }}
.control {{ stroke: var(--control); stroke-width: 7; stroke-linecap: round; stroke-linejoin: round; }}
.tone0 {{ stroke: #d97706; }} .tone1 {{ stroke: #2563eb; }} .tone2 {{ stroke: #059669; }} .tone3 {{ stroke: #db2777; }}
.tone4 {{ stroke: #7c3aed; }} .tone5 {{ stroke: #0891b2; }}
.mark line {{ stroke: var(--bad); stroke-dasharray: 3 4; }} .mark circle {{ fill: var(--bad); }}
.mark text {{ fill: #fff; font-size: 12px; text-anchor: middle; font-weight: 700; }}
</style></head><body>
<h1 class="{tone}">{verdict}</h1>
<p>One training run without faults, and the same run with the faults below. Both end here:</p>
<dl>{facts}</dl>{problems}
<h2>Loss</h2><p class="how">Pale band: the undisturbed run. Thin lines: one colour an attempt of the run with faults.
Numbered marks: the faults of the table.</p><div class="scroll">{loss_chart}</div>
<h2>Faults</h2><p class="how">Times count from the fault: until it was detected, and until the
next step was trained. Redone: steps trained twice.</p>
<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>
<h2>Progress over time</h2><p class="how">Each fall is work lost since the newest verified checkpoint; each gap is the
time until training went on.</p><div class="scroll">{progress_chart}</div>
</body></html>
"""
