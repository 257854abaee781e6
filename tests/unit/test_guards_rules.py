"""Each rule of the guards: what it fires on, at which step, and what it leaves alone."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from guards_runs import healthy, kinds, run

from midwatch.config import GuardsConfig, ScheduleConfig
from midwatch.guards import Guards, Sample, Schedule, sample_of, vote

NAN = float("nan")


def tiers(found: list[Any], kind: str) -> list[tuple[str, int]]:
    return [(one.tier, one.step) for one in found if one.kind == kind]


def test_a_healthy_run_has_nothing() -> None:
    assert [one for one in run(3000) if one.kind != "plateau"] == []


# --- the loss ------------------------------------------------------------------------------------------------------


def test_one_odd_batch_is_a_note_and_no_more() -> None:
    def change(step: int, values: dict[str, Any]) -> None:
        if step == 700:
            values["loss"] *= 1.12

    assert kinds(run(1200, change)) == [("spike", "note", 700)]


def test_five_in_a_row_are_a_trip_told_once_a_tier() -> None:
    def change(step: int, values: dict[str, Any]) -> None:
        if 700 <= step < 720:
            values["loss"] *= 1.12

    found = run(730, change)
    assert tiers(found, "spike") == [("note", 700), ("incident", 701), ("trip", 704)]
    trip = found[2]
    assert trip.low is not None
    assert trip.high is not None
    assert trip.value is not None
    assert trip.low < trip.high < trip.value
    assert trip.z is not None
    assert trip.z > 6


def test_a_huge_outlier_is_an_incident_alone() -> None:
    def change(step: int, values: dict[str, Any]) -> None:
        if step == 700:
            values["loss"] *= 2

    assert kinds(run(900, change)) == [("spike", "incident", 700)]


def test_trip_after_and_tiers_are_settings() -> None:
    def change(step: int, values: dict[str, Any]) -> None:
        if 700 <= step < 710:
            values["loss"] *= 1.12

    late = run(720, change, config=GuardsConfig(trip_after=8))
    assert tiers(late, "spike")[-1] == ("trip", 707)
    assert run(720, change, config=GuardsConfig(spike_z=(60.0, 80.0, 200.0))) == []


def test_nothing_is_judged_by_statistics_before_they_are_known() -> None:
    def change(step: int, values: dict[str, Any]) -> None:
        if step in (20, 100, 150, 199):
            values["loss"] *= 3
            values["grad_norm"] *= 50

    assert run(400, change) == []


def test_the_warm_up_moves_the_start() -> None:
    def change(step: int, values: dict[str, Any]) -> None:
        if step == 500:
            values["loss"] *= 3

    assert run(600, change) != []
    assert run(600, change, config=GuardsConfig(schedule=ScheduleConfig(warmup_steps=400))) == []


def test_too_good_points_down() -> None:
    def change(step: int, values: dict[str, Any]) -> None:
        if step >= 700:
            values["loss"] *= 0.8

    assert kinds(run(720, change)) == [("too_good", "incident", 702)]


def test_a_slow_rise_is_seen_by_its_level() -> None:
    def change(step: int, values: dict[str, Any]) -> None:
        if step >= 700:
            values["loss"] *= 1 + 0.0004 * min(250, step - 700)

    found = tiers(run(1200, change), "level_rise")
    assert [tier for tier, _ in found] == ["incident", "trip"]
    assert 700 < found[0][1] < 950
    assert 100 <= found[1][1] - found[0][1] <= 160


def test_a_stop_of_learning_is_advice() -> None:
    def change(step: int, values: dict[str, Any]) -> None:
        if step >= 3000:
            values["loss"] *= (step + 10) ** 0.2 / 3010**0.2

    assert {(kind, tier) for kind, tier, _ in kinds(run(9000, change))} == {("plateau", "note")}


@pytest.mark.parametrize(("loss", "kind"), [(NAN, "nonfinite"), (math.inf, "nonfinite"), (0.0, "zero_loss")])
def test_impossible_values_trip_at_once_and_are_told_once(loss: float, kind: str) -> None:
    guards = Guards()
    assert guards.observe(Sample(step=0, loss=10.0)).ok
    judgements = [guards.observe(Sample(step=step, loss=loss)) for step in range(1, 30)]
    assert kinds([one for judgement in judgements for one in judgement.findings]) == [(kind, "trip", 1)]
    assert all(judgement.is_anomalous for judgement in judgements), "each of the steps counts"
    assert not any(judgement.ok for judgement in judgements)


def test_a_loss_that_becomes_small_is_an_incident_and_stops_nothing() -> None:
    guards = Guards()
    assert guards.observe(Sample(step=0, loss=10.0)).ok
    judgements = [guards.observe(Sample(step=step, loss=0.01)) for step in range(1, 30)]
    assert kinds([one for judgement in judgements for one in judgement.findings]) == [("low_loss", "incident", 1)]
    assert all(judgement.ok and not judgement.is_anomalous for judgement in judgements)


@pytest.mark.parametrize("loss", [0.0, 0.01])
def test_a_loss_that_never_was_one_is_a_note(loss: float) -> None:
    guards = Guards()
    judgements = [guards.observe(Sample(step=step, loss=loss)) for step in range(300)]
    assert [one.tier for judgement in judgements for one in judgement.findings] == ["note"]
    assert all(judgement.ok for judgement in judgements)


def test_a_kind_that_is_off_neither_speaks_nor_counts() -> None:
    guards = Guards(GuardsConfig(off=("low_loss", "spike")))
    judgements = [
        guards.observe(Sample(**{**values, "loss": 0.001 if values["step"] else 9.0})) for values in healthy(30)
    ]
    assert not any(judgement.findings or judgement.is_anomalous for judgement in judgements)


def test_a_floor_of_nothing_allows_small_losses() -> None:
    guards = Guards(GuardsConfig(entropy_floor=0.0))
    assert guards.observe(Sample(step=0, loss=5.0)).findings == ()
    assert guards.observe(Sample(step=0, loss=0.001)).findings == ()
    assert guards.observe(Sample(step=1, loss=-3.0)).findings == ()


def test_a_step_in_two_samples_counts_once() -> None:
    whole, halves = Guards(), Guards()
    for values in healthy(900):
        step = values["step"]
        if step == 600:
            values["loss"] *= 2
        expected = whole.observe(Sample(**values))
        first = halves.observe(Sample(step=step, loss=values["loss"]))
        second = halves.observe(Sample(step=step, loss=values["loss"] * 50, grad_norm=values["grad_norm"]))
        assert (*first.findings, *second.findings) == expected.findings
    assert whole.state_dict() == halves.state_dict()


# --- gradients, scale, schedule ------------------------------------------------------------------------------------


def test_a_norm_that_doubles_and_doubles_warns_before_the_loss_jumps_without_a_history() -> None:
    guards = Guards()
    rows = [(5000, 2.2, 0.24), (5001, 2.22, 0.95), (5002, 2.3, 2.4), (5003, 2.24, 16.0), (5004, 2.3, 145.0)]
    found = [
        one
        for step, loss, norm in rows
        for one in guards.observe(Sample(step=step, loss=loss, grad_norm=norm)).findings
    ]
    assert kinds(found) == [("grad_climb", "note", 5003)]


def test_three_large_norms_in_five_steps_are_a_note_and_with_the_loss_an_incident() -> None:
    def norms(step: int, values: dict[str, Any]) -> None:
        if step in (700, 702, 704):
            values["grad_norm"] *= 8

    def both(step: int, values: dict[str, Any]) -> None:
        norms(step, values)
        if step == 703:
            values["loss"] *= 1.12

    assert kinds(run(800, norms)) == [("grad_spike", "note", 704)]
    assert ("grad_spike", "incident", 704) in kinds(run(800, both))


def test_a_dynamic_scale_may_leave_out_three_steps_in_ten() -> None:
    def skipping(steps: set[int]) -> list[Any]:
        guards = Guards(is_scaling_dynamic=True)
        found: list[Any] = []
        for values in healthy(600):
            if values["step"] in steps:
                values |= {"grad_norm": math.inf, "is_skipped": True}
            found += guards.observe(Sample(**values)).findings
        return kinds(found)

    assert skipping({40, 300, 303, 309, 400}) == []
    assert skipping({300, 301, 302, 303}) == [("nonfinite", "trip", 303)]


def test_an_infinite_norm_is_no_overflow_where_nothing_scales() -> None:
    assert kinds(Guards().observe(Sample(step=3, loss=2.0, grad_norm=math.inf)).findings) == [("nonfinite", "trip", 3)]


def test_a_scale_that_collapses_or_runs_away() -> None:
    guards = Guards()
    found: list[Any] = []
    scale = 2.0**20
    for step in range(400):
        if step < 8 or 300 <= step < 306:
            scale /= 2  # the first search for it is no fault
        if 350 <= step < 356:
            scale *= 2
        found += guards.observe(Sample(step=step, loss_scale=scale)).findings
    assert kinds(found) == [("scale_collapse", "trip", 302), ("scale_runaway", "incident", 352)]


COSINE = ScheduleConfig(kind="cosine", peak_lr=1e-3, warmup_steps=100, total_steps=2000, floor_ratio=0.1)


def cosine(step: int) -> float:
    if step < 100:
        return 1e-3 * (step + 1) / 100
    return 1e-4 + 9e-4 * (1 + math.cos(math.pi * (step - 100) / 1900)) / 2


def test_the_rate_follows_the_plan_or_not() -> None:
    guards = Guards(GuardsConfig(schedule=COSINE))
    for step in range(2000):
        rates = (cosine(step), 10 * cosine(step))
        assert guards.observe(Sample(step=step, lr=rates)).findings == ()
    assert kinds(guards.observe(Sample(step=2000, lr=(1e-4, 2e-3))).findings) == [("lr_off_plan", "incident", 2000)]


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_schedule_that_counts_from_elsewhere_by_one_is_no_fault(shift: int) -> None:
    guards = Guards(GuardsConfig(schedule=COSINE))
    assert not [
        one for step in range(1, 1999) for one in guards.observe(Sample(step=step, lr=cosine(step + shift))).findings
    ]


def test_rates_of_two_moments_and_rates_that_are_not_told_are_judged_all_the_same() -> None:
    """One group is logged behind the scheduler, another measured before it, and at each tenth step only."""
    guards = Guards(GuardsConfig(schedule=COSINE))

    def rates(step: int) -> tuple[float | None, ...]:
        others = (10 * cosine(step - 1), None, 0.5 * cosine(step)) if step % 10 == 0 else ()
        return (None if step % 3 == 0 else cosine(step), *others)

    assert [one for step in range(1, 1500) for one in guards.observe(Sample(step=step, lr=rates(step))).findings] == []
    (found,) = guards.observe(Sample(step=1500, lr=(None, 10 * cosine(1500), None, 0.6 * cosine(1500)))).findings
    assert "of group 3" in found.text


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1e-3])
def test_a_rate_that_none_can_be_is_told_of_any_group(rate: float) -> None:
    guards = Guards(GuardsConfig(schedule=COSINE))
    assert kinds(guards.observe(Sample(step=200, lr=(cosine(200), rate))).findings) == [
        ("lr_off_plan", "incident", 200)
    ]


def test_guards_that_were_saved_with_a_single_multiple_go_on() -> None:
    guards = Guards(GuardsConfig(schedule=COSINE))
    for step in range(300):
        guards.observe(Sample(step=step, lr=(cosine(step), 10 * cosine(step))))
    state = guards.state_dict()
    state["parts"]["schedule"]["ratios"] = [1.0, 10.0]
    guards.load_state_dict(json.loads(json.dumps(state, allow_nan=False)))
    for step in range(300, 600):
        assert guards.observe(Sample(step=step, lr=(cosine(step), 10 * cosine(step)))).findings == ()
    (found,) = guards.observe(Sample(step=600, lr=(cosine(600), 9 * cosine(600)))).findings
    assert "of group 1" in found.text


def test_a_rate_that_warms_up_again_is_told_at_once() -> None:
    guards = Guards(GuardsConfig(schedule=COSINE))
    found = [one for step in range(900) for one in guards.observe(Sample(step=step, lr=cosine(step % 700))).findings]
    assert kinds(found) == [("lr_off_plan", "incident", 700)]


def test_either_way_to_a_floor_follows_the_plan() -> None:
    plan = Schedule(ScheduleConfig(kind="wsd", peak_lr=1.0, total_steps=200, decay_start=100, floor_ratio=0.1))
    low, high = plan.band(150)
    assert low <= 0.5 <= high
    assert low <= 0.55 <= high
    assert not low <= 0.6 <= high
    assert plan.band(50) == (pytest.approx(0.995), pytest.approx(1.005))


# --- weights, ranks, resume, data ----------------------------------------------------------------------------------


def test_an_update_after_a_lost_optimizer_state() -> None:
    def sick(guards: Guards) -> list[Any]:
        found: list[Any] = []
        for step in range(0, 900, 10):
            ratio = 0.004 * (1 + 0.1 * math.sin(step)) * (5 if step == 600 else 1)
            if step == 600:
                guards.resumed(step)
            found += guards.observe(Sample(step=step, update_ratio=ratio)).findings
        return found

    assert kinds(sick(Guards())) == [("update_jump", "incident", 600)]


def test_weights_of_another_step_and_weights_that_stay() -> None:
    guards = Guards()
    found: list[Any] = []
    for step in range(600):
        norm = 20 + 0.01 * step if step < 500 else 22 + 0.01 * step - 5
        found += guards.observe(Sample(step=step, param_norm=norm)).findings
    found += guards.observe(Sample(step=600, unchanged_share=0.2)).findings
    assert kinds(found) == [("weights_jump", "note", 500), ("weights_stalled", "note", 600)]


def test_a_vote_names_the_odd_rank() -> None:
    assert not vote({0: "a", 1: "a", 2: "a"}).is_split
    assert vote({0: "a", 1: "b", 2: "a"}).odd_ranks == (1,)
    undecided = vote({0: "a", 1: "b"})
    assert undecided.is_split
    assert not undecided.is_decided
    assert undecided.odd_ranks == (0, 1)
    assert not vote({0: "a", 1: ""}).is_split, "who has no checksum does not vote"
    assert vote({}).voters == 0
    assert vote({0: "b", 1: "a", 2: "b", 3: "a"}) == vote({3: "a", 2: "b", 1: "a", 0: "b"})


def test_replicas_that_part_are_told_once_until_they_agree_again() -> None:
    guards = Guards()
    found: list[Any] = []
    for step in range(0, 1000, 100):
        odd = "x" if step in (300, 400, 700) else "a"
        found += guards.observe(Sample(step=step, checksums={0: "a", 1: "a", 2: odd})).findings
    assert [(one.step, one.ranks) for one in found] == [(300, (2,)), (700, (2,))]
    assert "equal at step 200" in found[0].text


def test_the_first_rank_that_is_not_finite_is_named() -> None:
    finding = Guards().observe(Sample(step=7, loss=NAN, rank_losses={0: 2.1, 1: NAN, 2: 2.2})).findings[0]
    assert finding.ranks == (1,)
    assert "rank 1" in finding.text


def test_a_rank_that_drifts_away_is_named_and_one_with_harder_data_is_not() -> None:
    source = random.Random(5)
    guards = Guards()
    found: list[Any] = []
    for step in range(700):
        losses = {rank: 2.0 * (1 + source.gauss(0, 0.03)) for rank in range(8)}
        losses[2] *= 1.1
        if step >= 400:
            losses[5] *= 1.08
        found += guards.observe(Sample(step=step, rank_losses=losses)).findings
    assert [(one.kind, one.ranks) for one in found] == [("rank_apart", (5,))]
    assert 400 < found[0].step < 520


def test_of_two_ranks_that_part_none_is_blamed() -> None:
    guards = Guards()
    found: list[Any] = []
    for step in range(400):
        other = 2.0 if step < 250 else 2.3
        found += guards.observe(Sample(step=step, rank_norms={0: 2.0 + 0.01 * math.sin(step), 1: other})).findings
    assert [one.ranks for one in found] == [()]


@pytest.mark.parametrize("at", [403, 408])
def test_a_drift_is_seen_over_a_save_and_through_steps_without_a_value(at: int) -> None:
    """One that the others never see, too: JSON is what a checkpoint keeps."""

    def run(split: int | None) -> list[Any]:
        source, guards = random.Random(5), Guards()
        found: list[Any] = []
        for step in range(700):
            if step == split:
                state = json.loads(json.dumps(guards.state_dict()))
                guards = Guards()
                guards.load_state_dict(state)
            losses = {rank: 2.0 * (1 + source.gauss(0, 0.03)) for rank in range(8)}
            losses[5] *= 1.08 if step >= 400 else 1.0
            losses[3] = NAN if step % 7 == 0 else losses[3]
            del losses[step % 5]
            found += guards.observe(Sample(step=step, rank_norms=losses)).findings
        return [one for one in found if one.kind == "rank_apart"]

    whole = run(None)
    assert [one.ranks for one in whole] == [(5,)]
    assert run(at) == whole


def resumed_at(at: int, factor: float) -> list[tuple[str, str, int]]:
    guards = Guards()
    found: list[Any] = []
    for values in healthy(at + 200):
        if values["step"] == at:
            again = Guards()
            again.load_state_dict(guards.state_dict())
            guards = again
            guards.resumed(at)
        if values["step"] >= at:
            values["loss"] *= factor
        found += guards.observe(Sample(**values)).findings
    return kinds(found)


def test_stale_weights_after_a_resume_raise_the_first_losses() -> None:
    assert resumed_at(600, 1.0) == []
    assert ("resume_shift", "incident", 619) in resumed_at(600, 1.035)


def test_what_the_loader_says_is_noted() -> None:
    guards = Guards()
    found: list[Any] = []
    for step in range(500):
        bits = 4.5 + 0.1 * math.sin(step * 1.7)
        more = {"seen_share": 0.3} if step == 400 else {"repeated_share": 0.2} if step == 420 else {}
        found += guards.observe(Sample(step=step, token_entropy=6.5 if step == 450 else bits, **more)).findings
    assert kinds(found) == [
        ("data_repeated", "note", 400),
        ("data_repeated", "note", 420),
        ("data_changed", "note", 450),
    ]


def noted(samples: list[dict[str, Any]]) -> list[tuple[int, str, tuple[int, ...]]]:
    """(step, kind, ranks) of what is found in some steps, which start at 0."""
    guards = Guards()
    found = [one for step, more in enumerate(samples) for one in guards.observe(Sample(step=step, **more)).findings]
    assert {one.tier for one in found} <= {"note"}
    return [(one.step, one.kind, one.ranks) for one in found]


def test_one_rank_that_reads_again_is_named_when_it_goes_on_to() -> None:
    calm = {"seen_share": 0.0}
    odd = {"seen_share": 0.02, "rank_seen": {5: 1.0}}
    other = {"seen_share": 0.02, "rank_seen": {6: 0.5}}
    assert noted([calm, odd, calm, odd, calm, odd, odd]) == [(5, "data_repeated", (5,))]
    assert noted([odd, other, calm, calm, odd, other, calm, calm]) == []
    assert noted([{"repeated_share": 0.01, "rank_repeated": {2: 0.2}}] * 4) == [(2, "data_repeated", (2,))]
    assert noted([{"seen_share": 0.5, "rank_seen": {1: 1.0}}] * 4) == [(0, "data_repeated", ())]


def test_ranks_that_read_the_same_are_named_the_second_time_in_a_row() -> None:
    alike = {"same_rows_ranks": 2.0, "same_rows": (1, 3)}
    none = {"same_rows_ranks": 0.0}
    assert noted([none, alike, none, alike, none]) == []
    assert noted([alike, {"same_rows_ranks": 2.0, "same_rows": (0, 2)}, none]) == []
    assert noted([alike, {"same_rows_ranks": 4.0, "same_rows": (0, 1, 2, 3)}, alike]) == [(1, "data_shared", (1, 3))]
    assert noted([{"same_rows_ranks": 2.0}] * 3) == [(1, "data_shared", ())], "of a curve only the number is known"


def test_sources_without_their_shares_are_noted_once() -> None:
    off = {"source_z": 5.5, "source": "'code' is 3% of what was read lately"}
    assert noted([{"source_z": 4.9}, off, off]) == [(1, "data_off_mix", ())]


def test_a_batch_of_one_token_has_no_entropy_and_is_noted() -> None:
    steps = [{"token_entropy": 8.0 + 0.1 * math.sin(step)} for step in range(300)]
    assert noted([*steps, {"token_entropy": 0.0}]) == [(300, "data_changed", ())]


def test_a_state_from_before_distances_were_kept_goes_on() -> None:
    def feed(guards: Guards, steps: range) -> list[Any]:
        found: list[Any] = []
        for step in steps:
            bits = 2.0 if step == 450 else 4.5 + 0.1 * math.sin(step * 1.7)
            found += guards.observe(Sample(step=step, token_entropy=bits, seen_share=0.3)).findings
        return kinds(found)

    guards = Guards()
    assert feed(guards, range(300)) == [("data_repeated", "note", 0)]
    state = guards.state_dict()
    old = state["parts"]["batches"]
    for name in ("distance", "distances", "apart", "shared", "off_mix", "sharing"):
        del old[name]
    for name in ("seen", "repeated"):
        del old[name]["lately"]
    again = Guards()
    again.load_state_dict(state)
    assert feed(again, range(300, 500)) == [("data_changed", "note", 450)]


def test_a_sample_is_made_of_what_a_script_logs() -> None:
    logged = {
        "loss": 2,
        "grad_norm": 0.5,
        "lr": [1e-3, 2e-3],
        "tokens": 4096,
        "note": "x",
        "skipped": 1,
        "loss_scale": True,
    }
    assert sample_of(7, logged) == Sample(step=7, loss=2.0, grad_norm=0.5, lr=(1e-3, 2e-3), is_skipped=True)
    assert sample_of(8, {"loss": None, "lr": 3e-4, "param_norm": "?"}) == Sample(step=8, lr=3e-4)
    assert sample_of(9, {"lr": [], "loss": 10**400}) == Sample(step=9)
    spelled_out = {"lr": 1e-3, "lr_group1": 2e-3, "lr_group3": math.nan, "lr_group9": 1.0}
    assert repr(sample_of(7, spelled_out).lr) == "(0.001, 0.002, None, nan)"


# --- how numbers are written ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("decimals", [1, 2, 3])
def test_a_loss_that_is_printed_coarsely_has_no_spikes_of_its_own(decimals: int) -> None:
    def change(step: int, values: dict[str, Any]) -> None:
        values["loss"] = round(values["loss"], decimals)
        values["grad_norm"] = round(values["grad_norm"], 1)
        if step == 2500:
            values["loss"] += 1.0

    found = [one for one in run(3000, change) if one.kind != "plateau"]
    assert {one.step for one in found if one.tier != "note"} <= {2500}
    assert [one.kind for one in found if one.step == 2500] == ["spike"]
    assert len(found) <= 4


def test_shares_that_are_no_numbers_say_nothing() -> None:
    guards = Guards()
    for value in (NAN, math.inf):
        sample = Sample(step=5, loss=2.5, unchanged_share=value, seen_share=value, repeated_share=value)
        assert guards.observe(sample).findings == ()
