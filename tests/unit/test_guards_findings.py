"""What findings say: of each rule a run that breaks it, against the table of the documentation."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from guards_runs import healthy

from midwatch.config import GuardKind, GuardsConfig, ScheduleConfig
from midwatch.guards import Finding, Guards, Sample

PAGE = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "guards.md"
NAN = math.nan

Row = tuple[str, str, str, str]
"""Kind, metric, band, z."""


def documented() -> set[Row]:
    part = PAGE.read_text().split("## What a finding says")[1].split("\n## ")[0]
    rows: set[Row] = set()
    for line in part.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            kinds, metrics, band, z = cells[:4]
            rows |= {
                (kind, metric, band.replace("`", ""), z.replace("`", ""))
                for kind in re.findall(r"`(\w+)`", kinds)
                for metric in re.findall(r"`(\w+)`", metrics)
            }
    return rows


def row_of(finding: Finding) -> Row:
    band = ", ".join(name for name in ("low", "high") if getattr(finding, name) is not None)
    return finding.kind, finding.metric, band or "none", "none" if finding.z is None else "z"


def changed(steps: int, **by_metric: Any) -> Iterator[dict[str, Any]]:
    """A healthy run; each change is given the step and what the number would be."""
    for values in healthy(steps):
        for name, change in by_metric.items():
            values[name] = change(values["step"], values.get(name))
        yield values


def ranks(steps: int, sick: int, factor: float) -> Iterator[dict[str, Any]]:
    source = random.Random(3)
    for step in range(steps):
        losses = {rank: 2.0 * (1 + source.gauss(0, 0.01)) for rank in range(8)}
        losses[sick] *= factor if step >= 300 else 1.0
        yield {"step": step, "rank_losses": losses, "rank_norms": dict(losses), "rank_gradients": dict(losses)}


def wave(step: int) -> float:
    return 1 + 0.01 * math.sin(step * 1.7)


RUNS: dict[str, Iterable[dict[str, Any]]] = {
    "numbers that are not": [
        {"step": step, **values}
        for step, values in enumerate(
            [{"loss": NAN}, *[{"loss": 3.0}] * 60, {"grad_norm": NAN}, *[{"loss": 3.0}] * 60, {"param_norm": math.inf}]
        )
    ],
    "a rank's": [{"step": 0, "loss": 3.0, "rank_losses": {0: 3.0, 1: NAN}}],
    "a rank's gradient": [{"step": 0, "loss": 3.0, "rank_norms": {0: 3.0, 1: NAN}}],
    "steps left out": changed(320, grad_norm=lambda step, _: NAN if step > 300 else 0.5, loss_scale=lambda *_: 1024.0),
    "a start without a scale": [{"step": step, "grad_norm": NAN, "is_skipped": True} for step in range(80)],
    "a loss of zero": changed(10, loss=lambda step, was: 0.0 if step == 5 else was),
    "a small loss": changed(10, loss=lambda step, was: 0.01 if step == 5 else was),
    "spikes": changed(720, loss=lambda step, was: was * (1.12 if step >= 700 else 1)),
    "a jump without a trend": [{"step": 5000 + at, "loss": 3.0 if at < 9 else 9.0} for at in range(10)],
    "too good": changed(720, loss=lambda step, was: was * (0.8 if step >= 700 else 1)),
    "a rise": changed(1200, loss=lambda step, was: was * (1 + 0.0004 * min(250, max(0, step - 700)))),
    "a rise that half goes again": changed(
        1200, loss=lambda step, was: was * (1.06 if 700 <= step < 830 else 1.045 if step >= 830 else 1)
    ),
    "no learning": changed(9000, loss=lambda step, was: was * max(1.0, ((step + 10) / 3010) ** 0.2)),
    "a slow start": changed(800, loss=lambda step, _: 10.0 * wave(step)),
    "gradients": changed(720, grad_norm=lambda step, was: was * (8 if step in (700, 702, 704) else 1)),
    "a climb": changed(
        720, grad_norm=lambda step, was: {690: 39.0, 700: 4.0, 701: 9.0, 702: 19.0, 703: 40.0}.get(step, was)
    ),
    "a rate": [{"step": 0, "lr": 1e-3}, {"step": 1, "lr": 2e-3}],
    "a scale that falls": [{"step": step, "loss_scale": 2.0 ** min(20, 320 - step)} for step in range(310)],
    "a scale that is gone": [{"step": 0, "loss_scale": 1024.0}, {"step": 1, "loss_scale": 0.0}],
    "a scale that rises": [{"step": step, "loss_scale": 2.0 ** max(10, step - 290)} for step in range(310)],
    "updates": [
        {"step": step, "update_ratio": 0.004 * wave(step) * (5 if step == 600 else 1)} for step in range(0, 700, 10)
    ],
    "a large update": [{"step": 0, "update_ratio": 0.2}],
    "other weights": [
        {"step": step, "param_norm": 20 + 0.01 * step - (5 if step >= 500 else 0)} for step in range(510)
    ],
    "weights that stay": [{"step": 0, "unchanged_share": 0.2}],
    "a rank that is high": ranks(500, 5, 1.2),
    "a rank that is low": ranks(500, 2, 0.9),
    "replicas": [{"step": 0, "checksums": {0: "a", 1: "b", 2: "a"}}],
    "a resume": changed(650, loss=lambda step, was: was * (1.035 if step >= 600 else 1)),
    "data again": [{"step": 0, "seen_share": 0.3, "repeated_share": 0.2}],
    "a batch": [{"step": step, "token_entropy": 6.5 if step == 450 else 4.5 * wave(step)} for step in range(460)],
    "batches": [{"step": step, "token_entropy": 4.5 * wave(step) + (0.15 if step > 450 else 0)} for step in range(500)],
}
RUNS |= {
    "halved": [{"step": step, "token_entropy": 0.0 if step == 450 else 4.5 * wave(step)} for step in range(460)],
    "lower for long": [
        {"step": step, "token_entropy": wave(step) * (4.5 - 0.15 * (step > 450))} for step in range(500)
    ],
    "other tokens": [
        {"step": step, "token_distance": (0.5 if step > 450 else 0.2) * wave(step)} for step in range(500)
    ],
    "the same rows": [{"step": step, "same_rows_ranks": 2.0, "same_rows": (0, 1)} for step in range(2)],
    "another mix": [{"step": 0, "source_z": 6.0, "source": "'code' is all there is"}],
}
RUNS_OF_A_RANK = list(ranks(500, 5, 1.2))
PLAN = ScheduleConfig(kind="constant", peak_lr=1e-3, warmup_steps=1, total_steps=10_000)


def found_in(name: str) -> list[Finding]:
    guards = Guards(GuardsConfig(schedule=PLAN))
    found: list[Finding] = []
    for values in RUNS[name]:
        if name == "a resume" and values["step"] == 600:
            guards.resumed(600)
        found += guards.observe(Sample(**values)).findings
    return found


@pytest.fixture(scope="module")
def findings() -> dict[str, list[Finding]]:
    return {name: found_in(name) for name in RUNS}


def test_every_kind_says_what_the_documentation_says_it_does(findings: dict[str, list[Finding]]) -> None:
    said = {row_of(one) for found in findings.values() for one in found}
    assert {row[0] for row in said} == set(get_args(GuardKind)), "a rule that no run here breaks"
    assert said - documented() == set()
    assert documented() - said == set()


def test_what_was_found_lies_outside_of_its_band(findings: dict[str, list[Finding]]) -> None:
    for name, found in findings.items():
        for one in found:
            inside = (one.low is None or one.low < one.value) and (one.high is None or one.value < one.high)
            assert (one.low is None and one.high is None) or not inside, (name, one)
            assert one.low is None or one.high is None or one.low <= one.high


def test_a_value_without_a_band_is_none_or_impossible(findings: dict[str, list[Finding]]) -> None:
    for found in findings.values():
        for one in found:
            if one.low is None and one.high is None and one.value is not None:
                assert not math.isfinite(one.value) or one.value == 0, one


def test_the_shift_of_a_rank_is_told_as_it_is(findings: dict[str, list[Finding]]) -> None:
    (high,) = [one for one in findings["a rank that is high"] if one.metric == "loss"]
    assert high.ranks == (5,)
    # Told as soon as it is certain, when a part of the 64 steps lie before it.
    assert high.value == pytest.approx(2.0 * 1.2 ** ((high.step - 299) / 64), rel=0.02)


def test_a_rank_that_was_apart_all_the_64_steps_is_told_by_how_much() -> None:
    guards = Guards()
    found: list[Finding] = []
    source = random.Random(3)
    for step in range(700):
        losses = {rank: 2.0 * (1 + source.gauss(0, 0.01)) for rank in range(8)}
        losses[5] *= 1.2 if step >= 128 else 1.0
        found += guards.observe(Sample(step=step, rank_losses=losses)).findings
    (apart,) = found
    assert apart.value == pytest.approx(2.4, rel=0.01)
    assert "+20" in apart.text or "+19" in apart.text


def test_the_shift_of_a_rank_is_the_same_over_a_save_and_from_a_state_that_did_not_keep_it() -> None:
    whole, again, old = Guards(), Guards(), Guards()
    found: dict[str, list[Finding]] = {"whole": [], "again": [], "old": []}
    for values in RUNS_OF_A_RANK:
        if values["step"] == 310:
            state = json.loads(json.dumps(whole.state_dict()))
            again.load_state_dict(state)
            del state["parts"]["losses"]["true"]
            old.load_state_dict(state)
        sample = Sample(step=values["step"], rank_losses=values["rank_losses"])
        found["whole"] += whole.observe(sample).findings
        if values["step"] >= 310:
            found["again"] += again.observe(sample).findings
            found["old"] += old.observe(sample).findings
    assert found["again"] == found["whole"]
    assert [one.ranks for one in found["old"]] == [(5,)]
