"""What a run does not save is said at its first save; how saving goes is in the metrics, the ledger and the exit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import midwatch  # noqa: E402
from midwatch.audit import read_journal, read_ledger  # noqa: E402
from midwatch.checkpoint import Checkpointer, Identity  # noqa: E402
from midwatch.checkpoint.lacking import missing_parts  # noqa: E402
from midwatch.checkpoint.tracked import Tracked  # noqa: E402
from midwatch.checkpoint.writer import WriterClient  # noqa: E402
from midwatch.config import CheckpointConfig  # noqa: E402
from midwatch.core import CheckpointError  # noqa: E402
from midwatch.testing import Notes  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.procs]

WAIT_S = 60.0


class Loader:
    """A position in the data."""

    def state_dict(self) -> dict[str, int]:
        return {"at": 1}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def whole_run() -> dict[str, Any]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "scaler": torch.amp.GradScaler("cpu"),
        "data": Loader(),
    }


@pytest.mark.parametrize("part", ["optimizer", "scheduler", "scaler", "data"])
def test_a_part_that_is_not_tracked_is_named_unless_it_is_absent_on_purpose(part: str) -> None:
    tracked = Tracked()
    tracked.add(**{name: value for name, value in whole_run().items() if name != part})
    assert list(missing_parts(tracked, CheckpointConfig())) == [part]
    assert missing_parts(tracked, CheckpointConfig(absent_on_purpose=(part,))) == {}


def test_a_complete_run_is_not_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    notes = Notes()
    ckpt = Checkpointer(tmp_path, CheckpointConfig(), identity=Identity(run="mine", attempt=1), recorder=notes)
    ckpt.track(**whole_run())
    ckpt.save(1)
    ckpt.close()
    assert not notes.of("checkpoint.incomplete")
    assert "NOT COMPLETE" not in caplog.text


def test_what_is_missing_is_said_loudly_and_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    notes = Notes()
    config = CheckpointConfig(save_optimizer=False, absent_on_purpose=("scaler",))
    ckpt = Checkpointer(tmp_path, config, identity=Identity(run="mine", attempt=1), recorder=notes)
    parts = whole_run()
    ckpt.track(model=parts["model"], optimizer=parts["optimizer"])
    ckpt.save(1)
    ckpt.save(2)
    ckpt.close()
    (said,) = notes.of("checkpoint.incomplete")
    assert said["missing"] == ["optimizer", "scheduler", "data"]
    (record,) = [record for record in caplog.records if "NOT COMPLETE" in record.message]
    assert record.levelno == logging.WARNING
    assert len(record.message.splitlines()) == 5
    assert "save_optimizer is false" in record.message
    assert "a resumed run sees data again" in record.message


def test_a_save_that_cannot_begin_is_counted_with_its_reason(tmp_path: Path) -> None:
    notes = Notes()
    ckpt = Checkpointer(tmp_path, CheckpointConfig(), identity=Identity(run="mine", attempt=1), recorder=notes)
    ckpt.track(model=torch.nn.Linear(2, 2), data=Loader())
    ckpt._tracked.data.state_dict = lambda: {"at": object()}
    for step in (1, 2):
        with pytest.raises(CheckpointError, match="cannot be saved"):
            ckpt.save(step)
    skipped = notes.of("checkpoint.skipped")
    assert [(data["code"], data["skipped"]) for data in skipped] == [("CK304", 1), ("CK304", 2)]
    assert ckpt.health.skipped == 2
    ckpt.close()


def run_of(run_dir: Path, **checkpoint: Any) -> Any:
    config = {"run": {"dir": str(run_dir), "log_every": 1}, "checkpoint": {"interval": 2, **checkpoint}}
    run = midwatch.attach(config)
    parts = whole_run()
    run.track(**parts)
    return run


def train(run: Any, total: int) -> None:
    start = run.resume()
    for _ in run.steps(start, total):
        run.log(loss=1.0)


def test_the_metrics_say_how_saving_goes(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", async_save=False)
    train(run, 8)
    run.close()
    records = list(read_journal((tmp_path / "run" / "metrics").iterdir()))
    last = records[-1]
    assert 0 < last["checkpoint_stall_s"] < 60
    assert last["checkpoint_failed_in_a_row"] == 0
    assert last["checkpoint_verified_age_steps"] == 1
    assert "checkpoint_stall_s" not in records[0]


def test_memory_is_taken_before_the_first_step(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    start = run.resume()
    steps = run.steps(start, 4)
    next(steps)
    (ledger,) = (tmp_path / "run" / "ledger").glob("a0001-*.jsonl")
    assert [line.event for line in read_ledger(ledger)].count("checkpoint.memory_taken") == 1
    list(steps)
    run.close()
    lines = [line.event for line in read_ledger(ledger)]
    assert lines.count("checkpoint.memory_taken") == 1, "the state was foreseen, so nothing grew"


def test_saves_that_keep_failing_are_an_event_a_metric_and_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = WriterClient.__init__

    def dying(self: WriterClient) -> None:
        original(self, "midwatch.no_such_writer")

    monkeypatch.setattr(WriterClient, "__init__", dying)
    run = run_of(tmp_path / "run", max_failed_saves=1, async_save=False)
    with pytest.raises(CheckpointError, match="saves in a row failed") as caught:
        train(run, 20)
    assert (caught.value.code, caught.value.exit_code) == ("CK302", 65)
    run.close()
    (ledger,) = (tmp_path / "run" / "ledger").glob("a0001-*.jsonl")
    assert [line.event for line in read_ledger(ledger)].count("checkpoint.failed") >= 2
    records = list(read_journal((tmp_path / "run" / "metrics").iterdir()))
    assert max(record.get("checkpoint_failed_in_a_row", 0) for record in records) >= 1
