"""The parts of ``Run`` that need no process: settings, metrics, requests."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from midwatch.audit import Journal, read_journal  # noqa: E402
from midwatch.checkpoint import ControlGroup  # noqa: E402
from midwatch.config import Config, RankEnv, resolve_paths  # noqa: E402
from midwatch.core import CheckpointError, ConfigError  # noqa: E402
from midwatch.pulse import Flag  # noqa: E402
from midwatch.train.metrics import MetricLog  # noqa: E402
from midwatch.train.settings import fix_paths, load_settings  # noqa: E402
from midwatch.train.signals import Signals  # noqa: E402

pytestmark = pytest.mark.torch


def test_importing_midwatch_and_its_train_room_does_not_import_torch() -> None:
    code = "import sys, midwatch, midwatch.train, midwatch.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_the_documented_block_works_verbatim(tmp_path: Path) -> None:
    block = (
        "[checkpoint]\ninterval = 500 # steps\nasync_save = true\nshard = true\nkeep_last = 3\nsave_optimizer = true\n"
    )
    (tmp_path / "midwatch.toml").write_text(block)
    config = load_settings(tmp_path / "midwatch.toml", RankEnv())
    assert config == load_settings({"checkpoint": {"interval": 500}}, RankEnv())
    assert config == load_settings(None, RankEnv())


def test_the_launchers_explicit_values_win_and_its_defaults_do_not(tmp_path: Path) -> None:
    told = {"run": {}, "checkpoint": {"interval": 20, "keep_last": 3}, "train": {"lr": 1.0}}
    (tmp_path / "told.json").write_text(json.dumps(told))
    env = RankEnv(config_path=tmp_path / "told.json")
    config = load_settings({"checkpoint": {"interval": 50, "keep_last": 7}, "train": {"width": 8}}, env)
    assert (config.checkpoint.interval, config.checkpoint.keep_last) == (20, 7)
    assert config.train == {"width": 8, "lr": 1.0}


def test_a_value_told_for_an_inner_table_leaves_the_scripts_others_alone(tmp_path: Path) -> None:
    told = {"checkpoint": {"keep": {"best": 3}}, "train": {"opt": {"eps": 1.0}}}
    (tmp_path / "told.json").write_text(json.dumps(told))
    script = {"checkpoint": {"keep": {"best": 1, "every_steps": 1000}}, "train": {"opt": {"eps": 2.0, "name": "sgd"}}}
    config = load_settings(script, RankEnv(config_path=tmp_path / "told.json"))
    assert (config.checkpoint.keep.best, config.checkpoint.keep.every_steps) == (3, 1000)
    assert config.train == {"opt": {"eps": 1.0, "name": "sgd"}}


def test_the_signing_key_is_found_after_a_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEYS", "secret")
    config = load_settings({"checkpoint": {"trust": {"signing_key": "$KEYS/key"}}}, RankEnv())
    fixed = fix_paths(config.checkpoint, resolve_paths(config, RankEnv()))
    assert fixed.trust.signing_key == str(tmp_path / "secret" / "key")
    assert fix_paths(Config().checkpoint, resolve_paths(Config(), RankEnv())).trust.signing_key == ""


def test_a_reason_given_to_the_launcher_leaves_the_scripts_other_rules_alone(tmp_path: Path) -> None:
    told = {"checkpoint": {"resume": {"accept": "half the learning rate"}}}
    (tmp_path / "told.json").write_text(json.dumps(told))
    env = RankEnv(config_path=tmp_path / "told.json")
    config = load_settings({"checkpoint": {"resume": {"max_attempts": 9}}}, env)
    assert (config.checkpoint.resume.accept, config.checkpoint.resume.max_attempts) == ("half the learning rate", 9)


def test_a_misspelt_key_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings({"checkpoint": {"intervall": 5}}, RankEnv())
    assert caught.value.code == "CF101"


def test_metrics_reach_the_journal_every_few_steps_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "a0001.jsonl"
    log = MetricLog(Journal(path), every=3)
    for step in range(4):
        log.add(step, {"loss": torch.tensor(1.0 / (step + 1)), "tokens": 8})
        log.add(step, {"lr": 0.1})
    assert [record["step"] for record in read_journal([path])] == [0, 1, 2]
    assert log.latest() == {"loss": 0.25, "tokens": 8.0, "lr": 0.1}
    log.close()
    records = read_journal([path])
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert records[3]["loss"] == 0.25
    assert records[3]["lr"] == 0.1


def test_a_logged_tensor_does_not_follow_the_live_one() -> None:
    log = MetricLog(None, every=3)
    loss = torch.ones(1, requires_grad=True)
    log.add(0, {"loss": loss})
    with torch.no_grad():
        loss.zero_()
    assert log.latest() == {"loss": 1.0}


@pytest.mark.parametrize(
    "value",
    [torch.ones(2), [1], object(), np.ones(2), torch.tensor(1 + 2j), np.complex128(1j), torch.ones(1, device="meta")],
)
def test_what_is_not_one_number_is_refused_by_name(value: object) -> None:
    with pytest.raises(TypeError, match="gnorm"):
        MetricLog(None, every=3).add(0, {"gnorm": value})


def test_a_number_wider_than_a_float_is_one() -> None:
    log = MetricLog(None, every=3)
    log.add(0, {"loss": np.longdouble("2.5"), "count": np.int64(3)})
    assert log.latest() == {"loss": 2.5, "count": 3.0}


def test_a_flag_that_stays_up_asks_once() -> None:
    flags = [Flag.GO, Flag.GO | Flag.SAVE, Flag.GO | Flag.SAVE, Flag.GO, Flag.SAVE, Flag.GO | Flag.STOP]
    signals = Signals(ControlGroup(0, 1), iter(flags).__next__, lambda _: nullcontext())
    asked = [signals.at_boundary() for _ in flags]
    assert asked == [Flag(0), Flag.SAVE, Flag(0), Flag(0), Flag.SAVE, Flag.STOP]


def test_a_request_of_the_process_itself_is_taken_each_time() -> None:
    signals = Signals(ControlGroup(0, 1), lambda: Flag.GO, lambda _: nullcontext())
    for _ in range(2):
        signals.ask(Flag.SAVE)
        assert signals.at_boundary() == Flag.SAVE
    assert signals.at_boundary() == Flag(0)


def test_what_was_heard_with_other_numbers_is_acted_on_at_the_next_boundary_and_once() -> None:
    flags = [Flag.SAVE, Flag.SAVE, Flag.STOP]
    signals = Signals(ControlGroup(0, 1), iter(flags).__next__, lambda _: nullcontext())
    assert signals.take() == Flag.SAVE
    signals.heard(Flag.SAVE | Flag.STOP)
    signals.heard(Flag(0))
    assert signals.at_boundary() == Flag.SAVE | Flag.STOP
    assert signals.at_boundary() == Flag(0)
    assert signals.at_boundary() == Flag.STOP, "what nobody brought along is asked for as ever"


def test_what_was_heard_before_a_pause_is_asked_for_again_behind_it() -> None:
    signals = Signals(ControlGroup(0, 1), lambda: Flag.GO, lambda _: nullcontext())
    signals.heard(Flag.SAVE)
    signals.keep_for_later()
    assert signals.at_boundary() == Flag.SAVE


def test_several_ranks_without_a_process_group_are_refused() -> None:
    with pytest.raises(CheckpointError, match="init_process_group") as caught:
        ControlGroup(1, 2)
    assert caught.value.code == "CK205"


def test_a_script_that_logs_its_own_step_does_not_move_the_record(tmp_path: Path) -> None:
    path = tmp_path / "a0001.jsonl"
    log = MetricLog(Journal(path), every=3)
    for step in range(3):
        log.add(step, {"step": step * 1000, "attempt": 9, "loss": 1.0})
    log.close()
    assert [(record["step"], record["attempt"]) for record in read_journal([path])] == [(0, 1), (1, 1), (2, 1)]
