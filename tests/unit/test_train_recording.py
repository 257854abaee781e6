"""What midwatch records by itself, in one process: rates, the loss scale, the parts of a step, memory, late words."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import midwatch  # noqa: E402
from midwatch.audit import Journal, read_journal, read_ledger  # noqa: E402
from midwatch.checkpoint import Identity  # noqa: E402
from midwatch.train.gauges import Gauges  # noqa: E402
from midwatch.train.metrics import MetricLog  # noqa: E402
from midwatch.train.readings import Readings  # noqa: E402
from midwatch.train.resources import LOOK_EVERY_S, Resources  # noqa: E402
from midwatch.train.voice import BEFORE, Voice  # noqa: E402

pytestmark = pytest.mark.torch


def records_of(run_dir: Path) -> dict[int, dict[str, Any]]:
    return {record["step"]: record for record in read_journal([run_dir / "metrics" / "a0001.jsonl"])}


def optimizer_of(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates])


def parts_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {"model": torch.nn.ParameterList(parameters), "optimizer": optimizer}


def settings(folder: Path, every: int = 2, **guards: Any) -> dict[str, Any]:
    return {
        "run": {"dir": str(folder), "log_every": 1},
        "checkpoint": {"interval": 1000, "absent_on_purpose": ["scheduler", "data", "scaler"]},
        "metrics": {"every": every},
        "guards": guards,
    }


# --- gauges -----------------------------------------------------------------------------------------------------------


def test_the_rate_of_a_step_is_the_one_it_was_made_with() -> None:
    optimizer = optimizer_of(0.1, 0.2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1))
    gauges = Gauges(optimizer, None)
    found: list[dict[str, Any]] = []
    for _ in range(2):
        optimizer.step()
        scheduler.step()
        found.append(gauges.read())
    assert found == [{"lr": 0.1, "lr_group1": 0.2}, {"lr": 0.05, "lr_group1": 0.1}]
    assert gauges.read() == {"lr": 0.1 / 3, "lr_group1": 0.2 / 3}, "no step was made: as it is now"
    gauges.close()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 7.0
    assert gauges.read()["lr"] == 7.0


def test_a_rate_that_is_lowered_within_the_step_is_recorded_as_planned() -> None:
    optimizer = optimizer_of(0.1)
    optimizer.register_step_pre_hook(lambda one, *_: one.param_groups[0].update(lr=0.01))
    gauges = Gauges(optimizer, None)
    optimizer.step()
    assert gauges.read() == {"lr": 0.1}
    gauges.close()


def test_rates_that_are_tensors_are_copied_and_other_optimizers_are_none_of_ours() -> None:
    rate = torch.tensor(0.5)
    optimizer, other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=rate), optimizer_of(9.0)
    gauges = Gauges(optimizer, None)
    optimizer.step()
    other.step()
    rate.fill_(3.0)
    assert gauges.read() == {"lr": 0.5}
    assert Gauges(None, None).read() == {}
    gauges.close()


# --- records ----------------------------------------------------------------------------------------------------------


def test_words_that_come_late_join_their_step(tmp_path: Path) -> None:
    path = tmp_path / "a0001.jsonl"
    log = MetricLog(Journal(path), every=1)
    for step in range(3):
        log.add(step, {"loss": float(step)})
    log.note(0, {"loss": 10.0, "loss_max": 11.0}, is_better=True)
    log.note(2, {"loss": 12.0, "memory": 1})
    log.note(3, {"loss": 13.0})
    log.close()
    joined: dict[int, dict[str, Any]] = {}
    for record in read_journal([path]):
        joined.setdefault(record["step"], {}).update(record)
    assert [joined[step]["loss"] for step in range(4)] == [10.0, 1.0, 2.0, 13.0], "the script's, unless ours is better"
    assert (joined[0]["loss_max"], joined[2]["memory"]) == (11.0, 1)


def test_a_record_waits_for_what_is_known_to_come_late(tmp_path: Path) -> None:
    path = tmp_path / "a0001.jsonl"
    log = MetricLog(Journal(path), every=1)
    log.late_steps = 1
    for step in range(4):
        log.add(step, {"loss": 0.0})
        log.note(step - 1, {"loss_max": float(step - 1)})
    log.close()
    records = read_journal([path])
    assert [record["step"] for record in records] == [-1, 0, 1, 2, 3]
    assert [record["loss_max"] for record in records[:4]] == [-1.0, 0.0, 1.0, 2.0]


def test_rates_of_several_groups_are_numbers_of_their_own(tmp_path: Path) -> None:
    log = MetricLog(Journal(tmp_path / "a0001.jsonl"), every=1)
    log.add(0, {"lr": [0.1, torch.tensor(0.2), 0.3]})
    log.add(0, {"lr": ()})
    assert log.latest() == pytest.approx({"lr": 0.1, "lr_group1": 0.2, "lr_group2": 0.3})
    with pytest.raises(TypeError, match="lr_group1"):
        log.add(0, {"lr": [0.1, [0.2]]})
    log.close()


def test_a_loop_that_goes_back_takes_back_what_the_one_before_has_logged(tmp_path: Path) -> None:
    path = tmp_path / "a0001.jsonl"
    journal = Journal(path)
    log = MetricLog(journal, every=10)
    for start, stop, loss in ((0, 29, 1.0), (20, 23, 2.0)):
        log.begin()
        journal.begin(1, start)
        for step in range(start, stop):
            log.add(step, {"loss": loss})
            log.note(step, {"lr": 0.1})
    log.close()
    records = read_journal([path])
    assert [record["step"] for record in records] == list(range(23))
    assert [record["loss"] for record in records[19:]] == [1.0, 2.0, 2.0, 2.0]
    assert all("lr" in record for record in records), "a step that comes again has one record, not two"


def test_nothing_that_another_rank_knows_is_hidden_by_a_rank_that_knows_nothing(tmp_path: Path) -> None:
    log = MetricLog(Journal(tmp_path / "a0001.jsonl"), every=1)
    log.add(0, {"grad_norm": None})
    log.note(0, {"grad_norm": 4.0})
    log.close()
    assert read_journal([tmp_path / "a0001.jsonl"])[0]["grad_norm"] == 4.0


def test_a_whole_number_of_any_size_is_no_end_of_training(tmp_path: Path) -> None:
    log = MetricLog(Journal(tmp_path / "a0001.jsonl"), every=1)
    log.add(0, {"seen": 10**400, "owed": -(10**400)})
    assert log.latest() == {"seen": math.inf, "owed": -math.inf}
    log.close()


def test_what_is_logged_behind_the_end_is_said_to_be_lost_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = MetricLog(Journal(tmp_path / "a0001.jsonl"), every=1)
    log.close()
    for _ in range(3):
        log.add(9, {"accuracy": 0.5})
    assert caplog.text.count("after the run was closed, and not kept: accuracy") == 1


# --- a rank's own voice -----------------------------------------------------------------------------------------------


def test_a_rank_without_anything_to_say_leaves_no_file(tmp_path: Path) -> None:
    voice = Voice(Identity(run="r", attempt=1, rank=7), None, lambda: Journal(tmp_path / "a0001-r00007.jsonl"), 1)
    voice.begin(0)
    for step in range(500):
        voice.remember(step, {"rank_loss": float(step)})
    voice.flush()
    assert list(tmp_path.iterdir()) == []
    voice.speak_up(499)
    voice.remember(500, {"rank_loss": 500.0})
    voice.add(500, {"shard": 3})
    voice.close()
    records = read_journal(tmp_path.iterdir())
    assert [record["step"] for record in records] == list(range(500 - BEFORE, 501))
    assert (records[-1]["rank_loss"], records[-1]["shard"]) == (500.0, 3)
    assert '"rank":7,"start":0' in (tmp_path / "a0001-r00007.jsonl").read_text().splitlines()[0]


def test_a_rank_forgets_the_steps_that_a_loop_takes_back(tmp_path: Path) -> None:
    voice = Voice(Identity(run="r", attempt=1, rank=7), None, lambda: Journal(tmp_path / "a0001-r00007.jsonl"), 1)
    for start, stop in ((0, 30), (20, 25)):
        voice.begin(start)
        for step in range(start, stop):
            voice.remember(step, {"rank_loss": float(start)})
    voice.speak_up(24)
    voice.close()
    records = read_journal(tmp_path.iterdir())
    assert [(record["step"], record["rank_loss"]) for record in records] == [
        (step, 0.0 if step < 20 else 20.0) for step in range(25)
    ]


def test_a_rank_that_cannot_open_its_journal_trains_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    voice = Voice(Identity(run="r", attempt=1, rank=7), None, lambda: Journal(tmp_path / "file" / "j.jsonl"), 1)
    voice.begin(0)
    for step in range(3):
        voice.add(step, {"x": 1})
    voice.speak_up(2)
    voice.close()
    assert caplog.text.count("keeps no journal of its own") == 1


# --- resources --------------------------------------------------------------------------------------------------------


def test_memory_is_looked_at_once_a_second() -> None:
    now = [5.0]
    resources = Resources(lambda: now[0])
    first = resources.look()
    assert 10e6 < first["memory_rss_bytes"] < 1e12
    assert 0 < first["memory_available_bytes"] <= first["memory_limit_bytes"]
    assert not any(name.startswith(("cuda", "gpu")) for name in first) or torch.cuda.is_available()
    assert resources.look() is first
    now[0] += LOOK_EVERY_S
    assert resources.look() is not first


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["pause", "off"])
def test_a_run_records_by_itself(tmp_path: Path, action: str) -> None:
    optimizer = optimizer_of(0.1, 0.3)
    run = midwatch.attach(settings(tmp_path, action=action))
    run.track(**parts_of(optimizer))
    began = time.perf_counter()
    for step in run.steps(run.resume(), 7):
        with run.phase("data_wait"):
            time.sleep(0.002)
        if step == 3:
            with run.phase("eval"):
                time.sleep(0.02)
        optimizer.step()
        run.log(loss=2.0, tokens=100, lr_group1=5.0)
    took = time.perf_counter() - began
    run.close()
    records = records_of(tmp_path)
    lines = [records[step] for step in (0, 2, 4, 6)]
    assert [line["lr"] for line in lines] == [0.1] * 4
    assert [line["lr_group1"] for line in lines] == [5.0] * 4, "the script's word stays"
    assert all(line["memory_rss_bytes"] > 0 and line["data_wait_s"] >= 0.002 for line in lines)
    assert all(0 < line["tokens_per_s"] < 100 / 0.002 for line in lines)
    assert "eval_s" not in lines[1]
    assert lines[2]["eval_s"] >= 0.01
    assert "communication_s" not in lines[3]
    assert not {"lr", "compute_s", "tokens_per_s", "loss_max"} & set(records[1])
    parts = [sum(line.get(part, 0.0) for part in ("data_wait_s", "eval_s", "compute_s")) for line in lines]
    steps = [records[step]["step_s"] for step in range(7)]
    whole = parts[0] + 2 * sum(parts[1:])
    assert whole == pytest.approx(sum(steps), rel=0.01, abs=1e-3), "no second is lost or counted twice"
    assert 7 * 0.002 < whole < took


def test_a_save_counts_in_the_step_after_it(tmp_path: Path) -> None:
    run = midwatch.attach({**settings(tmp_path, every=1), "checkpoint": {"interval": 2, "async_save": False}})
    run.track(**parts_of(optimizer_of(0.1)))
    for _ in run.steps(run.resume(), 5):
        run.log(loss=1.0)
    run.close()
    records = records_of(tmp_path)
    assert records[3]["checkpoint_s"] > records[4]["checkpoint_s"] == 0.0


def test_a_step_that_the_scaler_leaves_out_is_marked(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    run = midwatch.attach(settings(tmp_path))
    run.track(**parts_of(optimizer), scaler=scaler)
    for step in run.steps(run.resume(), 5):
        loss = parameter.square().sum() * (torch.inf if step in (0, 3) else 1.0)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        run.log(grad_norm=1.0)
    run.close()
    records = records_of(tmp_path)
    assert [step for step in range(5) if records[step].get("skipped")] == [0, 3]
    assert [records[step]["loss_scale"] for step in (0, 2, 4)] == [512.0, 512.0, 256.0]
    assert [records[step]["skipped_steps"] for step in (0, 2, 4)] == [1, 1, 2]


def test_the_rate_of_every_group_is_judged_without_being_logged(tmp_path: Path) -> None:
    optimizer = optimizer_of(0.1, 0.2)
    plan = {"kind": "constant", "peak_lr": 0.1}
    run = midwatch.attach(settings(tmp_path, schedule=plan, action="warn"))
    run.track(**parts_of(optimizer))
    for step in run.steps(run.resume(), 6):
        optimizer.param_groups[1]["lr"] = 0.2 if step < 4 else 0.1
        optimizer.step()
    run.close()
    found = [line for line in read_ledger(tmp_path / "ledger" / "a0001-r00000.jsonl") if line.event == "guard.found"]
    assert [(line.step, line.data["kind"]) for line in found] == [(4, "lr_off_plan")]
    assert "of group 1" in found[0].data["text"]


def test_on_rank_0_its_own_words_go_below_the_runs(tmp_path: Path) -> None:
    run = midwatch.attach(settings(tmp_path))
    run.track(**parts_of(optimizer_of(0.1)))
    for _ in run.steps(run.resume(), 2):
        run.log(loss=2.0)
        run.log_rank(loss=3.0, shard=4)
    run.close()
    record = records_of(tmp_path)[1]
    assert (record["loss"], record["shard"]) == (2.0, 4)


# --- several losses in a step -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_of_several_losses_the_last_one_counts_and_none_hides_that_another_was_not_finite(kind: Any) -> None:
    def judged_of(*losses: Any) -> dict[str, float]:
        readings = Readings()
        for loss in losses:
            readings.add({"loss": loss, "lr": loss})
        return readings.take().numbers()

    assert judged_of(kind(1.0), 7, kind(3.0)) == {"loss": 3.0, "lr": 3.0}
    for odd in (math.nan, math.inf, -math.inf):
        found = judged_of(kind(1.0), kind(odd), kind(2.0), None, 3)
        assert math.isnan(found["loss"])
        assert found["lr"] == 3.0
    assert judged_of(kind(1.0), "none")["loss"] == 1.0
    assert judged_of("none", kind(1.0))["loss"] == 1.0
