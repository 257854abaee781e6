"""The guards over whole recorded runs: healthy ones stay quiet, sick ones are noticed where they fall ill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from midwatch.guards import Finding
from midwatch.triage import Report, read_facts, replay, report

ROOT = Path(__file__).resolve().parents[2]
CURVES = ROOT / "tests" / "data" / "curves"
REAL = ROOT.parent / "shared" / "cases" / "curves" / "real"


def judged(path: Path) -> Report:
    facts = path.with_suffix("").with_suffix(".facts.json")
    return report(replay(path, read_facts(facts) if facts.exists() else None))


def alarms(found: Report) -> list[tuple[str, str, int]]:
    return [(one.kind, one.tier, one.step) for one in found.incidents if one.tier != "note"]


@pytest.mark.parametrize("path", sorted(CURVES.glob("healthy_*.csv")), ids=lambda path: path.stem)
def test_a_healthy_run_is_called_healthy(path: Path) -> None:
    found = judged(path)
    assert alarms(found) == []
    assert len(found.incidents) <= 3
    assert found.verdict.cause == "none"
    assert "supports" not in {check.result for check in found.checks}


SICK: list[tuple[str, dict[str, Any]]] = [
    ("corrupt_1step", {"kind": "spike", "step": 400}),
    ("corrupt_10step", {"kind": "spike", "tier": "trip", "step": 404}),
    ("dup_rows_half", {"kind": "data_repeated", "tier": "note", "step": 400}),
    ("lr_spike_x30_3step", {"kind": "lr_off_plan", "tier": "incident", "step": 400}),
    ("plateau_lr_drop", {"kind": "lr_off_plan", "tier": "incident", "step": 150}),
    ("resume_no_optim", {"kind": "update_jump", "tier": "incident", "step": 400}),
    ("resume_stale_weights", {"kind": "weights_jump", "tier": "incident", "step": 400}),
    ("resume_stale_weights", {"kind": "resume_shift", "tier": "incident", "step": 419}),
    ("resume_rewind_data", {"kind": "data_repeated", "tier": "note", "step": 400}),
    ("fp16_overflow_nan", {"kind": "scale_runaway", "tier": "incident", "step": 402}),
    ("fp16_overflow_nan", {"kind": "nonfinite", "tier": "trip", "step": 410}),
    ("bitflip_weight", {"kind": "nonfinite", "tier": "trip", "step": 400}),
    ("ddp2_bitflip_rank1", {"kind": "nonfinite", "tier": "trip", "step": 280, "ranks": (1,)}),
    ("ddp2_bitflip_soft_rank1", {"kind": "replicas_split", "tier": "trip", "step": 280}),
]


@pytest.mark.parametrize(("name", "wanted"), SICK, ids=lambda value: value if isinstance(value, str) else value["kind"])
def test_a_sick_run_is_noticed_at_once(name: str, wanted: dict[str, Any]) -> None:
    found = judged(CURVES / f"{name}.csv")

    def fits(one: Finding) -> bool:
        return all(getattr(one, key) == value for key, value in wanted.items())

    assert any(fits(one) for one in found.incidents), found.incidents
    assert found.verdict.cause in ("undecided", "none")
    event = 150 if "plateau" in name else 280 if "ddp2" in name else 400
    assert not [one for one in alarms(found) if one[2] < event - 1], "an alarm before anything happened"


# --- real curves, where they are at hand ---------------------------------------------------------------------------

INDEX = REAL / "index.jsonl"
LABELS = [json.loads(line) for line in INDEX.read_text().splitlines()] if INDEX.exists() else []
needs_real = pytest.mark.skipif(not LABELS, reason=f"no recorded curves of real runs at {REAL}")


@needs_real
@pytest.mark.parametrize("name", [label["file"] for label in LABELS if label["healthy"]] or [None])
def test_a_real_healthy_run_has_no_incident(name: str) -> None:
    found = judged(REAL / name)
    assert alarms(found) == []
    assert len(found.incidents) <= 5 + 0.005 * found.curve["rows"]
    assert found.verdict.cause == "none" or {one.kind for one in found.incidents} >= {"plateau"}


@needs_real
def test_real_spikes_are_noted_and_the_largest_raised() -> None:
    label = next(label for label in LABELS if "mixtral" in label["file"])
    found = judged(REAL / label["file"])
    steps = [one.step for one in found.incidents]
    missed = [spike for spike in label["spikes"] if not any(spike - 60 <= step <= spike + 15 for step in steps)]
    assert missed == []
    raised = [step for _, _, step in alarms(found)]
    assert any(spike - 60 <= step <= spike + 15 for spike in label["largest"] for step in raised)


@needs_real
def test_a_climbing_gradient_norm_warns_before_the_loss_jumps() -> None:
    found = judged(REAL / "bigscience_tr11_176b_fragments.csv")
    assert [one.kind for one in found.incidents if 31215 <= one.step <= 31217] == ["grad_climb"]


@needs_real
def test_a_collapsing_loss_scale_is_a_trip() -> None:
    found = judged(REAL / "bigscience_tr8b_104b_fragments.csv")
    assert ("scale_collapse", "trip", 17065) in alarms(found)
